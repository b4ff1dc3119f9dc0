"""FlexAttention masks of a forest, in closed form.

``keep(q, kv) = kv <= q and q < end[kv]``, and ``depth[q] - depth[kv] < window`` under a sliding
window. Whether a 128 x 128 block holds all, some or none of the kept pairs follows from a few
minima and maxima per block, so nothing of size ``[T, T]`` is ever built::

    kv:  0 1 2 3        # full: every pair kept, the kernel skips the mask
    q 0  P . . .        P partial: the kernel evaluates mask_mod
      1  # P . .        . empty: the kernel does not look at it
      2  # # P .
      3  . . P P
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128


class BlockTensors(NamedTuple):
    """The tensors of a ``BlockMask``, in the order and under the names of its constructor.

    All int32, contiguous: counts ``[1, 1, n]``, indices ``[1, 1, n, n]`` ascending in the
    first ``count`` places of each row and 0 behind them.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def mask_mod(
    end: Tensor, depth: Tensor | None = None, window: int | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's ``mask_mod`` of the forest; ``depth`` is used only with a window."""

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (q < end[kv])

    def keep_near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (q < end[kv]) & (depth[q] - depth[kv] < window)

    return keep if window is None else keep_near


def block_tensors(
    end: Tensor, depth: Tensor | None = None, window: int | None = None, block: int = BLOCK
) -> BlockTensors:
    """The block mask of a forest given ``end`` (``[T_pad]``, and ``depth`` if there is a window).

    Without a window every block is classified exactly. With one, an empty block may be called
    partial where a tree branches (never in chains), which costs time and changes no value.
    O((T / block) ** 2) memory, no host synchronisation. Raises ValueError when T_pad is not a
    whole number of blocks or ``depth`` is missing.
    """
    if end.dim() != 1 or len(end) == 0 or len(end) % block:
        raise ValueError(f"expected a whole number of blocks of {block}, got {list(end.shape)}")
    if window is not None and depth is None:
        raise ValueError("a sliding window needs the depths")
    # FlexAttention saves these for its backward, which inference tensors do not allow.
    with torch.inference_mode(False), torch.no_grad():
        partial, full = _classify(end, depth, window, block)
        blocks = torch.stack((partial, full, partial.T, full.T))
        return BlockTensors(*_lists(blocks[:, None, None]))


def _classify(end: Tensor, depth: Tensor | None, window: int | None, block: int) -> tuple[Tensor, Tensor]:
    """``partial, full``: ``[n, n]`` bool by query block and key block."""
    ends = end.view(-1, block)
    bounds = torch.arange(0, len(end) + 1, block, device=end.device)[:, None]
    first, behind = bounds[:-1], bounds[1:]  # the first query of each block, the one behind its last
    lowest, highest = ends.aminmax(dim=1)
    # A key of an earlier block is kept by some query of a block iff it is an ancestor of, so
    # kept by, the block's first query; it is kept by all iff it is kept by the last one. A token
    # always sees itself, and never one behind it: the diagonal is partial.
    some = (highest > first).tril()
    full = (lowest >= behind).tril(-1)
    if window is not None:
        depths = depth.view(-1, block)
        shallowest, deepest = depths.aminmax(dim=1)
        # The nearest query that any key of the block can reach, and the nearest key whose
        # subtree leaves its block, as the keys seen from later blocks all do.
        reach = (highest - 1 - first).clamp(0, block - 1)
        nearest_q = depths.cummin(1).values.gather(1, reach)
        nearest_kv = torch.where(ends > behind, depths, -1).amax(1)
        some &= nearest_q - nearest_kv < window
        full &= deepest[:, None] - shallowest < window
        some.fill_diagonal_(True)
    return some > full, full


def _lists(blocks: Tensor) -> list[Tensor]:
    """Counts and indices of the True places in each row, of each ``[1, 1, n, n]`` in turn.

    All are made together, since it is launches that they cost; what is returned are tensors of
    their own, as Dynamo would trace a view together with its base.
    """
    size = blocks.shape[-1]
    count = blocks.cumsum(-1)
    counts = [each.int() for each in count[..., -1].unbind()]
    # A True place goes to its number among those of its row; the others go to a spare place 0.
    place = count.mul_(blocks)
    column = torch.arange(size, device=blocks.device).expand_as(blocks)
    indices = place.new_zeros(*blocks.shape[:-1], size + 1).scatter_(-1, place, column)
    indices = [each.int() for each in indices[..., 1:].unbind()]
    return [tensor for pair in zip(counts, indices, strict=True) for tensor in pair]
