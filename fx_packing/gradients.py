"""Gradients of every parameter, compared through a few numbers each.

A sketch of a gradient G ``[m, n]`` is ``u[k] @ G @ w[k]`` for K pairs of random sign vectors: its mean
square over k estimates ``||G||_F^2`` (Rademacher projections; Achlioptas, "Database-friendly random
projections", 2003). It is linear in G, so the sketches of parts of a batch add up, an error in G shows
at its own size, and no gradient has to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_COUNT = 8  # K
_CHUNK = 1 << 24  # elements that are widened at a time


class Leaves:
    """Stand-ins for the arguments of a graph that need gradients: the same storage, but leaves of
    their own, so that neither ``.grad`` nor a hook of the user's parameters is touched."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.args = list(args)
        self._index: dict[int, int] = {}  # id of an argument -> the first place it has
        self._sketcher: Sketcher | None = None
        for i, arg in enumerate(self.args):
            if isinstance(arg, Tensor) and arg.requires_grad:
                first = self._index.setdefault(id(arg), i)
                self.args[i] = _leaf(arg) if first == i else self.args[first]

    @property
    def places(self) -> list[int]:
        """The arguments that need gradients, each once."""
        return list(self._index.values())

    def backward(self, loss: Tensor) -> Sketches:
        """The sketches of the gradients of `loss`, of which no more than one is held at a time."""
        leaves = {i: self.args[i] for i in self.places}
        if self._sketcher is None:
            self._sketcher = Sketcher(leaves)
        handles = [
            leaf.register_post_accumulate_grad_hook(partial(self._take, i)) for i, leaf in leaves.items()
        ]
        try:
            loss.backward(inputs=list(leaves.values()))
        finally:
            for handle in handles:
                handle.remove()
        return self._sketcher.finish()

    def _take(self, place: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            self._sketcher.take(place, gradient)


def _leaf(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(alias)
    return alias.requires_grad_()


@dataclass
class Sketches:
    """Those of some gradients, by number; of several parts of a batch they add up."""

    values: Tensor | None = None  # [n, K] float64, zeros where there was no gradient
    found: frozenset[int] = frozenset()  # numbers that had one

    def __add__(self, other: Sketches) -> Sketches:
        if self.values is None or other.values is None:
            return other if self.values is None else self
        return Sketches(self.values + other.values, self.found | other.found)

    def on_host(self) -> dict[int, Tensor]:
        """``[K]`` of each gradient that there was, by one copy."""
        rows = self.values.cpu() if self.values is not None else ()
        return {n: row for n, row in enumerate(rows) if n in self.found}


class Sketcher:
    """Sketches gradients of given shapes one after the other, with few launches for each: ``G @ w``
    of all is left in one tensor, and what follows is done for all at once."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        self._numbers = max(tensors, default=-1) + 1
        self._groups: dict[tuple, _Group] = {}
        self._found: set[int] = set()
        for number, tensor in tensors.items():
            key = (torch.promote_types(tensor.dtype, torch.float32), tensor.device)
            self._groups.setdefault(key, _Group(*key)).members[number] = _matrix(tensor).shape
        for group in self._groups.values():
            group.draw()

    @torch.no_grad()
    def take(self, number: int, gradient: Tensor) -> None:
        """One gradient, whose memory may be used again after it."""
        group = self._groups[torch.promote_types(gradient.dtype, torch.float32), gradient.device]
        group.multiply(number, _matrix(gradient))
        self._found.add(number)

    @torch.no_grad()
    def finish(self) -> Sketches:
        """The sketches of what was taken since the last time."""
        total = None
        for group in self._groups.values():
            found = group.reduce(self._numbers)
            total = found if total is None else total + found.to(total.device)
        found, self._found = frozenset(self._found), set()
        return Sketches(total, found)


class _Group:
    """The gradients of one dtype (at least float32) on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.members: dict[int, tuple[int, int]] = {}  # number -> m, n

    def draw(self) -> None:
        """The signs, always the same for the same shapes, and room for the products."""
        generator = torch.Generator(self.device).manual_seed(0)
        heights, widths = zip(*self.members.values(), strict=True)

        def signs(rows: int) -> Tensor:
            drawn = torch.empty(rows, _COUNT, dtype=torch.int8, device=self.device)
            return drawn.random_(0, 2, generator=generator).to(self.dtype).mul_(2).sub_(1)

        self.left, right = signs(sum(heights)), signs(sum(widths))
        self.products = torch.zeros_like(self.left)
        numbers = torch.tensor(list(self.members))
        self.owner = numbers.repeat_interleave(torch.tensor(heights)).to(self.device)
        self.right = dict(zip(self.members, right.split(widths), strict=True))
        self.rows = dict(zip(self.members, self.products.split(heights), strict=True))

    def multiply(self, number: int, matrix: Tensor) -> None:
        step = max(1, _CHUNK // matrix.shape[1])
        for part, out in zip(matrix.split(step), self.rows[number].split(step), strict=True):
            torch.mm(part.to(self.dtype), self.right[number], out=out)

    def reduce(self, numbers: int) -> Tensor:
        """``[n, K]``: the products times the signs on the left, summed; the room is zeros again."""
        total = self.left.new_zeros(numbers, _COUNT, dtype=torch.float64)
        total.index_add_(0, self.owner, self.products.mul_(self.left).double())
        self.products.zero_()
        return total


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.flatten(1) if gradient.dim() > 1 else gradient.view(-1, 1)


def size(sketched: Tensor | None) -> float:
    """The estimated Frobenius norm."""
    return 0.0 if sketched is None else float(sketched.square().mean().sqrt())


@contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Casts of weights that are made inside are not found by the user's operations after it: one made
    without gradients, taken from autocast's cache, would cut off the gradient of that weight."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
