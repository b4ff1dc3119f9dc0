"""What the checks of one rewritten graph have shown so far: for whom, and up to which sizes.

A verdict belongs to (parameters, layout, gradient mode): a policy and a reference model that share a
captured graph get one each. Parameters are told apart by identity, so new weights in the same tensors
keep a verdict and a swapped adapter does not inherit it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

_GROWTH = 1.25  # a verified size vouches for sizes up to this many times as large
_SMALL_FAILURES = 3  # small mismatches after which no size is tried any more
_EAGER_TRIES = 4  # batches that prove nothing, after which only every power of two is tried


class Extent(NamedTuple):
    """The sizes of one batch that kernels and positions may depend on."""

    tokens: int  # T, as stored
    longest: int  # tokens of the longest row
    rows: int
    read: int = 0  # tokens whose result is read through a slice of the sequence, of the widest one

    def within(self, other: Extent) -> bool:
        """Whether each size is at most the other's, give or take the growth that is vouched for."""
        return all(a <= b * _GROWTH for a, b in zip(self, other, strict=True))

    def joined(self, other: Extent) -> Extent:
        """The larger of each size."""
        return Extent(*map(max, self, other))


@dataclass
class Verdict:
    """`verified`: the sizes that passed. `unsafe`: the sizes from which it was wrong by little.
    `off`: why it is switched off for good."""

    verified: Extent | None = None
    unsafe: Extent | None = None
    off: str | None = None
    _failures: int = 0
    _open: int = 0
    _seen: int = 0

    def blocks(self, extent: Extent) -> str | None:
        """Why a batch of these sizes is not to be packed, before anything of it is run."""
        if self.off is not None:
            return self.off
        if self.unsafe and (extent.tokens >= self.unsafe.tokens or extent.longest >= self.unsafe.longest):
            return (
                f"an earlier check found the packed result imprecise from {self.unsafe.tokens} tokens or "
                f"rows of {self.unsafe.longest} on"
            )
        return None

    def due(self, extent: Extent) -> bool:
        """Whether a batch of these sizes has to be checked: the first, one that outgrew what was
        verified, or one after others that proved nothing (rarely, where many did)."""
        if self.verified is not None:
            return not extent.within(self.verified)
        self._seen += 1
        return self._open < _EAGER_TRIES or self._seen & (self._seen - 1) == 0

    def passed(self, extent: Extent) -> None:
        """Record a check that passed."""
        self.verified = extent if self.verified is None else self.verified.joined(extent)

    def left_open(self) -> None:
        """Record a check of a batch that proved nothing."""
        self._open += 1

    def failed(self, extent: Extent, why: str, *, small: bool) -> None:
        """Record a mismatch: a small one makes these sizes unsafe, any other ends it for good."""
        self._failures += 1
        if not small or self._failures >= _SMALL_FAILURES:
            self.off = why
            return
        before = self.verified
        grown = (not before or extent.tokens > before.tokens, not before or extent.longest > before.longest)
        never = 2**62
        if not any(grown):
            grown = (True, True)
        found = Extent(
            extent.tokens if grown[0] else never,
            extent.longest if grown[1] else never,
            extent.rows,
            extent.read,
        )
        self.unsafe = found if self.unsafe is None else Extent(*map(min, self.unsafe, found))


@dataclass
class Verdicts:
    """The verdicts of one captured graph."""

    _known: dict[tuple, tuple[list[weakref.ref], Verdict]] = field(default_factory=dict)

    def of(self, parameters: Sequence[Tensor], mode: tuple) -> Verdict:
        """The verdict of these very tensors in this mode (layout, gradient mode); a new one if there
        is none. Ids are used again once a model is gone, so the tensors must still be alive."""
        key = (mode, tuple(map(id, parameters)))
        known = self._known.get(key)
        if known is None or any(r() is not p for r, p in zip(known[0], parameters, strict=True)):
            self._known = {k: v for k, v in self._known.items() if all(r() is not None for r in v[0])}
            known = self._known[key] = ([weakref.ref(p) for p in parameters], Verdict())
        return known[1]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
