"""Random batches, and the dense attention that plans, masks and kernels are compared with."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fx_packing.forest import Plan


def random_batch(
    rng: random.Random, rows: int = 6, columns: int = 8, alphabet: int = 2
) -> tuple[Tensor, Tensor]:
    """``mask, ids`` ``[B, L]`` of a size up to ``rows`` and ``columns``: few letters, so rows
    share prefixes, repeat and contain each other; holes, empty rows, left and right padding.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    size = rng.randint(1, rows), rng.randint(1, columns)
    ids = torch.randint(alphabet, size, generator=generator)
    if rng.random() < 0.5:  # a prompt in common
        ids[:, : size[1] // 2] = ids[:1, : size[1] // 2].clone()
    holes = torch.rand(size, generator=generator) < rng.choice((0.3, 0.8, 1.0, 1.0))
    cut = torch.randint(size[1] + 1, (size[0], 1), generator=generator)
    inside = torch.arange(size[1]) < cut if rng.random() < 0.5 else torch.arange(size[1]) >= cut
    return holes & (inside | (rng.random() < 0.5)), ids


def paths(mask: Tensor, ids: Tensor) -> list[list[int]]:
    """Each row's real tokens, as Python numbers."""
    rows = zip(mask, ids, strict=True)
    return [row[real].tolist() for real, row in rows]


def dense(plan: Plan, window: int | None = None) -> Tensor:
    """``[T_pad, T_pad]`` bool: what each stored token may see, straight from the definition."""
    index = torch.arange(plan.length, device=plan.end.device)
    keep = (index <= index[:, None]) & (index[:, None] < plan.end)
    return keep if window is None else keep & (plan.depth[:, None] - plan.depth < window)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention spelled out, in the dtype of its inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v


def qkv(
    plan: Plan,
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    seed: int = 0,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves q ``[1, H, T_pad, D]``, k and v; ``options`` go to ``Tensor.to``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
    return tuple(
        torch.randn(1, h, plan.length, d, generator=generator, dtype=torch.float64).to(**options)
        for h, d in shapes
    )
