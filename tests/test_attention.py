"""The kernels on the CPU: exact values and gradients, one compilation for every forest."""

from __future__ import annotations

import math
import random
from functools import partial
from types import SimpleNamespace

import forests
import pytest
import torch
from forests import dense, random_batch
from torch._dynamo.testing import CompileCounterWithBackend

from fx_packing.attention import KERNELS, choose, flex, segments, varlen
from fx_packing.forest import make_plan
from fx_packing.passes import flex as nodes

SCALE = 0.3
FACTS = {
    "device": "cpu",
    "dtype": torch.float32,
    "head_dim": 64,
    "v_head_dim": 64,
    "window": None,
    "softcap": None,
    "layout": "prefix",
    "training": False,
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def random_plan(rng, layout="prefix", block=8, **sizes):
    mask, ids = random_batch(rng, **sizes)
    return make_plan(mask, [ids], layout=layout, block=block)


def call(kernel, tensors, plan, window=None, softcap=None):
    inputs = kernel.inputs(plan, window)
    return kernel.attend(*tensors, *inputs, scale=SCALE, window=window, softcap=softcap)


def oracle(tensors, plan, window=None, softcap=None):
    """Dense attention; zeros at the pads."""
    out = forests.attention(*tensors, dense(plan, window), SCALE, softcap)
    return out.masked_fill(torch.arange(plan.length)[:, None] >= plan.run_tokens, 0)


def gradients(out, tensors, seed=0):
    """Of a random projection of ``out``, the same one in every dtype."""
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return torch.autograd.grad(out, tensors, direction.to(out.dtype))


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("softcap", (None, 2.0))
@pytest.mark.parametrize("window", (None, 1, 3))
def test_segments_is_exact(layout, window, softcap, monkeypatch):
    rng = random.Random(0)
    for number in range(15):
        # A small limit cuts the scores into several parts.
        monkeypatch.setattr(segments, "_SCORES", rng.choice((30, 2**24)))
        plan = random_plan(rng, layout)
        heads, sizes = rng.choice(((4, 4), (4, 2), (3, 1))), rng.choice(((8, 8), (6, 10), (16, 4)))
        tensors = forests.qkv(plan, heads=heads, sizes=sizes, seed=number)
        for tensor in tensors:
            tensor.requires_grad_()
        out, expected = (f(tensors, plan, window, softcap) for f in (partial(call, segments), oracle))
        assert out.is_contiguous()
        assert (out - expected).abs().max() < 1e-12
        for grad, wanted in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
            assert (grad - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("softcap", (None, 2.0))
@pytest.mark.parametrize("window", (None, 2))
def test_segments_passes_gradcheck_and_opcheck(window, softcap):
    plan = random_plan(random.Random(3), rows=3, columns=4, block=2)
    assert plan.segments()[0] > 1
    tensors = forests.qkv(plan, heads=(2, 1), sizes=(3, 2))
    # Layouts as models have them: heads inside, [1, T, H, D] in memory.
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors]
    attend = partial(segments.attend, scale=SCALE, window=window, softcap=softcap)
    (structure,) = segments.inputs(plan, window)
    assert torch.autograd.gradcheck(lambda *t: attend(*t, structure), tensors)
    arguments = (*tensors, structure, SCALE, window, softcap)
    torch.library.opcheck(torch.ops.fx_packing.segments, arguments)


def test_segments_backward_has_no_backward():
    plan = random_plan(random.Random(3))
    tensors = [t.requires_grad_() for t in forests.qkv(plan)]
    grads = torch.autograd.grad(call(segments, tensors, plan).sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError):
        grads[0].sum().backward()


def test_segments_without_tokens():
    plan = make_plan(torch.zeros(2, 2, dtype=torch.bool), layout="varlen")
    tensors = [t.requires_grad_() for t in forests.qkv(plan)]
    out = call(segments, tensors, plan)
    assert not out.any()
    assert not any(grad.any() for grad in gradients(out, tensors))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_segments_in_low_precision(dtype):
    """As near to the truth as plain attention is in the same dtype; shared keys add no error."""

    def evaluate(attend, tensors, plan):
        out = attend(tensors, plan)
        return out, *gradients(out, tensors)

    rng = random.Random(4)
    for number in range(10):
        plan = random_plan(rng, rows=12, columns=40)
        tensors = [t.requires_grad_() for t in forests.qkv(plan, seed=number, dtype=dtype)]
        wide = [t.detach().double().requires_grad_() for t in tensors]
        truth, plain = evaluate(oracle, wide, plan), evaluate(oracle, tensors, plan)
        for ours, other, exact in zip(
            evaluate(partial(call, segments), tensors, plan), plain, truth, strict=True
        ):
            assert ours.dtype == dtype
            noise = (other - exact).abs().max() + torch.finfo(dtype).eps
            assert (ours - exact).abs().max() <= 2 * noise


def test_segments_keeps_its_dtype_under_autocast():
    plan = random_plan(random.Random(5), rows=5, columns=20)
    q, k, v = forests.qkv(plan, dtype=torch.float32)
    wide = [t.requires_grad_() for t in (q, k, v)]
    for softcap in (None, 3.0):
        out = call(segments, wide, plan, softcap=softcap)
        grads = gradients(out, wide)
        with torch.autocast("cpu", torch.bfloat16):
            under = call(segments, wide, plan, softcap=softcap)
            assert torch.equal(under, out)
            assert all(map(torch.equal, gradients(under, wide), grads))
            # Rotary embedding leaves q and k in float32 while v is half precision.
            mixed = call(segments, (q, k, v.bfloat16()), plan, softcap=softcap)
        assert mixed.dtype == torch.bfloat16
        assert (mixed - out).abs().max() < 0.1


def as_graph(kernel, window=None, softcap=None, sizes=(16, 16)):
    """The kernel as the flat graph has it: a node that calls it, or FlexAttention nodes."""
    graph, modules = torch.fx.Graph(), torch.nn.Module()
    q, k, v, *plan = (graph.placeholder(name) for name in ("q", "k", "v", *kernel.NAMES))
    constants = {"scale": SCALE, "window": window, "softcap": softcap}
    if kernel is flex:
        named = dict(zip(kernel.NAMES, plan, strict=True))
        for name in flex.PER_TOKEN:
            named[name] = graph.call_method("flatten", (named[name],))
        scope = SimpleNamespace(graph=graph, modules=modules, values={})
        length = graph.call_method("size", (q, 2))
        options = nodes.options(torch.device("cpu"), torch.float32, *sizes)
        out = nodes.flex_attention(scope, q, k, v, named.__getitem__, length, options=options, **constants)
    else:
        out = graph.call_function(kernel.attend, (q, k, v, *plan), constants)
    graph.output(out)
    return torch.fx.GraphModule(modules, graph)


def compiled(kernel, backend, window=None, softcap=None, **options):
    """`as_graph` inside a nested compile; and a counter."""
    count = CompileCounterWithBackend(backend)
    module = as_graph(kernel, window, softcap, **options)
    run = torch.compile(lambda *args: module(*args), backend=count, fullgraph=True)

    def attend(tensors, plan):
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        return run(*tensors, *kernel.inputs(plan, window))

    return attend, count


@pytest.mark.parametrize("window", (None, 3))
def test_segments_compiles_once(window):
    """Neither a new length, nor a new forest, nor one without any token compiles again."""
    attend, count = compiled(segments, "aot_eager", window)
    rng = random.Random(6)
    plans = [random_plan(rng, rng.choice(("varlen", "prefix")), columns=30) for _ in range(12)]
    plans.append(make_plan(torch.zeros(1, 1, dtype=torch.bool), layout="varlen", block=8))
    assert len({plan.length for plan in plans}) > 4
    for plan in plans:
        tensors = [t.requires_grad_() for t in forests.qkv(plan)]
        out, expected = attend(tensors, plan), oracle(tensors, plan, window)
        assert (out - expected).abs().max() < 1e-12
        for grad, wanted in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
            assert (grad - wanted).abs().max() < 1e-10
    assert count.frame_count == 1


@pytest.mark.parametrize("window, softcap", ((None, None), (40, 20.0)))
def test_flex_compiles_once(window, softcap, unmistakable_sizes):
    """Inference on the CPU, lowered by Inductor, at several lengths."""
    attend, count = compiled(flex, "inductor", window, softcap, sizes=(16, 32))
    rng = random.Random(7)
    lengths = set()
    for columns in (150, 300, 80, 200):
        ids = torch.randint(2, (4, columns), generator=torch.Generator().manual_seed(columns))
        ids[:, : columns // 2] = ids[:1, : columns // 2].clone()
        plan = make_plan(ids >= 0, [ids], layout=rng.choice(("varlen", "prefix")))
        lengths.add(plan.length)
        exact = forests.qkv(plan, sizes=(16, 32))
        with torch.no_grad():
            out = attend([t.float() for t in exact], plan)
        assert out.shape == (1, 4, plan.length, 32)
        assert out.isfinite().all()
        expected = oracle(exact, plan, window, softcap)
        assert (out - expected)[:, :, : plan.run_tokens].abs().max() < 1e-5
    assert len(lengths) > 2
    assert count.frame_count == 1


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("window, softcap", ((None, None), (3, None), (None, 2.0), (40, 20.0)))
def test_flex_nodes_are_exact(window, softcap, layout):
    """Values and gradients, by torch's own dense reading of the nodes: Inductor has no backward here."""
    attend, count = compiled(flex, "aot_eager", window, softcap)
    rng = random.Random(10)
    for number in range(4):
        plan = random_plan(rng, layout, block=128, columns=60)
        tensors = [t.requires_grad_() for t in forests.qkv(plan, seed=number)]
        out, expected = attend(tensors, plan), oracle(tensors, plan, window, softcap)
        real = slice(plan.run_tokens)
        assert (out - expected)[:, :, real].abs().max() < 1e-12
        grads = gradients(out[:, :, real], tensors)
        for grad, wanted in zip(grads, gradients(expected[:, :, real], tensors), strict=True):
            assert (grad - wanted).abs().max() < 1e-10
    assert count.frame_count == 1


def test_flex_is_visible_in_the_graph():
    module = as_graph(flex, window=5, softcap=20.0)
    (call,) = (n for n in module.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
    q, k, v, score, block_mask, scale, _ = call.args
    assert [n.name for n in (q, k, v)] == ["q", "k", "v"] and scale == SCALE
    assert block_mask[0].target == "size" and [n.name for n in block_mask[2:4]] == list(flex.NAMES[2:4])
    assert score.op == "get_attr" and block_mask[-1].target is partial
    assert set(block_mask[-1].kwargs) == {"end", "depth"}
    end, depth = torch.tensor([4, 3, 3, 4]), torch.tensor([0, 1, 2, 1])
    keep = module.get_submodule(block_mask[-1].args[0].target)
    seen = [[bool(keep(0, 0, torch.tensor(q), kv, end, depth)) for kv in range(4)] for q in range(4)]
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    capped = module.get_submodule(score.target)(torch.tensor(30.0), 0, 0, 0, 0)
    assert abs(float(capped) - 20 * math.tanh(1.5)) < 1e-5


def test_flex_on_tensors_is_the_same(unmistakable_sizes):
    """`attend`, which the GPU's tests call, and the nodes of the flat graph."""
    plan = random_plan(random.Random(11), block=128, columns=90)
    tensors = [t.float() for t in forests.qkv(plan)]
    with torch.no_grad():
        ours = compiled(flex, "inductor", 3, 2.0)[0](tensors, plan)
        run = torch.compile(lambda *args: call(flex, *args, 3, 2.0))
        assert (run(tensors, plan) - ours)[:, :, : plan.run_tokens].abs().max() < 1e-6


def test_varlen_compiles_once(monkeypatch):
    """Chains only differ in data. In place of the GPU's kernels stands the segments operator."""
    attend, count = compiled(varlen, "aot_eager", 3)

    def swap(*tensors):
        return (t.transpose(0, 1)[None] for t in tensors)

    def forward(q, k, v, bounds, longest, scale, window):
        assert longest >= bounds.diff().max()
        out = torch.ops.fx_packing.segments(*swap(q, k, v), plan.segments(), scale, window, None)
        return out[0].transpose(0, 1), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(grad, q, k, v, out, lse, bounds, longest, scale, window):
        tensors = (*swap(grad, q, k, v), plan.segments(), scale, window, None)
        return tuple(g[0].transpose(0, 1) for g in torch.ops.fx_packing.segments_backward(*tensors))

    monkeypatch.setattr(varlen, "flash_forward", forward)
    monkeypatch.setattr(varlen, "flash_backward", backward)
    rng = random.Random(8)
    for _ in range(8):
        plan = random_plan(rng, "varlen", columns=30)
        tensors = [t.requires_grad_() for t in forests.qkv(plan)]
        out, expected = attend(tensors, plan), oracle(tensors, plan, 3)
        assert (out - expected).abs().max() < 1e-12
        for grad, wanted in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
            assert (grad - wanted).abs().max() < 1e-10
    assert count.frame_count == 1


def test_inputs_are_built_once():
    plan = random_plan(random.Random(9), "varlen", block=128)
    for kernel in KERNELS.values():
        first, second = kernel.inputs(plan, 5), kernel.inputs(plan, 5)
        assert all(a is b for a, b in zip(first, second, strict=True))


def test_choice_of_kernel():
    assert choose("auto", **FACTS) == ("segments", "first choice on cpu")
    assert choose("segments", **FACTS) == ("segments", "requested")
    name, reason = choose("flex", **FACTS)
    assert name == "segments" and "not used on cpu" in reason
    name, reason = choose("varlen", **FACTS)
    assert name == "segments" and "chains" in reason
    with pytest.raises(ValueError, match="expected one of auto, segments, varlen, flex"):
        choose("flash", **FACTS)


def test_choice_of_kernel_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    half = {**FACTS, "device": "cuda", "dtype": torch.bfloat16, "training": True}
    chains = {**half, "layout": "varlen"}
    assert choose("auto", **chains) == ("varlen", "first choice on cuda")
    assert choose("auto", **half)[0] == "flex"
    assert choose("auto", **{**chains, "softcap": 50.0})[0] == "flex"
    assert choose("auto", **{**chains, "v_head_dim": 128})[0] == "flex"
    assert choose("auto", **{**chains, "dtype": torch.float32})[0] == "flex"
    name, reason = choose("auto", **{**half, "dtype": torch.float64})
    assert name == "segments" and "float64" in reason
