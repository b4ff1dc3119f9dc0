"""Gradients of every parameter, compared through a few numbers each.

A sketch of a gradient G ``[m, n]`` is ``u[k] @ G @ w[k]`` for K pairs of random sign vectors: its mean
square over k estimates ``||G||_F^2`` (Rademacher projections; Achlioptas, "Database-friendly random
projections", 2003). It is linear in G, so the sketches of parts of a batch add up, an error in G shows
at its own size, and no gradient has to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
        self._signs: dict[int, tuple[Tensor, Tensor]] = {}  # place -> those of its sketches
        for i, arg in enumerate(self.args):
            if isinstance(arg, Tensor) and arg.requires_grad:
                first = self._index.setdefault(id(arg), i)
                self.args[i] = _leaf(arg) if first == i else self.args[first]

    @property
    def places(self) -> list[int]:
        """The arguments that need gradients, each once."""
        return list(self._index.values())

    def backward(self, loss: Tensor, into: dict[int, Tensor]) -> None:
        """Add the sketches of the gradients of `loss` to `into`, by argument, one at a time."""
        handles = [
            self.args[i].register_post_accumulate_grad_hook(lambda leaf, i=i: self._take(leaf, i, into))
            for i in self.places
        ]
        try:
            loss.backward(inputs=[self.args[i] for i in self.places])
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, leaf: Tensor, place: int, into: dict[int, Tensor]) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            return
        if place not in self._signs:
            self._signs[place] = draw_signs(gradient, place)
        found = sketch(gradient, *self._signs[place])
        into[place] = into[place] + found if place in into else found


def _leaf(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(alias)
    return alias.requires_grad_()


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.flatten(1) if gradient.dim() > 1 else gradient.view(-1, 1)


def draw_signs(gradient: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """``[m, K]`` and ``[n, K]`` random signs for a gradient of this shape, the same for the same seed."""
    matrix = _matrix(gradient)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    generator = torch.Generator(matrix.device).manual_seed(seed)

    def signs(n: int) -> Tensor:
        drawn = torch.randint(0, 2, (n, _COUNT), device=matrix.device, generator=generator)
        return drawn.to(wide).mul_(2).sub_(1)

    return signs(matrix.shape[0]), signs(matrix.shape[1])


@torch.no_grad()
def sketch(gradient: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``[K]`` float64, with the signs that were drawn for it."""
    matrix = _matrix(gradient)
    step = max(1, _CHUNK // matrix.shape[1])
    parts = [
        ((rows.to(right.dtype) @ right) * weights).sum(0).double()
        for rows, weights in zip(matrix.split(step), left.split(step), strict=True)
    ]
    return sum(parts[1:], start=parts[0])


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
