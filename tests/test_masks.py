"""The closed-form block masks against the dense mask."""

from __future__ import annotations

import random

import pytest
import torch
from forests import dense, random_batch
from torch.nn.attention.flex_attention import create_mask

from fx_packing.forest import make_plan
from fx_packing.masks import block_tensors, mask_mod


def blocks_of(counts, indices):
    """``[n, n]`` bool from a block mask's counts and indices."""
    out = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, (count, listed) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
        chosen = listed[:count].long()
        assert (chosen.diff() > 0).all()
        out[row, chosen] = True
    return out


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("window", (None, 1, 3, 10))
def test_random_forests(layout, window):
    rng = random.Random(0)
    needed = extra = 0
    for _ in range(300):
        mask, ids = random_batch(rng, columns=30)
        block = rng.choice((2, 4, 8))
        plan = make_plan(mask, [ids], layout=layout, block=block)
        tensors = block_tensors(plan.end, plan.depth, window, block)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
        assert not any(t.is_inference() for t in tensors)

        size = plan.length // block
        pairs = dense(plan, window).view(size, block, size, block).transpose(1, 2).flatten(2)
        partial, full = blocks_of(*tensors[:2]), blocks_of(*tensors[2:4])
        assert torch.equal(blocks_of(*tensors[4:6]), partial.T)
        assert torch.equal(blocks_of(*tensors[6:]), full.T)
        assert not (partial & full).any()
        assert torch.equal(full, pairs.all(-1))
        assert not (pairs.any(-1) & ~(partial | full)).any()
        needed += int(pairs.any(-1).sum())
        extra += int(((partial | full) & ~pairs.any(-1)).sum())
    if window is None or layout == "varlen":
        assert extra == 0
    assert extra < 0.2 * needed


def test_mask_mod():
    rng = random.Random(1)
    for window in (None, 2, 5):
        mask, ids = random_batch(rng, columns=30)
        plan = make_plan(mask, [ids], layout="prefix", block=4)
        mod = mask_mod(plan.end, plan.depth, window)
        made = create_mask(mod, 1, 1, plan.length, plan.length, device="cpu")
        assert torch.equal(made[0, 0], dense(plan, window))


def test_one_block_and_no_token():
    end, depth = torch.arange(1, 129), torch.zeros(128, dtype=torch.int64)
    tensors = block_tensors(end, depth, 4)
    assert [tuple(t.shape) for t in tensors] == [(1, 1, 1), (1, 1, 1, 1)] * 4
    assert [int(t) for t in tensors] == [1, 0, 0, 0, 1, 0, 0, 0]


def test_made_in_inference_mode():
    with torch.inference_mode():
        plan = make_plan(torch.ones(2, 200, dtype=torch.bool), layout="varlen")
        tensors = block_tensors(plan.end)
    assert not any(t.is_inference() for t in tensors)


def test_errors():
    end = torch.arange(1, 131)
    with pytest.raises(ValueError, match="whole number of blocks"):
        block_tensors(end)
    with pytest.raises(ValueError, match="needs the depths"):
        block_tensors(end[:128], window=3)
