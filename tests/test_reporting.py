"""What the user reads and says: reports, options, the opt-out, logs, dumps, and what failures do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import depyf
import pytest
import tiny
import torch
from packing import assert_packed, messages, pack, shared_batch, stored_tokens
from torch._dynamo.utils import counters

import fx_packing
from fx_packing import compat, inner
from fx_packing.attention import KERNELS
from fx_packing.errors import dotted

HERE = Path(__file__).parent


def decoder(**flags) -> tiny.PlainDecoder:
    return tiny.PlainDecoder(**flags)


def alone(model, batch, got, tolerance=2e-5) -> None:
    real = batch.mask.bool()
    want = tiny.per_row(model, *batch)
    assert float((got - want)[real].detach().abs().max()) < tolerance


def as_padded(model, batch, got, tolerance=2e-5) -> None:
    real = batch.mask.bool()
    assert float((got - model(*batch))[real].detach().abs().max()) < tolerance


# -- reports ---------------------------------------------------------------------------------------


def test_report_as_text_and_as_data():
    assert fx_packing.report().graphs == []
    assert "no graph" in str(fx_packing.report())
    model = tiny.build("mistral")
    batch = shared_batch("left")
    packed = pack(model, max_tokens=1000)
    for _ in range(2):
        packed(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    graph = assert_packed("auto", *batch)
    assert graph.runs == {"prefix": 2}
    assert [v.gradients for v in graph.verifications] == [False, True]
    assert graph.last.rows == 7 and graph.last.real_tokens == int(batch.mask.sum())
    assert [(a.heads, a.kv_heads, a.head_dim, a.window) for a in graph.attention] == [(4, 2, 16, 7)] * 2
    assert all(a.scale == 0.25 and a.softcap is None and not a.sinks for a in graph.attention)
    assert any("1000" in g for g in graph.guards)
    text = str(fx_packing.report())
    stored = stored_tokens(*batch)
    for part in ("prefix: 2", f"{batch.mask.numel()} padded", f"{stored} run", "window 7", "passed"):
        assert part in text, text
    data = json.loads(fx_packing.report().to_json())
    assert data["graphs"][0]["last"]["run_tokens"] == stored
    assert data["graphs"][0]["runs"] == {"prefix": 2}
    assert data["graphs"][0]["verifications"][0]["passed"] is True
    assert data["graphs"][0]["attention"][0]["window"] == 7


def test_report_of_a_refusal():
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = decoder()

        def forward(self, ids, mask):
            return self.decoder(ids, mask).mean(1)

    model, batch = Mean(), shared_batch("left")
    got = pack(model)(*batch)
    assert torch.allclose(got, model(*batch))
    (graph,) = fx_packing.report().graphs
    assert not graph.rewritten and graph.runs == {"padded": 1}
    assert "mean" in graph.reason and "test_reporting.py" in graph.reason
    assert graph.last.layout == "padded" and graph.last.reason == graph.reason
    assert graph.last.run_tokens == graph.last.padded_tokens == batch.ids.numel()
    assert "runs as captured" in str(fx_packing.report())
    torch._dynamo.reset()
    with pytest.raises(fx_packing.PackingError, match="mean"):
        pack(model, on_refuse="raise")(*batch)


def test_reset_forgets_and_all_works_again():
    model, batch = decoder(), shared_batch("left")
    packed = pack(model)
    with torch.no_grad():
        packed(*batch)
    assert len(fx_packing.report().graphs) == 1 and len(inner._flats) == 1
    torch._dynamo.reset()  # calls fx_packing.reset
    assert fx_packing.report().graphs == [] and not inner._flats
    with torch.no_grad():
        alone(model, batch, packed(*batch))
    assert_packed("auto", *batch)
    old = fx_packing.report()
    fx_packing.reset()
    assert fx_packing.report().graphs == [] and not inner._flats
    assert not counters["grpo_pack"] and old.graphs[0].runs == {"prefix": 1}
    with torch.no_grad():  # the compiled model is still there: it is checked and reported afresh
        alone(model, batch, packed(*batch))
    graph = assert_packed("auto", *batch)
    assert graph.runs == {"prefix": 1} and len(graph.verifications) == 1


# -- explain ---------------------------------------------------------------------------------------


def caches(model) -> list:
    code = type(model).forward.__code__
    return list(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


@pytest.mark.parametrize("what", ("model", "compiled", "in place", "function"))
def test_explain_leaves_nothing_behind(what):
    model = tiny.build("llama")
    batch = shared_batch("left")
    kwargs = dict(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    packed = pack(model)
    with torch.no_grad():
        packed(**kwargs)
    if what == "in place":
        model.compile(backend="grpo_pack", options={"inner": "eager"})
    before = (
        fx_packing.report().to_json(),
        len(caches(model)),
        [(k, c.compiles) for k, c in inner._flats.items()],
        +counters["grpo_pack"],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )
    target = {"compiled": packed, "function": lambda **kw: model(**kw).logits}.get(what, model)
    seen = fx_packing.explain(target, **kwargs)
    (graph,) = seen.graphs
    assert_packed("auto", *batch, graph=graph)
    assert "2 x sdpa" in str(seen) and json.loads(seen.to_json())["graphs"]
    after = (
        fx_packing.report().to_json(),
        len(caches(model)),
        [(k, c.compiles) for k, c in inner._flats.items()],
        +counters["grpo_pack"],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )
    assert after == before
    with torch.no_grad():
        packed(**kwargs)
    assert len(fx_packing.report().graphs) == 1  # nothing was captured again
    assert fx_packing.report().graphs[0].runs == {"prefix": 2}


def test_explain_keeps_no_flat_graph():
    fx_packing.explain(decoder(), *shared_batch("left"))
    assert fx_packing.report().graphs == [] and not inner._flats


def test_explain_says_why_not_and_raises_what_the_model_raises():
    batch = shared_batch("left")
    seen = fx_packing.explain(lambda ids, mask: decoder()(ids, mask).cumsum(1), *batch)
    assert not seen.graphs[-1].rewritten and "cumsum" in seen.graphs[-1].reason
    with pytest.raises(IndexError, match="out of range"):
        fx_packing.explain(decoder(), batch.ids + 1000, batch.mask)
    assert fx_packing.report().graphs == []


# -- the opt-out -----------------------------------------------------------------------------------


def test_disabled_nests_and_toggling_compiles_nothing_again():
    model, batch = decoder(), shared_batch("left")
    packed = pack(model)

    def run():
        with torch.no_grad():
            return packed(*batch)

    alone(model, batch, run())
    with fx_packing.disabled():
        as_padded(model, batch, run())
        with fx_packing.disabled():
            as_padded(model, batch, run())
        as_padded(model, batch, run())
    packing = [g for g in fx_packing.report().graphs if g.rewritten]
    off = [g for g in fx_packing.report().graphs if not g.rewritten]
    assert len(packing) == 1 and len(off) <= 1
    assert packing[0].runs.get("prefix") == 1
    assert sum(g.runs.get("padded", 0) for g in packing + off) == 3
    reasons = [g.last.reason for g in off] or [packing[0].last.reason]
    assert "disabled" in reasons[0]
    captured = counters["stats"]["unique_graphs"]
    for _ in range(2):
        alone(model, batch, run())
        with fx_packing.disabled():
            run()
    assert counters["stats"]["unique_graphs"] == captured  # both came from the cache
    assert packing[0].runs["prefix"] == 3
    with pytest.raises(KeyError), fx_packing.disabled():
        raise KeyError
    run()
    assert packing[0].last.layout == "prefix"


def test_enabled_false_and_layout_padded():
    model, batch = decoder(), shared_batch("left")
    as_padded(model, batch, pack(model, enabled=False, on_refuse="raise")(*batch))
    graph = fx_packing.report().graphs[-1]
    assert not graph.rewritten and "enabled=False" in graph.reason
    torch._dynamo.reset()
    as_padded(model, batch, pack(model, layout="padded")(*batch))
    graph = fx_packing.report().graphs[-1]
    assert graph.runs == {"padded": 1} and "padded" in graph.last.reason


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from packing import pack, shared_batch
import tiny, fx_packing
model, batch = tiny.PlainDecoder(), shared_batch("left")
with torch.no_grad():
    got = pack(model)(*batch)
real = batch.mask.bool()
assert float((got - model(*batch))[real].abs().max()) < 2e-5
print("RUNS", [(g.rewritten, g.runs, g.reason) for g in fx_packing.report().graphs])
"""


def in_a_process(**environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=str(HERE))],
        env=os.environ | environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_the_environment_switches_it_off():
    out = in_a_process(FX_PACKING="0").stdout
    assert "[(False, {'padded': 1}, " in out and "FX_PACKING" in out


def test_torch_logs_show_what_is_decided():
    done = in_a_process(TORCH_LOGS="+fx_packing")
    assert "[(True, {'prefix': 1}, None)]" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "graph 0" in line]
    assert any("is packed" in line for line in lines), done.stderr
    assert any("ran" in line and "prefix" in line for line in lines), done.stderr


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"layuot": "varlen"}, ["layuot", "Did you mean 'layout'?", "min_sharing", "on_refuse"]),
        ({"layout": "varlens"}, ["'layout'", "'auto'", "'padded'", "Did you mean 'varlen'?"]),
        ({"layout": 3}, ["'layout'", "got 3"]),
        ({"max_tokens": "many"}, ["'max_tokens'", "positive int", "'many'"]),
        ({"max_tokens": 0}, ["'max_tokens'", "got 0"]),
        ({"max_tokens": True}, ["'max_tokens'", "got True"]),
        ({"min_sharing": 0.5}, ["'min_sharing'", ">= 1"]),
        ({"enabled": "no"}, ["'enabled'", "True or False"]),
        ({"inner": "inductr"}, ["inductr", "Did you mean 'inductor'?"]),
        ({"inner": "grpo_pack"}, ["'inner'"]),
        ({"max_tokens": 8, "mini_batch_rows": 2}, ["max_tokens", "mini_batch_rows"]),
        ({1: 2}, ["unknown option 1"]),
    ],
    ids=str,
)
def test_bad_options_are_named(options, parts):
    with pytest.raises(ValueError) as caught:
        torch.compile(decoder(), backend="grpo_pack", options=options)(*shared_batch("left"))
    for part in parts:
        assert part in str(caught.value)


# -- dumps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manager", "family"),
    [
        (depyf.prepare_debug, "llama"),
        (fx_packing.prepare_debug, "gpt2"),
        # depyf alone fails on this forward, whatever the backend.
        (fx_packing.prepare_debug, "plain"),
    ],
)
def test_dumps_are_readable(manager, family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a graph lands that is written outside the folder
    where = tmp_path / "dump"
    batch = shared_batch("left")
    model = decoder() if family == "plain" else tiny.build(family)
    compiled = pack(model, fullgraph=False)

    def packed(ids, mask):
        return tiny.logits_of(compiled(ids, attention_mask=mask))

    if family != "plain":
        model.config.use_cache = False
    with manager(str(where)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # depyf's own
        got = packed(*batch)
    alone(model, batch, got)
    assert_packed("auto", *batch)
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]
    files = {p.name: p.read_text() for p in where.rglob("*.py")}
    for name, has, lacks in (
        ("grpo_pack.captured", ("scaled_dot_product_attention", "def forward(self"), "index_select"),
        ("grpo_pack.flat", ("attend", "def forward(self"), "scaled_dot_product_attention("),
        ("grpo_pack.prefix", ("higher_order.flex_attention(", "class mask_mod", "end[kv]"), "attend("),
    ):
        found = [text for file, text in files.items() if name in file]
        assert found, sorted(files)
        assert all(part in found[0] for part in has), found[0]
        code = [line for line in found[0].splitlines() if "# File" not in line]
        assert not any(lacks in line for line in code)
        compile(found[0], name, "exec")  # is Python
    alone(model, batch, packed(*batch))  # and all still works outside


def test_no_prefix_graph_is_dumped_where_none_can_run(tmp_path):
    with fx_packing.prepare_debug(str(tmp_path)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # depyf's own
        pack(decoder(), fullgraph=False, layout="varlen")(*shared_batch("left"))
    names = {p.name.split(".")[2] for p in tmp_path.glob("*grpo_pack*")}
    assert names == {"captured", "flat"}


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", (RuntimeError("no such kernel"), torch.OutOfMemoryError("big")))
def test_a_kernel_that_fails_is_left_once_and_for_all(error, monkeypatch):
    model, batch = decoder(), shared_batch("left")
    packed = pack(model, layout="prefix")
    calls = []

    def fails(*_):
        calls.append(1)
        raise error

    monkeypatch.setattr(KERNELS["segments"], "inputs", fails)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            as_padded(model, batch, packed(*batch))
    assert len(calls) == 1
    told = [str(w.message) for w in seen if "fx_packing" in str(w.message)]
    assert len(told) == 1 and str(error) in told[0] and type(error).__name__ in told[0]
    (graph,) = fx_packing.report().graphs
    assert graph.rewritten and graph.runs == {"padded": 3} and str(error) in graph.last.reason


def test_a_refused_graph_counts_its_batch_not_its_weights():
    pack(torch.nn.Embedding(50, 6))(torch.ones(3, 7, dtype=torch.int64))
    (graph,) = fx_packing.report().graphs
    assert not graph.rewritten and (graph.last.rows, graph.last.padded_tokens) == (3, 21)


def test_what_the_inner_compiler_met_is_named(monkeypatch):
    model, batch, calls = decoder(), shared_batch("left"), []

    def compiler(gm, example_inputs):
        calls.append(gm)
        if len(calls) == 1:
            raise RuntimeError("no compiler here")
        return gm

    monkeypatch.setattr(compat, "lookup_backend", lambda name: compiler)
    with torch.no_grad(), pytest.warns(UserWarning, match="RuntimeError: no compiler here"):
        as_padded(model, batch, pack(model)(*batch))
    (graph,) = fx_packing.report().graphs
    assert graph.runs == {"padded": 1} and "no compiler here" in graph.last.reason


def test_out_of_memory_leaves_smaller_batches_packed(monkeypatch):
    model = decoder()
    packed = pack(model, dynamic=True)
    real = KERNELS["segments"].inputs

    def fails(plan, window):
        if plan.run_tokens > 256:
            raise torch.OutOfMemoryError("big")
        return real(plan, window)

    monkeypatch.setattr(KERNELS["segments"], "inputs", fails)
    small = tiny.batch("left", rows=4, length=30)
    large = tiny.batch("left", rows=12, length=60, lengths=[40] * 12)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (small, large, large, small):
            as_padded(model, batch, packed(*batch))
    runs = {k: sum(g.runs.get(k, 0) for g in fx_packing.report().graphs) for k in ("varlen", "padded")}
    assert runs == {"varlen": 2, "padded": 2}


def test_an_error_of_the_model_itself_passes_through():
    model, batch = decoder(), shared_batch("left")
    packed = pack(model)
    bad = batch.ids.clone()
    bad[batch.mask.bool().nonzero()[0].unbind()] = 1000
    with pytest.raises(IndexError) as expected:
        model(bad, batch.mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(IndexError) as caught:
                packed(bad, batch.mask)
            assert str(caught.value) == str(expected.value)
            alone(model, batch, packed(*batch))  # a good batch is packed as ever
            assert_packed("auto", *batch)


@pytest.mark.parametrize(
    "shape", ("mask too short", "mask of one row", "mask of one row, after a good one", "ids 1-D")
)
def test_wrong_shapes_do_what_the_captured_graph_does(shape):
    model, batch = decoder(), shared_batch("left")
    packed, plain = pack(model), torch.compile(model, backend="eager")
    if "good one" in shape:
        alone(model, batch, packed(*batch))
        assert_packed("auto", *batch)
    ids, mask = {
        "mask too short": (batch.ids, batch.mask[:, 1:]),
        "ids 1-D": (batch.ids[0], batch.mask[0]),
    }.get(shape, (batch.ids, batch.mask[:1]))
    try:
        want = plain(ids, mask)
    except Exception as expected:
        with pytest.raises(type(expected)) as caught:
            packed(ids, mask)
        assert str(caught.value).splitlines()[0] == str(expected).splitlines()[0]
    else:
        got = packed(ids, mask)
        real = mask.bool().expand(ids.shape)
        assert got.shape == want.shape
        assert float((got - want)[real].detach().abs().max()) < 2e-5


def test_rows_without_tokens():
    model = decoder()
    packed = pack(model)
    batch = shared_batch("left")
    some = tiny.Batch(batch.ids, batch.mask.clone())
    some.mask[[0, 6]] = 0
    got = packed(*some)
    alone(model, some, got)
    assert_packed("auto", *some)
    assert bool((got[[0, 6]] == 0).all())
    none = packed(batch.ids, torch.zeros_like(batch.mask))
    assert none.shape == got.shape and bool((none == 0).all())
    none.sum().backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in model.parameters())


@pytest.mark.parametrize("value", (2, -1))
def test_a_mask_that_is_not_zero_and_one_runs_as_captured(value):
    model, batch = decoder(), shared_batch("left")
    mask = batch.mask * value
    got = pack(model)(batch.ids, mask)
    assert float((got - model(batch.ids, mask))[batch.mask.bool()].detach().abs().max()) < 2e-5
    graph = fx_packing.report().graphs[-1]
    assert graph.last.layout == "padded" and "0 and 1" in graph.last.reason


def test_a_refused_model_is_said_once_with_the_reason():
    model = tiny.build("llama")
    packed = pack(model, fullgraph=False)  # use_cache is left at True
    with messages() as told, torch.no_grad():
        for length in (26, 26, 31):
            other = shared_batch("left", length=length)
            packed(input_ids=other.ids, attention_mask=other.mask)
    assert len(told) == 1 and "runs as captured" in told[0] and "use_cache=False" in told[0]
    assert set(fx_packing.report().graphs[-1].runs) == {"padded"}


CASES = {
    "two": (lambda mask: mask * 2, {}, "values other than 0 and 1"),
    "cap": (lambda mask: mask, {"max_tokens": 8}, "exceeds the cap of 8 tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_cannot_be_packed_is_said_once(case):
    change, options, reason = CASES[case]
    model, batch = decoder(), shared_batch("left")
    mask = change(batch.mask)
    packed = pack(model, **options)
    with messages() as told, torch.no_grad():
        for _ in range(3):
            got = packed(batch.ids, mask)
            assert float((got - model(batch.ids, mask))[batch.mask.bool()].abs().max()) < 2e-5
    assert len(told) == 1 and "a batch runs as captured" in told[0] and reason in told[0]
    assert fx_packing.report().graphs[-1].runs == {"padded": 3}
    with torch.no_grad(), pytest.raises(fx_packing.PackingError, match=reason):
        pack(model, on_refuse="raise", **options)(batch.ids, mask)


def test_pieces_without_attention_and_what_is_switched_off_are_not_warned_of():
    model, batch = tiny.build("llama"), shared_batch("left")
    with messages() as told, torch.no_grad():
        pack(lambda x: x.cumsum(1))(torch.ones(3, 5))
        pack(model, enabled=False)(input_ids=batch.ids, attention_mask=batch.mask)
    assert not told and [g.rewritten for g in fx_packing.report().graphs] == [False, False]


@pytest.mark.parametrize(
    "source, name",
    (
        ("L['self']._modules['model']._modules['layers']._modules['0']._parameters['w']", "model.layers.0.w"),
        ("L['args'][0]._modules['embed'].norm_type", "embed.norm_type"),
        ("L['temperature']", "temperature"),
        ("L['kwargs']['temperature']", "temperature"),
        ("L['config'].temperature", "temperature"),
        ("G['TEMPERATURE']", "TEMPERATURE"),
        ("L['self']", ""),
    ),
)
def test_names_of_sources(source, name):
    assert dotted(source) == name
