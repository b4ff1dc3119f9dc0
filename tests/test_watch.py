"""Compiled modules in a life of their own: generation, limits of Dynamo, stances, copies, many steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings

import pytest
import tiny
import torch
from packing import assert_packed, shared_batch
from trainers import packed_runs

import fx_packing
from fx_packing import inner

OPTIONS = {"inner": "eager"}


def in_place(**options):
    model = tiny.build("llama")
    model.compile(backend="grpo_pack", options=OPTIONS | options)
    return model


def score(model, batch):
    return model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits


def right(batch, got, tolerance=2e-5) -> None:
    want = tiny.per_row(tiny.build("llama"), *batch)
    assert float((got - want)[batch.mask.bool()].detach().abs().max()) < tolerance


def generate(model, batch, tokens=12):
    return model.generate(batch.ids, attention_mask=batch.mask, max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("first", ("generation", "scoring"))
def test_generation_leaves_room_for_packing(first):
    """Three rounds of generation and scoring, with and without gradients, at growing sizes."""
    model, batch = in_place(), shared_batch("left")
    plain = tiny.build("llama")
    if first == "scoring":
        score(model, batch)
    for round_ in range(3):
        prompt = tiny.batch("left", rows=3 + round_, length=10 + 2 * round_, seed=round_)
        assert torch.equal(generate(model, prompt), generate(plain, prompt))
        batch = shared_batch("left", length=26 + round_)
        with torch.no_grad():
            right(batch, score(model, batch))
        right(batch, score(model, batch))
    assert packed_runs() == {"prefix": 6 + (first == "scoring")}
    (outside,) = fx_packing.report().outside
    assert "KV cache" in outside.why and outside.model == "LlamaForCausalLM"
    assert outside.calls == 36 - (first == "generation")  # that one made Dynamo capture it
    assert "outside (LlamaForCausalLM)" in str(fx_packing.report())
    graphs = fx_packing.report().graphs
    assert sum(not g.rewritten for g in graphs) == (first == "generation")
    assert len(graphs) <= 6


def test_a_wrapped_model_takes_caches_past_dynamo_too():
    from transformers import DynamicCache

    model, batch = tiny.build("llama"), shared_batch("none")
    packed = torch.compile(model, backend="grpo_pack", options=OPTIONS)
    right(batch, score(packed, batch))
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        pieces = [packed(part, past_key_values=cache).logits for part in batch.ids.split(9, dim=1)]
    assert float((torch.cat(pieces, 1) - model(batch.ids).logits).abs().max()) < 2e-5
    assert [o.calls for o in fx_packing.report().outside] == [3]
    assert len(fx_packing.report().graphs) == 1


def test_with_on_refuse_raise_generation_is_refused_aloud():
    model, batch = in_place(on_refuse="raise"), shared_batch("left")
    right(batch, score(model, batch))
    for _ in range(2):
        with pytest.raises(fx_packing.PackingError, match="cache"):
            generate(model, batch)


def test_a_limit_of_dynamo_is_reported_and_warned_of_once():
    model, batch = in_place(), shared_batch("left")
    with torch._dynamo.config.patch(recompile_limit=1):
        right(batch, score(model, batch))
        assert_packed("auto", *batch)
        with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):  # of the variant without gradients Dynamo wants to know nothing
                score(model, batch)
    told = [str(w.message) for w in seen if "fx_packing" in str(w.message)]
    assert len(told) == 1 and "recompile_limit (1)" in told[0] and "isolate_recompiles" in told[0]
    (outside,) = fx_packing.report().outside
    assert outside.calls == 2 and "recompile_limit (1)" in outside.why and "grad_mode" in outside.why
    right(batch, score(model, batch))  # what was compiled before goes on
    assert fx_packing.report().graphs[-1].runs == {"prefix": 2}
    assert "recompile_limit" in fx_packing.report().to_json()


def test_a_limit_hit_by_a_compiled_function_is_reported():
    model, batch = tiny.PlainDecoder(), shared_batch("right")

    def function(ids, mask):
        return model(ids, mask)

    packed = torch.compile(function, backend="grpo_pack", options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=1):
        packed(*batch)
        with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                packed(*batch)
    told = [str(w.message) for w in seen if "fx_packing" in str(w.message)]
    assert len(told) == 1 and "'function'" in told[0] and "isolate_recompiles" in told[0]
    (outside,) = fx_packing.report().outside
    assert "function" in outside.model and "recompile_limit (1)" in outside.why
    assert outside.calls == 0 and "calls that nobody could count" in str(fx_packing.report())


def test_another_backends_limit_is_not_ours():
    function = torch.compile(lambda x: x + 1, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        function(torch.ones(2))
        with torch.no_grad():
            function(torch.ones(2))
    assert fx_packing.report().outside == []


def test_a_stance_is_reported_without_a_warning():
    model, batch = in_place(), shared_batch("left")
    score(model, batch)
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("error")
        score(model, batch)
    score(model, batch)
    (outside,) = fx_packing.report().outside
    assert outside.calls == 1 and "force_eager" in outside.why
    assert fx_packing.report().graphs[-1].runs == {"prefix": 2}


def test_hooks_for_reentrant_checkpointing_are_left_as_they_were():
    model, batch = in_place(), shared_batch("left")
    model.requires_grad_(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    score(model, batch)
    fx_packing.reset()
    for _ in range(12):  # as trainers do after each generation
        model.gradient_checkpointing_enable({"use_reentrant": False})
        score(model.train(), batch)
    embeddings = model.get_input_embeddings()
    assert len(embeddings._forward_hooks) == 12
    (graph,) = [g for g in fx_packing.report().graphs if g.last is not None]
    assert graph.runs == {"prefix": 12} and not fx_packing.report().outside
    model.disable_input_require_grads()  # takes away the last one
    assert len(embeddings._forward_hooks) == 11


# -- copies, weights, resets -----------------------------------------------------------------------


def test_copies_pickles_and_weights():
    model, batch = in_place(), shared_batch("left")
    names = list(tiny.build("llama").state_dict())
    want = score(model, batch)
    assert list(model.state_dict()) == names
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in tiny.build("llama").named_parameters()]
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    model.load_state_dict(torch.load(stored))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._compiled_call_impl is None  # as torch does: a copy is not compiled
        assert torch.allclose(score(other, batch), tiny.build("llama")(*batch).logits)
        other.compile(backend="grpo_pack", options=OPTIONS)
        right(batch, score(other, batch))
        assert_packed("auto", *batch)
    assert torch.equal(score(model, batch), want)
    wrapped = torch.compile(tiny.PlainDecoder(), backend="grpo_pack", options=OPTIONS)
    wrapped(*batch)
    twin = copy.deepcopy(wrapped._orig_mod)
    assert torch.allclose(twin(*batch), wrapped._orig_mod(*batch))


def test_reset_in_the_middle():
    model, batch = in_place(), shared_batch("left")
    for _ in range(3):
        right(batch, score(model, batch))
        graph = assert_packed("auto", *batch)
        assert graph.runs == {"prefix": 1} and len(fx_packing.report().graphs) == 1
        torch._dynamo.reset()


@pytest.mark.slow
def test_a_hundred_steps_of_changing_shapes_stay_flat():
    model = in_place()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    counts = []
    for step in range(100):
        batch = tiny.batch("left", rows=3 + step * 7 % 5, length=16 + step * 5 % 23, seed=step)
        loss = score(model, batch).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if step in (49, 99):
            gc.collect()
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            compiled = sum(c.compiles for c in inner._flats.values())
            counts.append((len(fx_packing.report().graphs), compiled, tensors))
    assert sum(packed_runs().values()) == 100
    (graphs, compiled, tensors), (graphs_later, compiled_later, tensors_later) = counts
    assert graphs_later == graphs <= 4 and compiled_later == compiled
    assert tensors_later <= tensors + 20
