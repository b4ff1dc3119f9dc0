"""What is captured and compiled, how often, and the ways to compile, run and train a model."""

from __future__ import annotations

import random

import pytest
import tiny
import torch
from packing import (
    assert_gradients,
    assert_packed,
    gradients,
    pack,
    shared_batch,
    stored_tokens,
)
from torch._dynamo.utils import counters

import fx_packing
from fx_packing import inner


def flat_compiles() -> int:
    """How often the inner compiler was called for flat graphs, all of them together."""
    return sum(compiled.compiles for compiled in inner._flats.values())


def score(packed, batch, keep: int = 0):
    return packed(
        input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, logits_to_keep=keep
    ).logits


def assert_right(model, batch, got, tolerance: float = 2e-5, **also) -> None:
    """Equal to each row alone; with gradients, if `got` has them."""
    want = tiny.per_row(model, batch.ids, batch.mask, **also)
    real = batch.mask.bool()
    assert float((got - want)[real].detach().abs().max()) < tolerance
    assert bool((got[~real] == 0).all())
    if got.requires_grad:
        weights = torch.randn(got.shape, generator=tiny.generator(3))
        losses = [(x * weights * batch.mask[..., None]).sum() for x in (got, want)]
        assert_gradients(*(gradients(model, loss) for loss in losses), 2e-5)


def sizes(seed: int, count: int) -> list[tiny.Batch]:
    """`count` batches, no two of the same shape."""
    rng = random.Random(seed)
    found: dict[tuple, tiny.Batch] = {}
    while len(found) < count:
        groups = len(found) % 2
        if groups:
            made = tiny.group_batch(
                [rng.randint(3, 20) for _ in range(rng.randint(1, 3))],
                rng.randint(2, 4),
                rng.randint(2, 20),
                seed=rng.randrange(2**31),
            )
            batch = tiny.Batch(made.ids, made.mask)
        else:
            padding = rng.choice(("left", "right", "both"))
            seed = rng.randrange(2**31)
            batch = tiny.batch(padding, rows=rng.randint(2, 9), length=rng.randint(6, 40), seed=seed)
        found.setdefault(tuple(batch.ids.shape), batch)
    return list(found.values())


def test_twenty_shapes_without_gradients():
    model = tiny.build("llama")
    packed = pack(model)
    layouts = set()
    with torch.no_grad():
        for batch in sizes(0, 20):
            before = {id(g): sum(g.runs.values()) for g in fx_packing.report().graphs}
            got = score(packed, batch)
            ran = [
                g
                for g in fx_packing.report().graphs
                if sum(g.runs.values()) > before.get(id(g), 0)
            ]
            assert len(ran) == 1
            layouts.add(assert_packed_once(ran[0], batch))
            assert_right(model, batch, got)
    assert layouts == {"varlen", "prefix"}
    assert len(fx_packing.report().graphs) <= 3
    assert counters["grpo_pack"]["rewritten"] == len(fx_packing.report().graphs)
    assert counters["grpo_pack"]["ran_padded"] == 0
    assert (len(inner._flats), flat_compiles()) == (1, 1)


def assert_packed_once(graph, batch) -> str:
    """`graph` packed this batch just now; checks are once a graph, so only their outcome counts."""
    real, stored = int(batch.mask.sum()), stored_tokens(batch.ids, batch.mask)
    assert graph.rewritten and graph.last.reason is None
    assert graph.last.layout in ("varlen", "prefix")
    assert graph.last.run_tokens == (stored if graph.last.layout == "prefix" else real)
    assert (graph.last.layout == "prefix") == (stored < real and real >= 1.1 * stored)
    assert graph.last.run_tokens <= batch.mask.numel()
    assert all(v.passed or v.max_error is None for v in graph.verifications)
    return graph.last.layout


@pytest.mark.parametrize("family", ("llama", pytest.param("gpt2", marks=pytest.mark.slow)))
def test_twenty_shapes_with_gradients_and_without(family):
    model = tiny.build(family)
    packed = pack(model)
    for number, batch in enumerate(sizes(1, 20)):
        with torch.set_grad_enabled(number % 3 != 0):
            got = score(packed, batch)
            assert got.requires_grad == (number % 3 != 0)
            assert_right(model, batch, got)
    graphs = fx_packing.report().graphs
    assert all(g.rewritten for g in graphs)
    assert sum(g.runs.get("padded", 0) for g in graphs) == 0
    assert {layout for g in graphs for layout in g.runs} == {"varlen", "prefix"}
    assert len(graphs) <= 6  # three a gradient mode
    assert flat_compiles() == 2  # one a gradient mode
    # torch 2.11 writes no-grad regions down only where gradients are recorded: two texts there.
    assert len(inner._flats) <= 2
    checks = [v for g in graphs for v in g.verifications]
    assert checks and not any(v.max_error is not None and not v.passed for v in checks)


@pytest.mark.parametrize("dynamic", (None, True, False))
def test_shapes_under_any_setting_of_dynamic_share_one_flat_graph(dynamic):
    model = tiny.build("qwen3")
    packed = pack(model, dynamic=dynamic)
    with torch.no_grad():
        for rows, length in ((3, 12), (3, 30), (5, 30), (2, 17)):
            batch = tiny.batch("left", rows=rows, length=length, seed=rows)
            assert_right(model, batch, score(packed, batch))
    graphs = fx_packing.report().graphs
    assert all(g.rewritten for g in graphs), [g.reason for g in graphs]
    assert sum(g.runs.get("varlen", 0) for g in graphs) == 4
    assert len(graphs) <= {None: 3, True: 1, False: 4}[dynamic]
    assert (len(inner._flats), flat_compiles()) == (1, 1)


def test_a_number_of_columns_to_keep_that_changes():
    model = tiny.build("llama")
    packed = pack(model)
    with torch.no_grad():
        for keep in (9, 5, 13, 7):
            batch = shared_batch("both", seed=keep)
            got = score(packed, batch, keep)
            want = tiny.per_row(model, batch.ids, batch.mask, logits_to_keep=keep)
            real = batch.mask[:, -keep:].bool()
            assert float((got - want)[real].abs().max()) < 2e-5
    graphs = fx_packing.report().graphs
    assert len(graphs) <= 3 and all(set(g.runs) == {"prefix"} for g in graphs)
    assert flat_compiles() == 1


def test_compiled_in_place():
    model = tiny.build("llama")
    keys = list(model.state_dict())
    model.compile(backend="grpo_pack", options={"inner": "eager"})
    assert list(model.state_dict()) == keys
    batch = shared_batch("left")
    got = score(model, batch)
    assert_packed("auto", batch.ids, batch.mask)
    assert_right(tiny.build("llama"), batch, got.detach())


@pytest.mark.parametrize("family", ("llama", pytest.param("gpt2", marks=pytest.mark.slow)))
def test_generate_gives_the_same_tokens(family):
    model = tiny.build(family)
    batch = tiny.group_batch().ids[:, :9], tiny.group_batch().mask[:, :9]
    how = dict(attention_mask=batch[1], max_new_tokens=6, do_sample=False)
    want = model.generate(batch[0], **how)
    model.compile(backend="grpo_pack", options={"inner": "eager"})
    assert torch.equal(model.generate(batch[0], **how), want)
    scored = shared_batch("left")
    with torch.no_grad():
        got = score(model, scored)
    assert_packed("auto", scored.ids, scored.mask)  # generation did not use up the recompiles
    assert_right(tiny.build(family), scored, got)


def test_two_models_share_a_flat_graph_and_are_checked_each():
    models = [tiny.build("llama", seed=seed) for seed in (0, 1)]
    compiled = [pack(model) for model in models]
    batch = shared_batch("left")
    for _ in range(2):
        for model, packed in zip(models, compiled, strict=True):
            with torch.no_grad():
                got = score(packed, batch)
            assert_right(model, batch, got)
    graphs = fx_packing.report().graphs
    assert sum(g.runs.get("prefix", 0) for g in graphs) == 4
    assert sum(g.runs.get("padded", 0) for g in graphs) == 0
    checks = [v for g in graphs for v in g.verifications]
    assert [v.passed for v in checks] == [True, True]
    assert (len(inner._flats), flat_compiles()) == (1, 1)


def test_inference_mode_then_training():
    model = tiny.build("llama")
    packed = pack(model)
    batch = shared_batch("both")
    with torch.inference_mode():
        inside = score(packed, batch)
        assert_packed("auto", batch.ids, batch.mask)
        own = tiny.Batch(batch.ids.clone(), batch.mask.clone())  # inference tensors
        assert torch.equal(score(packed, own), inside)
        assert_packed("auto", batch.ids, batch.mask)
    got = score(packed, batch)
    assert_packed("auto", batch.ids, batch.mask)
    assert_right(model, batch, got)
    assert_right(model, batch, inside.clone())


def test_a_mask_changed_in_place_is_seen():
    model = tiny.build("llama")
    packed = pack(model)
    batch = shared_batch("right")
    with torch.no_grad():
        score(packed, batch)
        batch.mask[0, 6:] = 0
        batch.ids[2, 3] += 1
        got = score(packed, batch)
    assert_packed("auto", batch.ids, batch.mask)
    assert_right(model, batch, got)


def test_inductor_forward_and_backward():
    model = tiny.build("qwen3", num_hidden_layers=1)
    packed = pack(model, inner="inductor")
    for batch in (shared_batch("left"), tiny.batch("right", rows=5, length=60, seed=2)):
        got = score(packed, batch)
        assert_right(model, batch, got, tolerance=5e-5)
        assert all(set(g.runs) <= {"prefix", "varlen"} for g in fx_packing.report().graphs)
    assert flat_compiles() == 1
    checks = [v for g in fx_packing.report().graphs for v in g.verifications]
    assert checks and all(v.passed for v in checks)


# -- activation checkpointing ----------------------------------------------------------------------


def saved_elements(run) -> tuple[int, torch.Tensor]:
    """How many elements `run()` keeps for its backward, and what it returns."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values()), result


@pytest.mark.parametrize(
    ("family", "how"),
    (("llama", "eager"), pytest.param("gpt2", "aot_eager", marks=pytest.mark.slow)),
)
def test_checkpointing_is_packed_and_stays_checkpointing(family, how):
    deep = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    batch = shared_batch("left", length=40)
    kept = {}
    for checkpointing in (False, True):
        model = tiny.build(family, **deep).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # Without: "aot_eager" too, so that both count what AOTAutograd saves.
        packed = pack(model.base_model, inner=how if checkpointing else "aot_eager")
        kept[checkpointing], got = saved_elements(
            lambda packed=packed: packed(
                input_ids=batch.ids, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state
        )
        assert_packed("auto", batch.ids, batch.mask)
        assert_right(tiny.build(family, **deep).base_model, batch, got.detach())
        weights = torch.randn(got.shape, generator=tiny.generator(3))
        plain = tiny.build(family, **deep).base_model
        want = tiny.per_row(plain, batch.ids, batch.mask)
        assert_gradients(
            gradients(model.base_model, (got * weights * batch.mask[..., None]).sum()),
            gradients(plain, (want * weights * batch.mask[..., None]).sum()),
            2e-5,
        )
    weights = sum(p.numel() for p in model.base_model.parameters())
    activations = {k: n - weights for k, n in kept.items()}
    assert activations[True] < 0.5 * activations[False], kept


# -- the cap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("cap", ({"max_tokens": 40}, {"mini_batch_rows": 1}))
def test_over_the_cap_the_rows_are_split(layout, cap):
    model = tiny.build("llama")
    batch = shared_batch("left")
    most = cap.get("max_tokens", batch.ids.shape[1])
    packed = pack(model, layout=layout, **cap)
    got = score(packed, batch)
    graph = fx_packing.report().graphs[-1]
    assert graph.rewritten and graph.runs == {layout: 1} and graph.last.reason is None
    total = int(batch.mask.sum()) if layout == "varlen" else stored_tokens(*batch)
    assert graph.last.bins >= -(-total // most) and graph.last.bins >= 2
    # A prefix whose rows come apart is stored once a part.
    assert total <= graph.last.run_tokens <= min(int(batch.mask.sum()), most * graph.last.bins)
    assert graph.verifications[-1].passed
    size = "B * L > 40" if "max_tokens" in cap else "B > 1"
    assert any("token cap" in g and size in g for g in graph.guards)
    assert_right(model, batch, got)
    assert flat_compiles() == 1


def test_under_the_cap_nothing_is_split():
    model = tiny.build("llama")
    batch = shared_batch("left")
    got = score(pack(model, max_tokens=stored_tokens(*batch)), batch)
    graph = assert_packed("auto", *batch)
    assert graph.last.bins == 1
    assert_right(model, batch, got)


def test_groups_stay_together_under_the_cap():
    model = tiny.build("llama")
    made = tiny.group_batch((12, 12, 12), 4, 4)
    batch = tiny.Batch(made.ids, made.mask)
    group = stored_tokens(batch.ids[:4], batch.mask[:4])
    most = max(stored_tokens(batch.ids[i : i + 4], batch.mask[i : i + 4]) for i in (0, 4, 8))
    got = score(pack(model, layout="prefix", max_tokens=max(most, group)), batch)
    graph = fx_packing.report().graphs[-1]
    assert graph.last.layout == "prefix" and graph.last.bins == 3
    assert graph.last.run_tokens == stored_tokens(*batch)  # no prompt is computed twice
    assert_right(model, batch, got)


def test_a_row_over_the_cap_runs_padded_and_says_so():
    model = tiny.build("llama")
    batch = shared_batch("left")
    got = score(pack(model, max_tokens=10), batch)
    graph = fx_packing.report().graphs[-1]
    assert graph.rewritten and graph.runs == {"padded": 1}
    assert graph.last.reason == "a row of 20 tokens exceeds the cap of 10 tokens (max_tokens=10)"
    want = model(batch.ids, attention_mask=batch.mask, use_cache=False).logits
    assert float((got - want)[batch.mask.bool()].detach().abs().max()) < 2e-5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_another_number_of_rows_at_the_same_length(family):
    """B becomes a symbol while L stays a literal: GPT-2 has both in one ``torch.Size``."""
    model = tiny.build(family)
    packed = pack(model)
    for rows in (6, 8, 5):
        batch = shared_batch("left")
        pick = torch.arange(rows) % len(batch.ids)
        batch = batch._replace(ids=batch.ids[pick], mask=batch.mask[pick])
        with torch.no_grad():
            assert_right(model, batch, score(packed, batch))
    graphs = fx_packing.report().graphs
    assert all(g.rewritten and "padded" not in g.runs for g in graphs), [g.reason for g in graphs]
    assert sum(sum(g.runs.values()) for g in graphs) == 3
