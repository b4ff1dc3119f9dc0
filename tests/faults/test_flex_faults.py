"""Faults of FlexAttention's masks: of the blocks that its kernel visits, and of what it asks in them.

On the CPU there is no backward, so there only scores are compared, and compiling takes a while: slow.
"""

from __future__ import annotations

from collections.abc import Callable

import packing
import pytest
import tiny
import torch
from bench import Setting, Subject, ran, unchecked
from torch import Tensor

from fx_packing.attention import flex
from fx_packing.masks import BlockTensors

NOTICEABLE, NEAR = 1e-3, 5e-5  # relative to the largest result; compiled by Inductor, not to the last bit

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]

Change = Callable[[tuple[Tensor, Tensor], BlockTensors], None]  # end and depth [T], and the blocks


def end_short(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """The first prompt ends before its last completion does."""
    end = per_token[0]
    end[end == end[0].item()] -= 100


def end_long(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """A completion goes on into the next one."""
    end = per_token[0]
    end[end == end.min()] += 20


def depth_off(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """Behind the first third the depths rise twice as fast, so that windows hold half as much."""
    per_token[1][len(per_token[1]) // 3 :] *= 2


def block_left_out(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """The query block with the most partial blocks does not visit the first of them."""
    most = int(blocks.kv_num_blocks[0, 0].argmax())
    blocks.kv_indices[0, 0, most] = blocks.kv_indices[0, 0, most].roll(-1)
    blocks.kv_num_blocks[0, 0, most] -= 1


def full_blocks_left_out(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """Only blocks that hold some of the kept pairs are visited, none that holds all."""
    assert bool(blocks.full_kv_num_blocks.any())
    blocks.full_kv_num_blocks.zero_()


def partial_called_full(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """Every token of a block sees all of it, whatever the mask says."""
    blocks.full_kv_num_blocks.copy_(blocks.kv_num_blocks)
    blocks.full_kv_indices.copy_(blocks.kv_indices)
    blocks.kv_num_blocks.zero_()


def other_block(per_token: tuple[Tensor, Tensor], blocks: BlockTensors) -> None:
    """The query block with the most partial blocks visits those before the ones meant."""
    most = int(blocks.kv_num_blocks[0, 0].argmax())
    blocks.kv_indices[0, 0, most] = (blocks.kv_indices[0, 0, most] - 1).clamp(min=0)


FAULTS: list[tuple[str, str, Change]] = [
    ("plain", "a prompt ends early", end_short),
    ("plain", "a completion ends late", end_long),
    ("plain", "a block left out", block_left_out),
    ("plain", "full blocks left out", full_blocks_left_out),
    ("plain", "partial blocks called full", partial_called_full),
    ("plain", "the block before the one meant", other_block),
    ("mistral", "depths wrong under a window", depth_off),
]
"""Faults are put into the tensors of the mask, so that nothing is compiled anew."""


def long_batch(seed: int = 0) -> tiny.Batch:
    """Five blocks of 128 stored tokens; four completions share a prompt that fills two of them."""
    made = tiny.group_batch((300, 40), 4, 60, seed=seed)
    return tiny.Batch(made.ids, made.mask)


@pytest.fixture(scope="module")
def subjects():
    kept: dict[tuple, Subject] = {}

    def of(family: str, device: str) -> Subject:
        if (family, device) not in kept:
            options = (("attention", "flex"), ("inner", "inductor"))
            setting = Setting(family, options=options, training=device == "cuda", device=device)
            kept[family, device] = Subject(setting, long_batch())
        return kept[family, device]

    return of


@pytest.fixture(autouse=True)
def on_cpus_too(device, monkeypatch, unmistakable_sizes):
    """The kernel is not used on CPUs, though it runs there, if names of sizes are chosen with care."""
    if device == "cpu":
        monkeypatch.setattr(flex, "why_not", lambda **facts: None)


def stale(real: Callable) -> Callable:
    """The mask of the first batch for all that follow of as many blocks."""
    kept = {}

    def inputs(plan, window):
        return kept.setdefault((plan.length, window), real(plan, window))

    return inputs


def changed(change: Change, rows: int) -> Callable[[Callable], Callable]:
    def wrap(real):
        def inputs(plan, window):
            tensors = real(plan, window)
            if plan.rows < rows:  # a few rows, on which the check tries itself
                return tensors
            end, depth, *blocks = (t.clone() for t in tensors)
            change((end.view(-1), depth.view(-1)), BlockTensors(*blocks))
            return end, depth, *blocks

        return inputs

    return wrap


def assert_caught(subject: Subject, batch: tiny.Batch) -> None:
    """Unchecked the result is wrong; checked it is the padded one, as the report and a warning say."""
    right = subject.right(batch=batch)
    with unchecked():
        assert max(subject.run(batch).distance(right)) > NOTICEABLE
    assert ran()[-1].last.kernel == "flex"
    packing.forget_runs()
    with packing.messages() as told:
        got = subject.run(batch)
    graph = ran()[-1]
    check = graph.verifications[-1]
    assert check.passed is False and check.max_error > check.tolerance
    assert graph.runs == {"padded": 1} and check.why in graph.last.reason
    assert len(told) == 1 and "differ from those of the captured graph" in told[0]
    assert max(got.distance(subject.padded(batch=batch))) < NEAR


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "name", "change"), FAULTS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_fault_in_the_mask_is_caught(family, name, change, device, subjects, monkeypatch):
    subject = subjects(family, device)
    assert all(check.passed for check in subject.graph.verifications)
    assert subject.graph.last.kernel == "flex"
    assert max(subject.healthy.distance(subject.right())) < NEAR
    monkeypatch.setattr(flex, "inputs", changed(change, len(subject.batch.ids))(flex.inputs))
    assert_caught(subject, subject.batch)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stale_mask_is_caught(device, subjects, monkeypatch):
    subject = subjects("plain", device)
    monkeypatch.setattr(flex, "inputs", stale(flex.inputs))
    with unchecked():
        subject.run()  # whose mask is kept
    batch = long_batch(seed=4)  # another forest of as many blocks
    assert_caught(subject, tiny.Batch(*(t.to(device) for t in batch)))
