"""The opt-out flag.

`ENABLED` is read by a Dynamo guard (so a toggle selects another cache entry, and toggling back hits
the cache) and again at run time (a user's `guard_filter_fn` may drop guards).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENABLED: bool = os.environ.get("FX_PACKING", "1").strip().lower() not in ("0", "false", "off", "no")

_lock = threading.Lock()
_initial = ENABLED
_depth = 0


@contextmanager
def disabled() -> Iterator[None]:
    """Inside this context every callable compiled with ``grpo_pack`` runs as captured.

    Nests, and holds for the whole process: while any thread is inside, no thread packs.
    """
    global ENABLED, _depth
    with _lock:
        _depth += 1
        ENABLED = False
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            ENABLED = _initial and _depth == 0
