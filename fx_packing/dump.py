"""Readable dumps of the captured, the flat and the prefix graph, through depyf.

Three files a graph, ``__compiled_fn_N.grpo_pack.NAME.0.py``:

    captured     the padded graph, as Dynamo gave it
    flat         the rewritten one, with one ``attend`` an attention: what runs on CPUs, for each layout
    prefix       the same with FlexAttention nodes, masks and scores among them: what runs on CUDA where
                 prefixes are shared. Written wherever the layout may be ``prefix``, on CPUs for reading
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prepare_debug(directory: str) -> Iterator[None]:
    """``depyf.prepare_debug(directory)``, repaired where it breaks.

    Inside, every graph that ``grpo_pack`` compiles is written to `directory` as Python files, named as
    this module says.
    """
    import depyf

    from .compat import depyf_repaired

    with depyf_repaired(), depyf.prepare_debug(directory):
        yield
