"""What the check of a rewritten graph looks at, when it runs, and what follows from it."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import tiny
import torch
from packing import gradients, pack, shared_batch
from torch import nn

import fx_packing
from fx_packing import runtime, verify
from fx_packing.attention import KERNELS, most_tokens
from fx_packing.gradients import Leaves, Sketcher, Sketches, size
from fx_packing.verdicts import Extent, Verdict, Verdicts


def run(packed, batch):
    return tiny.logits_of(packed(batch.ids, attention_mask=batch.mask))


def decoder_pair():
    return tiny.PlainDecoder(), shared_batch("left")


def checks():
    return [v for g in fx_packing.report().graphs for v in g.verifications]


def told(seen):
    return [str(w.message) for w in seen if "fx_packing" in str(w.message)]


# -- sketches --------------------------------------------------------------------------------------


SHAPES = [(), (7,), (40, 30), (5, 6, 7), (1, 9)]


def sketched(gradients, shapes=SHAPES):
    """Of gradients by number; of the other shapes there is none."""
    sketcher = Sketcher({3 + 2 * i: torch.empty(s, dtype=torch.float64) for i, s in enumerate(shapes)})
    for number, gradient in gradients.items():
        sketcher.take(number, gradient)
    return sketcher.finish()


def test_sketches_are_linear_and_of_one_gradient_each(monkeypatch):
    monkeypatch.setattr("fx_packing.gradients._CHUNK", 64)  # two rows of [40, 30] at a time
    g = tiny.generator(1)
    a, b = ({3 + 2 * i: torch.randn(s, generator=g, dtype=torch.float64) for i, s in enumerate(SHAPES)}
            for _ in range(2))  # fmt: skip
    both = (sketched(a) + sketched(b)).on_host()
    assert set(both) == set(a)
    for number, of_sum in sketched({n: a[n] + b[n] for n in a}).on_host().items():
        assert torch.allclose(of_sum, both[number], rtol=1e-12, atol=1e-12)
        (alone,) = sketched({number: a[number]}).on_host().items()
        assert alone[0] == number and torch.equal(alone[1], sketched(a).on_host()[number])
    some = sketched({5: a[5]}) + sketched({7: b[7]})
    assert set(some.on_host()) == {5, 7} and (Sketches() + some).found == {5, 7}


def test_a_sketcher_keeps_nothing_for_the_next_time():
    sketcher = Sketcher({0: torch.empty(4, 3), 1: torch.empty(2)})
    sketcher.take(0, torch.ones(4, 3))
    assert set(sketcher.finish().on_host()) == {0}
    sketcher.take(1, torch.ones(2))
    after = sketcher.finish()
    assert set(after.on_host()) == {1} and not after.values[0].any()


@pytest.mark.parametrize("shape", [(7,), (40, 30), (5, 6, 7)])
def test_a_sketch_estimates_the_norm(shape):
    gradients = torch.randn(1000, *shape, generator=tiny.generator(1), dtype=torch.float64)
    shapes = [shape] * 1000  # each has signs of its own
    found = sketched({3 + 2 * i: x for i, x in enumerate(gradients)}, shapes).on_host().values()
    assert len({tuple(f.tolist()) for f in found}) == 1000
    ratios = [size(f) / float(x.norm()) for f, x in zip(found, gradients, strict=True)]
    assert 0.9 < sum(r**2 for r in ratios) / 1000 < 1.1  # it spreads by 0.03


def test_leaves_take_gradients_of_their_own():
    layer = nn.Linear(3, 2)
    touched = []
    layer.weight.register_hook(lambda _: touched.append(1))
    layer.bias.requires_grad_(False)
    leaves = Leaves([layer.weight, layer.bias, layer.weight, 3])
    assert leaves.places == [0] and leaves.args[0] is leaves.args[2]
    assert leaves.args[1] is layer.bias and isinstance(leaves.args[0], nn.Parameter)
    x = torch.arange(3.0)
    found = leaves.backward((leaves.args[0] @ x).sum() + leaves.args[2].sum())
    sketcher = Sketcher({0: layer.weight})
    sketcher.take(0, torch.stack([x + 1, x + 1]))
    assert torch.allclose(found.values, sketcher.finish().values) and not touched
    assert layer.weight.grad is None and leaves.args[0].grad is None


# -- verdicts --------------------------------------------------------------------------------------


def test_a_verdict_vouches_for_a_quarter_more():
    verdict, base = Verdict(), Extent(1000, 100, 8)
    assert verdict.due(base)
    verdict.passed(base)
    assert not verdict.due(base) and not verdict.due(Extent(1250, 125, 10))
    for bigger in (Extent(1251, 100, 8), Extent(1000, 126, 8), Extent(1000, 100, 11)):
        assert verdict.due(bigger)
    verdict.passed(Extent(2000, 50, 2))
    assert verdict.verified == Extent(2000, 100, 8)
    assert verdict.blocks(base) is None


def test_a_small_failure_closes_a_length_region_and_a_large_one_everything():
    verdict = Verdict()
    verdict.passed(Extent(1000, 100, 8))
    verdict.failed(Extent(3000, 100, 8), "imprecise", small=True)
    assert "3000" in verdict.blocks(Extent(3000, 10, 1))
    assert verdict.blocks(Extent(2999, 500, 99)) is None
    verdict.failed(Extent(900, 400, 8), "imprecise", small=True)
    assert verdict.blocks(Extent(10, 400, 1)) and verdict.blocks(Extent(3000, 10, 1))
    assert verdict.blocks(Extent(2999, 399, 1)) is None
    verdict.failed(Extent(10, 10, 1), "again", small=True)
    assert verdict.blocks(Extent(1, 1, 1)) == "again"  # the third small one
    verdict = Verdict()
    verdict.failed(Extent(10, 10, 1), "contaminated", small=False)
    assert verdict.blocks(Extent(1, 1, 1)) == "contaminated"


def test_batches_that_prove_nothing_are_tried_ever_more_rarely():
    verdict, size = Verdict(), Extent(10, 5, 2)
    tried = []
    for call in range(1, 65):
        if verdict.due(size):
            tried.append(call)
            verdict.left_open()
    assert tried == [1, 2, 3, 4, 8, 16, 32, 64]


def test_verdicts_die_with_their_parameters():
    verdicts, weights = Verdicts(), [torch.zeros(3), torch.zeros(2)]
    first = verdicts.of(weights, ("varlen", True))
    assert verdicts.of(weights, ("varlen", True)) is first
    assert verdicts.of(weights, ("varlen", False)) is not first
    assert verdicts.of(weights[::-1], ("varlen", True)) is not first
    weights[0].add_(1)
    assert verdicts.of(weights, ("varlen", True)) is first
    key = next(iter(verdicts._known))
    gone = [weakref.ref(torch.zeros(3)), *verdicts._known[key][0][1:]]
    verdicts._known[key] = (gone, verdicts._known[key][1])  # as if the id were used again
    assert verdicts.of(weights, key[0]) is not first


# -- when it runs ----------------------------------------------------------------------------------


def test_once_a_gradient_mode_with_gradients_in_training():
    model, batch = decoder_pair()
    packed = pack(model, layout="prefix", dynamic=True)
    for _ in range(2):
        with torch.no_grad():
            run(packed, batch)
        run(packed, batch).sum().backward()
    found = [(v.gradients, v.passed, v.layout) for v in checks()]
    assert found == [(False, True, "prefix"), (False, True, "prefix"), (True, True, "prefix")]
    values, gradient = checks()[-2:]
    assert "7 of 7 rows" in values.why and 0 <= values.max_error < values.tolerance < 1e-3
    assert 0 < gradient.max_error < gradient.tolerance < 1e-3
    count = sum(1 for _ in model.parameters())
    assert f"{count} tensors" in gradient.why and "L[" not in gradient.why


def test_growth_is_checked_again_and_shrinking_is_not():
    model = tiny.PlainDecoder()
    packed = pack(model, layout="varlen", dynamic=True)
    sizes = [(4, 20), (4, 20), (3, 15), (4, 22), (12, 22), (12, 60), (12, 60), (6, 30)]
    counts = []
    with torch.no_grad():
        for rows, length in sizes:
            run(packed, tiny.batch("left", rows=rows, length=length, lengths=[length - 2] * rows))
            counts.append(len(checks()))
    assert counts == [1, 1, 1, 1, 2, 3, 3, 3] and all(v.passed for v in checks())


def test_each_model_gets_a_verdict_and_new_weights_in_place_keep_it():
    models, batch = [tiny.PlainDecoder(seed=s) for s in (0, 1)], shared_batch("left")

    def score(model, ids, mask):
        return model(ids, mask)

    packed = torch.compile(score, backend="grpo_pack", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad():
        for model in (models[0], models[1], models[0], models[1]):
            packed(model, batch.ids, batch.mask)
        assert len(checks()) == 2
        for p in models[0].parameters():
            p.mul_(1.01)
        packed(models[0], batch.ids, batch.mask)
    assert len(checks()) == 2
    assert sum(g.runs.get("prefix", 0) for g in fx_packing.report().graphs) == 5


def test_verify_always_and_never():
    model, batch = decoder_pair()
    for option, count in (("always", 3), ("never", 0)):
        torch._dynamo.reset()
        packed = pack(model, verify=option)
        with torch.no_grad():
            for _ in range(3):
                run(packed, batch)
        assert len(checks()) == count


# -- what it leaves alone --------------------------------------------------------------------------


class Dropping(tiny.PlainDecoder):
    def forward(self, ids, attention_mask=None):
        hidden = super().forward(ids, attention_mask)
        return nn.functional.dropout(hidden, 0.5, self.training)


def test_random_state_gradients_and_hooks_are_untouched():
    batch = shared_batch("left")
    model = Dropping().train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    calls = []
    handles = [p.register_hook(lambda g: calls.append(1)) for p in model.parameters()]

    def one(**options):
        torch._dynamo.reset()
        torch.manual_seed(5)
        out = run(pack(model, layout="varlen", **options), batch)
        return out.detach(), torch.get_rng_state()

    checked, state = one()
    assert [v.passed for v in checks()] == [True, True] and checks()[-1].gradients
    assert not calls and all(bool((p.grad == 3).all()) for p in model.parameters())
    unchecked, expected = one(verify="never")
    assert torch.equal(state, expected) and torch.equal(checked, unchecked)
    for handle in handles:
        handle.remove()


def test_weights_cast_by_the_check_do_not_cut_gradients_under_autocast():
    model = tiny.build("llama")
    batch = shared_batch("left")
    packed = pack(model, layout="prefix")
    kwargs = dict(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            packed(**kwargs)
        assert torch.is_autocast_cache_enabled()
        packed(**kwargs).logits[batch.mask.bool()].float().sum().backward()
        # The model's own operations, under the same autocast, still reach every weight.
        model(**kwargs).logits[batch.mask.bool()].float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert [(v.gradients, v.passed) for v in checks()] == [(False, True), (False, True), (True, True)]


def test_nothing_of_a_check_is_kept(monkeypatch):
    model, batch = decoder_pair()
    made = []
    real = verify._Check.__init__

    def watched(self, *args):
        real(self, *args)
        made.append([weakref.ref(self), *(weakref.ref(self.leaves.args[i]) for i in self.leaves.places)])

    monkeypatch.setattr(verify._Check, "__init__", watched)
    run(pack(model), batch).sum().backward()
    gc.collect()
    (refs,) = made
    assert len(refs) == 1 + sum(1 for _ in model.parameters())
    assert all(r() is None for r in refs)


def test_under_inference_mode():
    model, batch = decoder_pair()
    packed = pack(model)
    with torch.inference_mode():
        run(packed, batch)
    assert [v.passed for v in checks()] == [True]
    run(packed, batch).sum().backward()
    assert [v.gradients for v in checks()] == [False, False, True] and all(v.passed for v in checks())


# -- what follows ----------------------------------------------------------------------------------


def tampered(monkeypatch, **changes):
    """Plans whose fields are changed by functions of the plan."""
    real = runtime.make_plan

    def make(*args, **kwargs):
        plan = real(*args, **kwargs)
        return dataclasses.replace(plan, _memo={}, **{k: f(plan) for k, f in changes.items()})

    monkeypatch.setattr(runtime, "make_plan", make)


def test_contamination_is_off_for_good_with_one_warning(monkeypatch):
    model, batch = decoder_pair()
    tampered(monkeypatch, end=lambda p: torch.full_like(p.end, p.run_tokens))
    packed = pack(model, layout="prefix")
    real = batch.mask.bool()
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.allclose(run(packed, batch)[real], model(*batch)[real], atol=2e-5)
    (message,) = told(seen)
    (check,) = checks()
    for part in ("PlainDecoder", f"{check.max_error:.3g}", f"{check.tolerance:.3g}", "for good", "layout"):
        assert part in message
    (graph,) = fx_packing.report().graphs
    assert graph.runs == {"padded": 3} and "differ" in graph.last.reason
    assert not check.passed and check.max_error > 100 * check.tolerance


def test_auto_goes_on_with_varlen_where_prefix_was_wrong(monkeypatch):
    model, batch = decoder_pair()
    real = runtime.make_plan

    def make(*args, **kwargs):
        plan = real(*args, **kwargs)
        if plan.layout == "prefix":
            end = torch.full_like(plan.end, plan.run_tokens)
            plan = dataclasses.replace(plan, end=end, _memo={})
        return plan

    monkeypatch.setattr(runtime, "make_plan", make)
    packed = pack(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            run(packed, batch)
    (graph,) = fx_packing.report().graphs
    assert graph.runs == {"padded": 1, "varlen": 2}
    assert "not auto: the results of layout prefix differ" in graph.last.reason
    assert [(v.layout, v.passed) for v in checks()] == [("prefix", False), ("varlen", True)]


def test_a_wrong_gradient_alone_is_caught(monkeypatch):
    model, batch = decoder_pair()
    real = runtime._Scatter.backward

    def once(ctx, grad):  # what several rows read is not summed
        (index,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.rows + 1, *grad.shape[1:])
        total[torch.where(index < 0, ctx.rows, index)] = grad
        return total[: ctx.rows], None

    monkeypatch.setattr(runtime._Scatter, "backward", staticmethod(once))
    packed = pack(model, layout="prefix")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = [gradients(model, run(packed, batch)[batch.mask.bool()].square().sum()) for _ in range(2)]
    want = gradients(model, model(*batch)[batch.mask.bool()].square().sum())
    for found in got:
        for name, expected in want.items():
            assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert [(v.gradients, v.passed) for v in checks()] == [(False, True), (True, False)]
    assert len(told(seen)) == 1 and "gradients of layout prefix" in told(seen)[0]
    assert fx_packing.report().graphs[-1].runs == {"padded": 2}
    assert real is not once


def test_a_small_error_makes_longer_batches_unsafe(monkeypatch):
    model = tiny.PlainDecoder()
    real = runtime.Packed._outputs

    def imprecise(self, batch, plan, flat, results):
        outputs = real(self, batch, plan, flat, results)
        return tuple(o + 1e-3 for o in outputs) if plan.run_tokens > 300 else outputs

    monkeypatch.setattr(runtime.Packed, "_outputs", imprecise)
    packed = pack(model, layout="varlen", dynamic=True)
    small = tiny.batch("left", rows=4, length=30)
    large = tiny.batch("left", rows=12, length=60, lengths=[40] * 12)
    planned = []
    execute = runtime.Packed.execute
    monkeypatch.setattr(
        runtime.Packed,
        "execute",
        lambda self, batch, plan, *a: planned.append(plan.run_tokens) or execute(self, batch, plan, *a),
    )
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        reasons = []
        for batch in (small, large, large, small):
            got, keep = run(packed, batch), batch.mask.bool()
            assert torch.allclose(got[keep], model(*batch)[keep], atol=2e-5)
            reasons.append(fx_packing.report().graphs[-1].last.reason)
    runs = [g.runs for g in fx_packing.report().graphs]
    assert sum(r.get("varlen", 0) for r in runs) == 2 and sum(r.get("padded", 0) for r in runs) == 2
    assert planned.count(480) == 1  # not even tried again
    assert len(told(seen)) == 1 and "from these lengths on" in told(seen)[0]
    assert "480 tokens" in reasons[2] and "differ" in reasons[1]


def test_out_of_memory_in_the_check_leaves_it_open(monkeypatch):
    model, batch = decoder_pair()

    def fails(*_, **__):
        raise torch.OutOfMemoryError("big")

    monkeypatch.setattr(verify, "evaluate", fails)
    packed = pack(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(packed, batch)
        monkeypatch.undo()
        run(packed, batch)
    assert len(told(seen)) == 1 and "memory" in told(seen)[0]
    assert [(v.passed, v.max_error is None) for v in checks()] == [(False, True), (True, False)]
    assert fx_packing.report().graphs[-1].runs == {"prefix": 2}


def test_an_exception_while_planning_is_left_once_and_for_all(monkeypatch):
    model, batch = decoder_pair()
    calls = []

    def fails(*_, **__):
        calls.append(1)
        raise RuntimeError("no plan")

    monkeypatch.setattr(runtime, "make_plan", fails)
    packed = pack(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            run(packed, batch)
    assert len(calls) == 1 and len(told(seen)) == 1 and "no plan" in told(seen)[0]
    assert fx_packing.report().graphs[-1].runs == {"padded": 3}


@pytest.mark.parametrize("error", (KeyboardInterrupt, SystemExit))
def test_interrupts_pass_through_and_change_nothing(error, monkeypatch):
    model, batch = decoder_pair()

    def fails(*_):
        raise error

    packed = pack(model)
    monkeypatch.setattr(KERNELS["segments"], "inputs", fails)
    with torch.no_grad():
        with pytest.raises(error):
            run(packed, batch)
        monkeypatch.undo()
        run(packed, batch)
    assert fx_packing.report().graphs[-1].runs == {"prefix": 1}


def test_padding_that_moves_the_numbers_is_said_once():
    model, batch = tiny.build("gpt2"), shared_batch("left")
    packed = pack(model)
    kwargs = dict(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                packed(**kwargs)
    (message,) = told(seen)
    padded, alone = model(**kwargs).logits, tiny.per_row(model, *batch)
    rows = [
        r
        for r in range(7)
        if f"{float((padded - alone)[r][batch.mask[r].bool()].abs().max()):.3g}" in message
    ]
    assert rows and 'positions": "captured"' in message
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pack(model, positions="captured")(**kwargs)
    assert not told(seen) and checks()[-1].passed


def test_warnings_as_errors_do_not_switch_packing_off():
    model, batch = tiny.build("gpt2"), shared_batch("left")
    packed = pack(model)
    kwargs = dict(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="padding moves its numbers"):
            packed(**kwargs)
        packed(**kwargs)
    assert checks()[-1].passed
    assert fx_packing.report().graphs[-1].runs == {"prefix": 2}


def test_a_reference_that_is_broken_by_padding_is_survived(monkeypatch):
    """Rows whose numbers padding breaks (masks that overflow to -inf do) are evaluated alone."""
    model, batch = decoder_pair()
    real, batches = verify._Reference.values, []

    def values(self, rows, *args):
        batches.append(len(rows))
        return [v * float("nan") if len(rows) > 1 else v for v in real(self, rows, *args)]

    monkeypatch.setattr(verify._Reference, "values", values)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(pack(model, layout="prefix"), batch)
    assert [(v.gradients, v.passed) for v in checks()] == [(False, True), (True, True)]
    assert "7 of 7 rows" in checks()[0].why and max(batches) > 1
    (message,) = told(seen)
    assert "by inf" in message


def test_a_reference_that_is_not_finite_at_all_proves_nothing(monkeypatch):
    model, batch = decoder_pair()
    real = verify._Reference.values
    monkeypatch.setattr(
        verify._Reference, "values", lambda self, *args: [v * float("nan") for v in real(self, *args)]
    )
    run(pack(model, layout="prefix"), batch)
    (check,) = checks()
    assert not check.passed and check.max_error is None and "not finite" in check.why
    assert fx_packing.report().graphs[-1].runs == {"prefix": 1}


# -- limits ----------------------------------------------------------------------------------------


def test_the_token_cap_is_a_guard_that_recompiles_name():
    model = tiny.PlainDecoder()
    packed = pack(model, layout="varlen", max_tokens=120, dynamic=True)

    def score(rows):
        run(packed, tiny.batch("left", rows=rows, length=25, lengths=[20] * rows))

    with torch.no_grad():
        score(3)
        score(4)
        with torch._dynamo.config.patch(error_on_recompile=True):
            with pytest.raises(Exception, match="padded_tokens_within_cap"):
                score(9)
        score(9)
        score(8)
    first, second = fx_packing.report().graphs
    assert first.runs == {"varlen": 2} and second.runs == {"varlen": 2}
    assert first.last.bins == 1 and second.last.bins == 2
    assert any("B * L <= 120" in g for g in first.guards)
    assert any("B * L > 120" in g for g in second.guards)


def test_what_kernels_can_index():
    node = SimpleNamespace(heads=16, head_dim=128, v_head_dim=64)
    assert most_tokens("segments", [node]) is None
    assert most_tokens("varlen", [node]) == 2**30 // (16 * 128)
    assert most_tokens("flex", [node]) == 4096 * 128
    assert most_tokens("flex", [node]) * 16 * 128 < 2**31


def test_a_kernel_limit_splits_a_batch(monkeypatch):
    model, batch = decoder_pair()
    monkeypatch.setattr(runtime.kernels, "most_tokens", lambda *_: 40)
    with torch.no_grad():
        got = run(pack(model, layout="varlen"), batch)
    real = batch.mask.bool()
    assert torch.allclose(got[real], model(*batch)[real], atol=2e-5)
    (graph,) = fx_packing.report().graphs
    assert graph.runs == {"varlen": 1} and graph.last.bins > 1
    monkeypatch.setattr(runtime.kernels, "most_tokens", lambda *_: 4)
    torch._dynamo.reset()
    with torch.no_grad():
        run(pack(model, layout="varlen"), batch)
    assert "segments kernel can index" in fx_packing.report().graphs[-1].last.reason
