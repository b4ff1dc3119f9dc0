"""Models are compiled once a setting and kept for all tests of this folder; each starts as if nothing ran."""

from __future__ import annotations

import packing
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def nothing_of_before():
    """What other folders compiled does not count against the recompile limits here."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def clean_slate():
    """In place of the one of all tests, which would drop the compiled models as well."""
    packing.forget_runs()
