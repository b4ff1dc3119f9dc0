"""The plan of a batch: every token sees exactly its own row, and each prefix is stored once."""

from __future__ import annotations

import random

import pytest
import torch
from forests import dense, paths, random_batch
from torch.utils._python_dispatch import TorchDispatchMode

from fx_packing.forest import make_plan

LAYOUTS = ("varlen", "prefix")


def check(mask, ids, plan, same=None):
    """Everything a plan promises, by plain Python. ``same`` spells tokens as comparable values."""
    rows = paths(mask, ids)
    names = paths(mask, same) if same is not None else rows
    keep, slots, stored = dense(plan), [], set()
    for b, row in enumerate(rows):
        slot = plan.slot[b][mask[b]].tolist()
        slots += slot
        assert (plan.slot[b][~mask[b]] == -1).all()
        assert plan.depth[slot].tolist() == list(range(len(row)))
        assert ids.flatten()[plan.source[slot]].tolist() == row
        for i, s in enumerate(slot):
            assert keep[s].nonzero().flatten().tolist() == sorted(slot[: i + 1])
            stored.add((b if plan.layout == "varlen" else -1, *names[b][: i + 1]))
    assert plan.run_tokens == len(stored) == len(set(slots))
    assert set(slots) == set(range(plan.run_tokens))
    assert plan.real_tokens == sum(map(len, rows)) == len(slots)
    assert plan.longest == max(map(len, rows))
    pads = torch.arange(plan.run_tokens, plan.length)
    assert plan.end[pads].tolist() == (pads + 1).tolist()
    assert not plan.source[pads].any() and not plan.depth[pads].any()
    assert (plan.rows, plan.columns) == tuple(mask.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_forests(layout):
    rng = random.Random(0)
    for _ in range(1000):
        mask, ids = random_batch(rng, alphabet=rng.choice((1, 2, 3)))
        block = rng.choice((1, 4, 128))
        plan = make_plan(mask, [ids], layout=layout, block=block)
        assert plan.length % block == 0
        assert plan.length == max(-(-plan.run_tokens // block), 2) * block
        check(mask, ids, plan)


def test_two_keys():
    """Two tokens are the same only where all keys are."""
    rng = random.Random(1)
    for _ in range(200):
        mask, ids = random_batch(rng)
        positions = random_batch(rng, *mask.shape)[1][:1, :1] + torch.randint(2, mask.shape)
        plan = make_plan(mask, [ids, positions], layout="prefix", block=4)
        check(mask, ids, plan, same=ids * 10 + positions)


def test_extreme_ids():
    big = 2**63 - 1
    ids = torch.tensor([[big, -big - 1, 7], [big, -big - 1, 0], [-big - 1, big, 0], [0, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    plan = make_plan(mask, [ids], layout="prefix")
    assert plan.run_tokens == 9
    check(mask, ids, plan)


def test_many_rows_of_many_tokens():
    """Several rounds of ranking, with odd sizes, and the order of the rows does not matter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, (200, 331), generator=generator)
    ids[:, :300] = ids[torch.arange(200) // 7, :300]
    mask = torch.rand(200, 1, generator=generator) * 400 > torch.arange(331)
    rows = paths(mask, ids)
    expected = len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    for _ in range(3):
        assert make_plan(mask, [ids], layout="prefix").run_tokens == expected
        order = torch.randperm(200, generator=generator)
        mask, ids = mask[order], ids[order]


def test_a_tree_of_prompts():
    """One system prompt, two questions, two answers each; one answer is the start of another."""
    system, first, second = [9, 9, 9], [1, 1], [2]
    rows = [
        system + second + [5],
        system + first + [3, 4],
        system + first + [3],
        system + second + [6, 7],
    ]
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    mask = torch.arange(7) < torch.tensor([[len(row)] for row in rows])
    plan = make_plan(mask, [ids], layout="prefix")
    check(mask, ids, plan)
    assert plan.run_tokens == 11
    assert ids.flatten()[plan.source[:11]].tolist() == [9, 9, 9, 1, 1, 3, 4, 2, 5, 6, 7]
    assert plan.end[:11].tolist() == [11, 11, 11, 7, 7, 7, 7, 11, 9, 11, 11]
    runs = [[0, 3, -1], [3, 7, 0], [7, 8, 0], [8, 9, 2], [9, 11, 2]]
    assert plan.segments().tolist() == [5, 11, *sum(runs, [])]
    assert plan.segments() is plan.segments()
    with pytest.raises(ValueError, match="layout 'prefix'"):
        _ = plan.cu_seqlens


def test_chains_and_their_bounds():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    plan = make_plan(mask, layout="varlen")
    assert plan.slot.tolist() == [[0, 1, 2], [-1, -1, -1], [-1, 3, -1]]
    assert plan.cu_seqlens.tolist() == [0, 3, 3, 4, 256]
    assert plan.cu_seqlens.dtype == torch.int32
    assert plan.segments().tolist() == [2, 4, 0, 3, -1, 3, 4, -1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_real_token(layout):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    plan = make_plan(mask, [torch.ones(2, 3, dtype=torch.int64)], layout=layout)
    assert (plan.run_tokens, plan.real_tokens, plan.longest, plan.length) == (0, 0, 0, 256)
    assert (plan.slot == -1).all()
    assert plan.end.tolist() == list(range(1, 257))
    assert plan.segments().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("width", (1, 3, 8))
def test_embeddings(dtype, width):
    """Vectors are compared bit for bit, wherever they lie in memory."""
    rng = random.Random(2)
    for offset in range(40):
        mask, ids = random_batch(rng, alphabet=3)
        table = torch.randn(3, width).to(dtype)
        flat = torch.cat((torch.zeros(offset % 5, dtype=dtype), table[ids].flatten()))
        vectors = flat[offset % 5 :].view(*ids.shape, width)
        check(mask, ids, make_plan(mask, [vectors], layout="prefix", block=4))


def test_embeddings_that_compare_strangely():
    nan, mask = float("nan"), torch.ones(4, 1, dtype=torch.bool)
    vectors = torch.tensor([[[0.0, nan]], [[-0.0, nan]], [[0.0, nan]], [[-0.0, 1.0]]])
    plan = make_plan(mask, [vectors], layout="prefix")
    assert plan.run_tokens == 3
    assert plan.slot[0] == plan.slot[2]


def test_memory_is_linear():
    """No intermediate outgrows the batch, whatever the number of tokens."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    ids = torch.randint(2, (32, 500))
    with Largest() as largest:
        make_plan(torch.ones(32, 500, dtype=torch.bool), [ids], layout="prefix")
    assert largest.numel <= 3.1 * ids.numel()  # three numbers a token are made together


def test_leaves_no_trace():
    """The global random state stays; nothing is an inference tensor, so all can be saved."""
    state = torch.get_rng_state()
    with torch.inference_mode():
        mask = torch.ones(2, 3, dtype=torch.bool)
        keys = [torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)]
        plan = make_plan(mask, keys, layout="prefix")
        chains = make_plan(mask, layout="varlen")
        tensors = [plan.source, plan.depth, plan.end, plan.slot, plan.segments()]
        tensors += [chains.cu_seqlens, chains.starts]
    assert not any(tensor.is_inference() for tensor in tensors)
    assert torch.equal(state, torch.get_rng_state())


def test_errors():
    mask = torch.ones(2, 3, dtype=torch.bool)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="unknown layout 'tree'.*varlen, prefix"):
        make_plan(mask, [ids], layout="tree")
    for bad in (mask.long(), mask[0], mask[:, :0], mask[:0]):
        with pytest.raises(ValueError, match="non-empty"):
            make_plan(bad, [ids], layout="prefix")
    with pytest.raises(ValueError, match="at least one key"):
        make_plan(mask, layout="prefix")
    with pytest.raises(ValueError, match="key of shape"):
        make_plan(mask, [ids[:, :2]], layout="prefix")
