"""Readable dumps of the captured, the flat and the prefix graph, through depyf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prepare_debug(directory: str) -> Iterator[None]:
    """``depyf.prepare_debug(directory)``, repaired where it breaks.

    Inside, every graph that ``grpo_pack`` compiles is written to `directory` as Python files named
    ``grpo_pack.captured`` and ``grpo_pack.flat``.
    """
    import depyf

    from .compat import depyf_repaired

    with depyf_repaired(), depyf.prepare_debug(directory):
        yield
