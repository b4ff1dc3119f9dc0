"""Run the tail of a flat graph in tiles of tokens, so that no ``[tokens, vocabulary]`` tensor exists.

    forward    for each tile:  logits = linear(h, W);  out = rest(logits, ..)           nothing kept
    backward   for each tile:  logits and out once more;  dlogits = d rest;  dh = dlogits @ W
                               dW += dlogits^T @ h,  summed in at least float32

The tile's logits are the only tensor of its width, but for what `rest` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = 1 << 28  # of the logits of one tile
_LEAST = 256  # tokens of a tile
_ROWS = 1 << 14  # of the weight whose gradient is widened at a time


def tile_bounds(tokens: int, width: int) -> list[tuple[int, int]]:
    """Tiles of nearly equal length whose logits have about `_ELEMENTS` elements."""
    count = -(-tokens // max(_ELEMENTS // width, _LEAST))
    return [(tokens * i // count, tokens * (i + 1) // count) for i in range(count)]


def run(
    rest: Callable[..., Sequence[Tensor]],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: Sequence[Tensor],
    dims: Sequence[int | None],
    hidden_dim: int,
    out_dims: Sequence[int],
) -> tuple[Tensor, ...]:
    """``rest(linear(hidden, weight, bias), *others)``, tile by tile along the dimensions that hold the
    tokens: `hidden_dim`, `dims` of `others` (None: the same for all tokens), `out_dims` of the results.

    `hidden` ``[.., N, .., H]`` and `weight` ``[V, H]`` in one floating dtype, or under autocast. The
    gradients of `weight`, `bias` and `others` are summed in at least float32 over the tiles.
    """
    return _Tiled.apply(rest, tuple(dims), hidden_dim, tuple(out_dims), hidden, weight, bias, *others)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest, dims, hidden_dim, out_dims, hidden, weight, bias, *others):
        ctx.rest, ctx.dims, ctx.hidden_dim, ctx.out_dims = rest, dims, hidden_dim, out_dims
        ctx.save_for_backward(hidden, weight, bias, *others)
        device = hidden.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        head = _cast(ctx.autocast, hidden, weight, bias)
        results: list[list[Tensor]] = []
        for low, high in _bounds(hidden, hidden_dim, weight):
            logits = F.linear(head[0].narrow(hidden_dim, low, high - low), *head[1:])
            results.append(list(rest(logits, *_part(others, dims, low, high))))
            del logits
        whole = [torch.cat(parts, d) for parts, d in zip(zip(*results, strict=True), out_dims, strict=True)]
        ctx.mark_non_differentiable(*(w for w in whole if not w.is_floating_point()))
        return tuple(whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        hidden, weight, bias, *others = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        device, dtype, enabled = ctx.autocast
        head = _cast(ctx.autocast, hidden, weight, bias)
        total = _Totals(wanted, hidden, weight, bias, others, ctx.dims, ctx.hidden_dim)
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            for low, high in _bounds(hidden, ctx.hidden_dim, weight):
                h = head[0].narrow(ctx.hidden_dim, low, high - low)
                with torch.no_grad():
                    logits = F.linear(h, *head[1:])
                leaves = [_leaf(logits, True)]
                leaves += [
                    _leaf(o, w) for o, w in zip(_part(others, ctx.dims, low, high), wanted[3:], strict=True)
                ]
                del logits
                with torch.enable_grad():
                    results = ctx.rest(*leaves)
                pairs = [
                    (r, g.narrow(d, low, high - low))
                    for r, g, d in zip(results, grads, ctx.out_dims, strict=True)
                    if g is not None and r.requires_grad
                ]
                needed = [leaf for leaf in leaves if leaf.requires_grad]
                found = iter(
                    torch.autograd.grad(
                        [r for r, _ in pairs], needed, [g for _, g in pairs], allow_unused=True
                    )
                    if pairs
                    else [None] * len(needed)
                )
                total.add(low, high, h, head[1], [next(found) if x.requires_grad else None for x in leaves])
        return (None, None, None, None, *total.results())


class _Totals:
    """The gradients, summed over tiles."""

    def __init__(self, wanted, hidden, weight, bias, others, dims, hidden_dim) -> None:
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight, self.bias = (
            torch.zeros_like(t, dtype=_wide(t)) if w else None
            for t, w in zip((weight, bias), wanted[1:3], strict=True)
        )
        self.others = [
            torch.zeros_like(o, dtype=o.dtype if d is not None else _wide(o)) if w else None
            for o, d, w in zip(others, dims, wanted[3:], strict=True)
        ]
        self.dims, self.hidden_dim = dims, hidden_dim
        self.dtypes = [t.dtype if t is not None else None for t in (hidden, weight, bias, *others)]

    def add(self, low, high, h, weight, found) -> None:
        """The gradients of one tile: of the logits, and of the other inputs."""
        logits, *others = found
        if logits is not None:
            flat, rows = logits.flatten(0, -2), h.flatten(0, -2)
            if self.hidden is not None:
                self.hidden.narrow(self.hidden_dim, low, high - low).copy_(logits @ weight)
            if self.weight is not None:
                _add_product(self.weight, flat, rows)
            if self.bias is not None:
                self.bias += flat.sum(0, dtype=self.bias.dtype)
        elif self.hidden is not None:
            self.hidden.narrow(self.hidden_dim, low, high - low).zero_()
        for total, dim, gradient in zip(self.others, self.dims, others, strict=True):
            if total is not None and gradient is not None:
                part = total if dim is None else total.narrow(dim, low, high - low)
                part += gradient

    def results(self) -> list[Tensor | None]:
        """In the dtypes of the inputs."""
        found = [self.hidden, self.weight, self.bias, *self.others]
        return [f if f is None else f.to(d) for f, d in zip(found, self.dtypes, strict=True)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left^T @ right`` without another tensor of its size."""
    if total.dtype == left.dtype == right.dtype:
        total.addmm_(left.T, right)
        return
    if _adds_wide(total, left, right):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        return
    for low in range(0, len(total), _ROWS):  # half precision: each product rounds once, the sum does not
        total[low : low + _ROWS] += left[:, low : low + _ROWS].T @ right


def _adds_wide(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether cuBLAS adds products of half precision to a total in float32 by itself."""
    halves = left.dtype == right.dtype and left.dtype in (torch.float16, torch.bfloat16)
    return halves and total.dtype == torch.float32 and total.is_cuda and torch.version.hip is None


def _bounds(hidden: Tensor, dim: int, weight: Tensor) -> list[tuple[int, int]]:
    return tile_bounds(hidden.shape[dim], weight.shape[0])


def _part(others: Sequence[Tensor], dims: Sequence[int | None], low: int, high: int) -> list[Tensor]:
    return [o if d is None else o.narrow(d, low, high - low) for o, d in zip(others, dims, strict=True)]


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.detach().requires_grad_() if wanted else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _cast(autocast: tuple, *tensors: Tensor | None) -> list[Tensor | None]:
    """What autocast would cast for each tile, cast once."""
    _, dtype, enabled = autocast
    casts = enabled and all(t is None or t.is_floating_point() for t in tensors)
    return [t if t is None or not casts or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
