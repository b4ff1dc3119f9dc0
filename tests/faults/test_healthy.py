"""No false alarms: where nothing is wrong, no check fails, and hardly any is left open."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator

import bench
import pytest
import tiny
import torch
from packing import pack

from fx_packing.report import Verification

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}
# Every family in float32; the others where there is something of their own: heads that are shared,
# norms of queries and keys, windows, learned positions and biases, soft caps.
SETTINGS = [
    (family, numbers, training)
    for family in ("plain", "llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2")
    for numbers in DTYPES
    for training in (False, True)
    if numbers == "float32" or (family in ("llama", "gpt2", "gemma2") and training)
    or (family in ("plain", "qwen3", "mistral") and not training)
]  # fmt: skip

seen: Counter[str] = Counter()
batches_run = 0


def batches(seed: int, rollouts: tiny.Batch) -> Iterator[tuple[str, tiny.Batch]]:
    """Ten batches, of sizes that the seed decides."""
    rng = random.Random(seed)

    def draw(padding: str, **also) -> tiny.Batch:
        sizes = dict(rows=rng.randint(2, 8), length=rng.randint(8, 30), seed=rng.randrange(2**31))
        return tiny.batch(padding, **sizes | also)

    def group() -> tiny.Batch:
        prompts = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
        made = tiny.group_batch(prompts, rng.randint(2, 4), rng.randint(2, 12), seed=rng.randrange(2**31))
        return tiny.Batch(made.ids, made.mask)

    yield "groups", group()
    yield "groups of groups", bench.groups("trainer", seed=seed)
    for padding in tiny.PADDINGS:
        yield padding, draw(padding)
    emptied = group()
    emptied.mask[rng.randrange(len(emptied.mask))] = 0
    yield "an empty row", emptied
    some = draw("both")
    again = torch.tensor([rng.randrange(len(some.ids)) for _ in range(6)])
    yield "rows twice", tiny.Batch(some.ids[again], some.mask[again])
    first = rng.randrange(len(rollouts.ids) - 6)
    yield "rollouts", tiny.Batch(*(t[first : first + 6] for t in rollouts))


def model_of(family: str, numbers: str):
    own = {} if numbers == "float32" else {"initializer_range": 0.05}
    model = tiny.PlainDecoder(kv_heads=2) if family == "plain" else tiny.build(family, **own)
    return model.to(DTYPES[numbers])


def run(packed, batch: tiny.Batch, numbers: str, training: bool, **kwargs) -> torch.Tensor:
    """One step, as a trainer makes it."""
    cast = torch.autocast("cpu", torch.bfloat16) if numbers == "autocast" else contextlib.nullcontext()
    with torch.set_grad_enabled(training), cast:
        logits = tiny.logits_of(packed(batch.ids, attention_mask=batch.mask, **kwargs))
    if training:
        logits.float().square().mean().backward()
    return logits


def outcome(check: Verification) -> str:
    if check.passed:
        return "passed"
    return "left open" if check.max_error is None else "failed"


def watch(packed, number: int, name: str, batch: tiny.Batch, *how, **kwargs) -> list[Verification]:
    """Run one healthy batch; the checks that it led to."""
    global batches_run
    bench.forget_runs()  # warnings are given once
    with bench.messages() as told:
        logits = run(packed, batch, *how, **kwargs)
    (graph,) = bench.ran()
    assert logits.isfinite().all() and not told, (name, told)
    assert "padded" not in graph.runs and graph.verifications, (name, graph)
    assert not [c for c in graph.verifications if outcome(c) == "failed"], (name, batch, graph)
    batches_run += 1
    seen.update(outcome(c) for c in graph.verifications)
    return graph.verifications


@pytest.mark.parametrize(
    ("family", "numbers", "training"), SETTINGS, ids=lambda v: {True: "train", False: "score"}.get(v, v)
)
def test_no_false_alarm(family, numbers, training, rollouts):
    real = tiny.Batch(rollouts["input_ids"] % tiny.VOCAB, rollouts["attention_mask"])
    packed = pack(
        model_of(family, numbers), dynamic=True, verify="always", min_sharing=1.0,
        positions="captured" if family == "gpt2" and not training else "row",
    )  # fmt: skip
    kwargs = {} if family == "plain" else {"use_cache": False}
    seed = SETTINGS.index((family, numbers, training))
    layouts = set()
    for number, (name, batch) in enumerate(batches(seed, real)):
        checks = watch(packed, number, name, batch, numbers, training, **kwargs)
        layouts |= {check.layout for check in checks}
    assert layouts == {"varlen", "prefix"}


def test_what_the_checks_said():
    """Runs after them, and tells how many there were, and how they went."""
    bench.told.append(
        f"healthy batches: {batches_run}; checks: {dict(seen)}; false alarms: {seen['failed']}"
    )
    assert batches_run and seen["failed"] == 0
    assert seen["left open"] <= seen["passed"] / 20
    assert len(SETTINGS) * 10 >= 200
