"""The flat graph with FlexAttention nodes: what a GPU runs, here on the CPU.

The CPU never chooses it, and Inductor has no backward for it there, so most tests read the nodes as torch
itself does without Inductor (densely). One lowers them.
"""

from __future__ import annotations

import pytest
import tiny
import torch
from packing import assert_gradients, assert_packed, gradients, pack, shared_batch

import fx_packing
from fx_packing import compat, inner, runtime

HOP = torch.ops.higher_order.flex_attention


@pytest.fixture(autouse=True)
def flex_everywhere(monkeypatch):
    monkeypatch.setattr(runtime.Packed, "_flat", lambda self, plan, batch: self.analysis.flat("flex"))


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that reach the inner compiler."""
    graphs = []

    def spying(name):
        compiler = lookup(name)

        def spy(gm, example_inputs):
            graphs.append(gm)
            return compiler(gm, example_inputs)

        return spy

    lookup = compat.lookup_backend
    monkeypatch.setattr(compat, "lookup_backend", spying)
    return graphs


def run(model, batch, **options):
    packed = pack(model, **{"inner": "aot_eager"} | options)
    return tiny.logits_of(packed(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False))


def assert_alone(model, batch, got, tolerance=2e-5):
    real = batch.mask.bool()
    assert float((got - tiny.per_row(model, *batch))[real].detach().abs().max()) < tolerance


EVERYDAY = (("llama", True), ("gemma2", False))  # of the families, and with checkpointing or without
OTHERS = [(f, c) for f in ("llama", "mistral", "gemma2") for c in (False, True) if (f, c) not in EVERYDAY]


@pytest.mark.parametrize(
    ("family", "checkpointing"), [*EVERYDAY, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)]
)
def test_values_and_gradients(family, checkpointing, compiled):
    """Another length and layout: one compilation, by a text equal in both captures."""
    if checkpointing and family == "mistral":
        pytest.skip("two families are enough")
    model = tiny.build(family)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    for step, layout in enumerate(("prefix", "varlen")):
        batch = shared_batch("left", length=26 + 7 * step, seed=step)
        got = run(model, batch, layout=layout)
        assert_alone(model, batch, got)
        assert assert_packed(layout, *batch).last.kernel == "flex"
        weight = batch.mask[..., None] * torch.randn(got.shape, generator=tiny.generator(step))
        want = (tiny.per_row(model, *batch) * weight).sum()
        assert_gradients(gradients(model, (got * weight).sum()), gradients(model, want), 1e-4)
    assert len(inner._flats) == 1 and len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_lowered(family, unmistakable_sizes):
    model = tiny.build(family)
    for step, layout in enumerate(("prefix", "varlen", "prefix")):
        batch = shared_batch("left", length=26 + 7 * step, seed=step)
        with torch.no_grad():
            assert_alone(model, batch, run(model, batch, inner="inductor", layout=layout))
        assert assert_packed(layout, *batch).compiles["flat (flex)"] == 1


def nodes(gm):
    return [n for module in gm.modules() for n in getattr(module, "graph", torch.fx.Graph()).nodes]


@pytest.mark.parametrize("checkpointing", (False, True))
def test_the_compiler_sees_whole_blocks(checkpointing, compiled):
    model = tiny.build("llama")
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    run(model, shared_batch("left"))
    calls = [n for n in nodes(compiled[0]) if n.target is HOP]
    assert len(calls) == 2
    for call in calls:
        q, k, v = (n.meta["example_value"] for n in call.args[:3])
        assert (q.shape[1], k.shape[1], v.shape[1]) == (4, 2, 2)  # K and V are not repeated
        for length in (x.shape[2].node.expr for x in (q, k, v)):
            assert length % 128 == 0 and length.free_symbols, length


def test_no_matrix_of_tokens_and_nothing_of_the_padded_shape():
    analyses = []
    original = fx_packing.backend.passes.analyse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fx_packing.backend.passes, "analyse", lambda c: analyses.append(original(c)) or analyses[-1]
        )
        for family in ("llama", "mistral"):
            run(tiny.build(family), shared_batch("left"), inner="eager")
    texts = [a.flat("flex").structure for a in analyses]
    assert texts[0] != texts[1] and "< (%" not in texts[0]
    for analysis in analyses:
        targets = [n.target for n in nodes(analysis.flat("flex").gm)]
        assert targets.count(HOP) == 2
        assert torch.nn.functional.scaled_dot_product_attention not in targets


def test_q_and_k_in_float32_under_autocast(compiled):
    """Rotary embedding leaves them so while v is half precision: cast, as SDPA would under autocast."""
    model, batch = tiny.build("llama"), shared_batch("left")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run(model, batch)
    assert_packed("auto", *batch)  # which was checked, too
    q, k, v = next(n.args[:3] for n in nodes(compiled[0]) if n.target is HOP)
    assert q.target == k.target == "type_as" and q.args[1] is v
    assert q.meta["example_value"].dtype == torch.bfloat16
    assert q.args[0].meta["example_value"].dtype == torch.float32
