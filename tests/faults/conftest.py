"""Models are compiled once a setting and kept for all tests of this folder; each starts as if nothing ran."""

from __future__ import annotations

import packing
import pytest
import tiny
import torch

from fx_packing import tiles


@pytest.fixture(scope="session", autouse=True)
def nothing_of_before():
    """What other folders compiled does not count against the recompile limits here."""
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """The tail of so small a vocabulary runs in several tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_ELEMENTS", 30 * tiny.VOCAB)
        patch.setattr(tiles, "_LEAST", 3)
        yield


@pytest.fixture(autouse=True)
def clean_slate():
    """In place of the one of all tests, which would drop the compiled models as well."""
    packing.forget_runs()
