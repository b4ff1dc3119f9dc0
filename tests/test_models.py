"""Real model code, packed: values and every gradient against each row run alone."""

from __future__ import annotations

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
from torch import Tensor

import fx_packing
from fx_packing import runtime

LAYOUTS = ("varlen", "prefix", "auto")
# "auto" runs both layouts, by the batch; that the others hold to theirs is seen on three every day.
MODELS = [
    pytest.param(
        family, attention, layout,
        marks=[]
        if (layout == "auto" and (attention == "sdpa" or family not in ("qwen2", "qwen3")))
        or (attention == "sdpa" and family in ("llama", "mistral", "gpt2"))
        else [pytest.mark.slow],
    )
    for family in ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2")
    for attention in ("sdpa", "eager")
    for layout in LAYOUTS
    if (family, attention) != ("gemma2", "sdpa")  # which transformers does not offer
]  # fmt: skip
KEEP = 17  # columns whose logits are wanted: the longest completion and the end of its prompt


def project(logits: Tensor, mask: Tensor, seed: int = 1) -> Tensor:
    """A random projection of the logits of real tokens; `mask` is cut to the columns there are."""
    weights = torch.randn(
        logits.shape, generator=tiny.generator(seed), dtype=torch.float64
    ).to(logits.dtype)
    return (logits * weights * mask[:, -logits.shape[1] :, None]).sum()


def assert_padded_shape(got: Tensor, like: Tensor, mask: Tensor) -> None:
    """The shape and dtype that the padded model gives, and zeros where there is no token."""
    assert got.shape == like.shape and got.dtype == like.dtype
    assert bool((got[~mask[:, -got.shape[1] :].bool()] == 0).all())


def close(got: Tensor, want: Tensor, mask: Tensor, tolerance: float) -> None:
    real = mask[:, -got.shape[1] :].bool()
    difference = (got[real] - want[real]).detach().abs()
    assert not difference.numel() or float(difference.max()) < tolerance, float(difference.max())


@pytest.mark.parametrize(("family", "attention", "layout"), MODELS)
def test_equals_each_row_alone(family, attention, layout):
    model = tiny.build(family, attn_implementation=attention)
    packed = pack(model, layout=layout)
    batches = [shared_batch(padding, seed=seed) for seed, padding in enumerate(tiny.PADDINGS)]
    batches.append(tiny.batch("both", rows=7, length=26, seed=1))  # nothing to share
    for ids, mask in batches:
        with torch.no_grad():
            padded = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=KEEP).logits
        got = packed(
            input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=KEEP
        ).logits
        assert_packed(layout, ids, mask)
        want = tiny.per_row(model, ids, mask, logits_to_keep=KEEP)
        assert_padded_shape(got, padded, mask)
        close(got, want, mask, 2e-5)
        assert_gradients(
            gradients(model, project(got, mask)), gradients(model, project(want, mask)), 2e-5
        )


@pytest.mark.parametrize(
    ("attention", "layout"),
    [("sdpa", "varlen"), ("sdpa", "prefix"), ("eager", "auto")],
)
def test_captured_positions_equal_the_padded_forward(attention, layout):
    model = tiny.build("gpt2", attn_implementation=attention)
    packed = pack(model, layout=layout, positions="captured")
    differs = 0.0
    for seed, padding in enumerate(tiny.PADDINGS):
        ids, mask = shared_batch(padding, seed=seed)
        columns = torch.arange(ids.shape[1]).expand_as(ids)
        got = packed(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert_packed(layout, ids, mask, columns)
        want = model(ids, attention_mask=mask, use_cache=False).logits
        assert_padded_shape(got, want, mask)
        close(got, want, mask, 2e-5)
        assert_gradients(
            gradients(model, project(got, mask)), gradients(model, project(want, mask)), 2e-5
        )
        alone = tiny.per_row(model, ids, mask)
        differs = max(differs, float((alone - want)[mask.bool()].detach().abs().max()))
    assert differs > 0.1  # the two meanings of a position do differ in this model


# -- float64, on a decoder that stays in it --------------------------------------------------------

DECODERS = [
    dict(positions=positions, table=table, attention=attention, kv_heads=2)
    for positions in ("rotary", "learned")
    for table in ("slice", "arange")
    for attention in ("mask", "causal")
] + [
    dict(positions="rotary", table="slice", attention=attention, **heads)
    for attention in ("mask", "causal")
    for heads in ({"kv_heads": 4}, {"kv_heads": 2, "enable_gqa": True}, {"kv_heads": 1})
]


@pytest.mark.parametrize("flags", DECODERS, ids=lambda f: "-".join(map(str, f.values())))
def test_float64(flags):
    model = tiny.PlainDecoder(**flags).double()
    packed = pack(model, layout="prefix", dynamic=False)
    blind = flags["attention"] == "causal"  # sees no mask: a pad is a token like any other
    for padding in ("right", "none") if blind else ("left", "holes"):
        ids, mask = shared_batch(padding)
        mask = torch.ones_like(mask) if blind else mask
        got = packed(ids, mask, logits_to_keep=KEEP)
        assert_packed("prefix", ids, mask)
        want = tiny.per_row(model, ids, mask, logits_to_keep=KEEP)
        assert got.dtype == torch.float64
        assert_padded_shape(got, want, mask)
        close(got, want, mask, 1e-10)
        assert_gradients(
            gradients(model, project(got, mask)), gradients(model, project(want, mask)), 1e-10
        )


@pytest.mark.parametrize("positions", ("rotary", "learned"))
def test_float64_with_positions_from_the_caller(positions):
    model = tiny.PlainDecoder(positions=positions).double()
    packed = pack(model)
    ids, mask = shared_batch("both")
    given = (torch.arange(ids.shape[1]) * 3 + 1).expand_as(ids).contiguous()
    got = packed(ids, mask, position_ids=given)
    assert_packed("auto", ids, mask, given)
    want = tiny.per_row(model, ids, mask, position_ids=given)
    close(got, want, mask, 1e-10)
    assert_gradients(
        gradients(model, project(got, mask)), gradients(model, project(want, mask)), 1e-10
    )


# -- bfloat16 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ("llama", "qwen3", "gpt2"))
def test_bfloat16_is_within_the_noise(family):
    model = tiny.build(family, initializer_range=0.05).bfloat16()
    ids, mask = shared_batch("right")  # padding on the right moves no token, for any model
    got = pack(model, layout="prefix")(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert_packed("prefix", ids, mask)
    assert got.dtype == torch.bfloat16
    alone = tiny.per_row(model, ids, mask)
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    noise = float((alone - padded)[real].detach().float().abs().max())
    error = float((got - alone)[real].detach().float().abs().max())
    assert 0 < error < 3 * noise, (error, noise)
    grads = [gradients(model, project(x, mask)) for x in (got, alone, padded)]
    for name, want in grads[1].items():
        size = float(want.float().norm())
        noise = float((grads[2][name] - want).float().norm()) / size
        error = float((grads[0][name] - want).float().norm()) / size
        assert error < 3 * max(noise, 2**-8), (name, error, noise)


# -- other ways in and out -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "keep"), [*(("llama", k) for k in (0, 1, KEEP, 26, 40)), ("gpt2", KEEP)]
)
def test_logits_to_keep(family, keep):
    model = tiny.build(family)
    packed = pack(model)
    for padding in ("left", "right"):
        ids, mask = shared_batch(padding)
        with torch.no_grad():
            padded = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits
            got = packed(
                input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep
            ).logits
            want = tiny.per_row(model, ids, mask)[:, -padded.shape[1] :]
        assert_packed("auto", ids, mask)
        assert_padded_shape(got, padded, mask)
        close(got, want, mask, 2e-5)


@pytest.mark.parametrize("family", ("llama", "mistral", "gpt2"))
def test_without_an_attention_mask_every_token_is_real(family):
    model = tiny.build(family)
    ids, _ = shared_batch("none")
    mask = torch.ones_like(ids)
    got = pack(model)(input_ids=ids, use_cache=False).logits
    assert_packed("auto", ids, mask)
    want = tiny.per_row(model, ids, mask)
    close(got, want, mask, 2e-5)
    assert_gradients(
        gradients(model, project(got, mask)), gradients(model, project(want, mask)), 2e-5
    )


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_position_ids_are_used_as_given(family):
    model = tiny.build(family)
    packed = pack(model)
    ids, mask = shared_batch("left")
    from_zero = (mask.cumsum(1) - 1).clamp_min(0)
    for given in (from_zero, from_zero * 2 + 3):
        got = packed(
            input_ids=ids, attention_mask=mask, position_ids=given, use_cache=False
        ).logits
        assert_packed("auto", ids, mask, given)
        want = tiny.per_row(model, ids, mask, position_ids=given)
        close(got, want, mask, 2e-5)


def test_positions_that_differ_between_rows_are_not_shared():
    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    given = (mask.cumsum(1) - 1).clamp_min(0)
    given[1] += 1
    got = pack(model, layout="prefix")(
        input_ids=ids, attention_mask=mask, position_ids=given, use_cache=False
    ).logits
    graph = assert_packed("prefix", ids, mask, given)
    assert graph.last.run_tokens > stored_tokens(ids, mask)
    close(got, tiny.per_row(model, ids, mask, position_ids=given), mask, 2e-5)


def test_one_row_of_positions_for_all_that_changes_in_place_of_another():
    model = tiny.build("llama")
    packed = pack(model, layout="prefix")
    ids, mask = shared_batch("left")
    same = torch.zeros(1, ids.shape[1], dtype=torch.int64)
    rising = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        for given in (same, rising):  # the plan of the first shares more than that of the second
            got = packed(
                input_ids=ids, attention_mask=mask, position_ids=given, use_cache=False
            ).logits
            each = given.expand_as(ids)
            close(got, tiny.per_row(model, ids, mask, position_ids=each), mask, 2e-5)
            assert_packed("prefix", ids, mask, each)


def refill(into, ids):
    into.numpy()[:] = ids.numpy()


def refill_data(into, ids):
    into.data.copy_(ids)


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("write", (refill, refill_data))
def test_buffers_that_are_filled_again_unseen(write, layout):
    """Neither identity nor version of a tensor changes with what NumPy, ``.data``, kernels or other processes
    write: a plan of the content before would give another batch's numbers."""
    model = tiny.build("llama")
    packed = pack(model, layout=layout)
    ids, mask, _ = tiny.group_batch([5, 9, 3], 3, 8)
    versions = ids._version, mask._version
    for seed, prompts in enumerate(([5, 9, 3], [9, 2, 7], [9, 9, 1])):
        batch = tiny.group_batch(prompts, 3, 8, seed=seed)
        write(ids, batch.ids)
        write(mask, batch.mask)
        with torch.no_grad():
            got = packed(input_ids=ids, attention_mask=mask, use_cache=False).logits
            close(got, tiny.per_row(model, ids, mask), mask, 2e-5)
        assert_packed(layout, ids, mask)
        write(ids, torch.where(mask.bool(), seed, ids))  # the same mask, all rows alike
        with torch.no_grad():
            got = packed(input_ids=ids, attention_mask=mask, use_cache=False).logits
            close(got, tiny.per_row(model, ids, mask), mask, 2e-5)
        assert_packed(layout, ids, mask)
    assert (ids._version, mask._version) == versions


def test_passes_of_one_step_share_a_plan(monkeypatch):
    """By content: micro-batches cut anew for each pass are new tensors. Another batch gets another plan."""
    made = []
    real = runtime.make_plan
    monkeypatch.setattr(runtime, "make_plan", lambda *a, **k: made.append(1) or real(*a, **k))
    model = tiny.build("llama")
    packed = pack(model, layout="prefix", verify="never")
    ids, mask = shared_batch("left")
    with torch.no_grad():
        for _ in range(3):
            packed(input_ids=ids.clone(), attention_mask=mask.clone(), use_cache=False)
        with torch.inference_mode():
            packed(input_ids=ids.clone(), attention_mask=mask.clone(), use_cache=False)
        assert len(made) == 1
        other = ids.clone()
        other[0, -1] += 1
        packed(input_ids=other, attention_mask=mask, use_cache=False)
        assert len(made) == 2
        packed(input_ids=ids, attention_mask=mask, use_cache=False)
        assert len(made) == 2
        for number in range(10):  # bounded
            packed(input_ids=(ids + number) % tiny.VOCAB, attention_mask=mask, use_cache=False)
        assert len(made) == 11
        packed(input_ids=(ids + 1) % tiny.VOCAB, attention_mask=mask, use_cache=False)
        assert len(made) == 12
    packed(input_ids=(ids + 1) % tiny.VOCAB, attention_mask=mask, use_cache=False).logits.sum().backward()
    assert len(made) == 12  # in training too, whose graph saves the plan's tensors


def test_graphs_that_name_other_slices_share_no_plan():
    """The names hold numbers of the re-run, by the order of the caller's ints at capture: here they swap."""
    model = tiny.build("llama")

    def ends(ids, mask, a, b):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[:, -a:][:, :-1] * 1.0, logits[:, -b:][:, :-1] * 1.0

    packed = pack(ends, dynamic=True, verify="never", inner="eager")
    batch = tiny.batch("left", rows=3, length=24, seed=1)
    with torch.no_grad():
        packed(*batch, 9, 5)
    packed(*tiny.batch("none", rows=3, length=60, seed=2), 5, 9)  # with gradients: a graph of its own
    graphs = fx_packing.report().graphs
    assert len(graphs) == 2 and all(g.last.layout == "varlen" for g in graphs)
    wide = tiny.per_row(model, *batch)
    for training in (False, True, False):
        with torch.set_grad_enabled(training):
            found = packed(*batch, 9, 5)
        for got, number in zip(found, (9, 5), strict=True):
            close(got, wide[:, -number:-1], batch.mask[:, -number:-1], 2e-5)
    assert [sum(g.runs.values()) for g in graphs] == [3, 2] and {*graphs[0].runs} == {"varlen"}


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_hidden_states_are_outputs_too(family):
    model = tiny.build(family)
    ids, mask = shared_batch("both")
    kw = dict(use_cache=False, output_hidden_states=True, logits_to_keep=KEEP)
    padded = model(ids, attention_mask=mask, **kw)  # first: transformers installs its hooks here
    out = pack(model)(input_ids=ids, attention_mask=mask, **kw)
    assert_packed("auto", ids, mask)
    assert len(out.hidden_states) == len(padded.hidden_states) == 3
    for depth, (got, like) in enumerate(zip(out.hidden_states, padded.hidden_states, strict=True)):

        def alone(*args, depth=depth, **kwargs):
            return model(*args, use_cache=False, output_hidden_states=True, **kwargs).hidden_states[
                depth
            ]

        assert_padded_shape(got, like, mask)
        close(got, tiny.per_row(alone, ids, mask), mask, 2e-5)
    close(out.logits, tiny.per_row(model, ids, mask, logits_to_keep=KEEP), mask, 2e-5)


@pytest.mark.parametrize("family", ("llama", "qwen3", "mistral", "gpt2"))
def test_a_base_model_returns_hidden_states(family):
    model = tiny.build(family).base_model
    ids, mask = shared_batch("left")
    got = pack(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert_packed("auto", ids, mask)
    want = tiny.per_row(model, ids, mask)
    assert_padded_shape(got, want, mask)
    close(got, want, mask, 2e-5)
    assert_gradients(
        gradients(model, project(got, mask)), gradients(model, project(want, mask)), 2e-5
    )


@pytest.mark.parametrize(("family", "layout"), [*(("llama", k) for k in LAYOUTS), ("gpt2", "auto")])
def test_embeddings_instead_of_ids(family, layout):
    model = tiny.build(family)
    packed = pack(model, layout=layout)
    ids, mask = shared_batch("left")
    want = tiny.per_row(model, ids, mask)
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():  # equal ids have embeddings that are equal bit for bit
        got = packed(inputs_embeds=embeddings.detach(), attention_mask=mask, use_cache=False).logits
    assert_packed(layout, ids, mask)
    close(got, want, mask, 2e-5)
    got = packed(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
    # A shared token would hand its whole gradient to the embedding of one of its rows.
    reason = None if layout == "varlen" else "need gradients"
    assert_packed("varlen", ids, mask, reason=reason)
    assert_padded_shape(got, want, mask)
    close(got, want, mask, 2e-5)
    assert_gradients(
        gradients(model, project(got, mask)), gradients(model, project(want, mask)), 2e-5
    )


def test_real_rollouts(rollouts):
    ids, mask, keep = (rollouts[k] for k in ("input_ids", "attention_mask", "logits_to_keep"))
    model = tiny.build("llama", vocab_size=int(ids.max()) + 1, hidden_size=32, initializer_range=0.3)
    packed = pack(model)
    got = packed(
        input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep
    ).logits
    assert_packed("auto", ids, mask)
    want = tiny.per_row(model, ids, mask, logits_to_keep=keep)
    close(got, want, mask, 2e-5)
    targets = ids[:, -keep:].where(mask[:, -keep:].bool(), 0)

    def score(logits: Tensor) -> Tensor:
        logps = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        return (logps * mask[:, -keep:]).sum()

    assert_gradients(gradients(model, score(got)), gradients(model, score(want)), 2e-5)


@pytest.mark.parametrize("layout", ["auto", "prefix"])
def test_each_row_of_embeddings_gets_its_own_gradient(layout):
    """A shared token would give the gradient of all its rows to one of them."""
    model, (ids, mask) = tiny.build("llama"), shared_batch("left")[:2]
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    projection = torch.randn(*ids.shape, model.config.vocab_size, generator=tiny.generator())

    def gradient(run):
        logits = run(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
        (got,) = torch.autograd.grad((logits * projection * mask[..., None]).sum(), embeddings)
        return got

    got, want = gradient(pack(model, layout=layout)), gradient(model)
    assert float((got - want).abs().max() / want.abs().max()) < 2e-5
    last = fx_packing.report().graphs[-1].last
    assert last.layout == "varlen" and "need gradients" in last.reason


def test_plans_tell_zeros_apart_by_their_sign():
    """As their keys do: a plan of equal floats whose bits differ would share what is not the same."""
    cache = runtime._PlanCache()
    zeros = torch.zeros(2, 3)
    assert cache.get([zeros], (), object) is cache.get([zeros.clone()], (), object)
    assert cache.get([zeros], (), object) is not cache.get([-zeros], (), object)
