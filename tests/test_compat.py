"""A canary for each private API that `compat.py` and `compat_kernels.py` touch: a new torch that
moves one shows here, by name, before anything else breaks."""

from __future__ import annotations

import inspect
import logging
import operator
import re

import packing
import pytest
import tiny
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import fx_packing
from fx_packing import compat, compat_kernels
from fx_packing.inner import own_function
from fx_packing.masks import BlockTensors


def captured(fn, *args, dynamic=None):
    """The graph of `fn` and its example inputs."""
    found = []

    def backend(gm, example_inputs):
        found.append((gm, example_inputs))
        return gm

    torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return found[-1]


def placeholders(gm):
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def test_lookup_backend():
    assert callable(compat.lookup_backend("eager")) and callable(compat.lookup_backend("grpo_pack"))
    from torch._dynamo.exc import InvalidBackend

    with pytest.raises(InvalidBackend):
        compat.lookup_backend("no_such_backend")


def test_sources_tell_parameters_from_what_the_caller_passes():
    sources = {}

    def backend(gm, example_inputs):
        for source in map(compat.source_of, placeholders(gm)):  # Dynamo drops them afterwards
            sources[compat.source_name(source)] = compat.is_module_source(source)
        return gm

    torch.compile(nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    assert sorted(sources.values()) == [False, True, True]
    assert any("_parameters" in name for name in sources)
    assert "L['" in next(name for name, module in sources.items() if not module)
    assert compat.source_name(None) == "" and not compat.is_module_source(None)


def test_model_being_captured():
    names = []

    def backend(gm, example_inputs):
        names.append(compat.model_being_captured())
        return gm

    torch.compile(nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    torch.compile(lambda m, x: m(x) * 2, backend=backend)(nn.ReLU(), torch.ones(2, 3))
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, 3))
    assert names == ["Linear", "ReLU", ""] and compat.model_being_captured() == ""


def test_size_hint():
    assert compat.size_hint(7) == 7
    gm, _ = captured(lambda x: x * 2, torch.ones(5, 3), dynamic=True)
    sizes = [n.meta["example_value"] for n in placeholders(gm)]
    (tensor,) = [s for s in sizes if isinstance(s, torch.Tensor)]
    assert isinstance(tensor.shape[0], torch.SymInt)
    assert [compat.size_hint(s) for s in tensor.shape] == [5, 3]


@pytest.mark.parametrize("tied", (True, False))
def test_distance(tied):
    def cut(x, number):
        kept = x[:, -number - 1 :]
        return kept + x if tied else kept  # what is added is as wide: a guard

    gm, _ = captured(cut, torch.ones(3, 7), 6, dynamic=True)
    values = [n.meta["example_value"] for n in placeholders(gm)]
    (tensor,) = (v for v in values if isinstance(v, torch.Tensor))
    assert compat.distance(tensor.shape[1], values[0]) == (1 if tied else None)
    assert compat.distance(tensor.shape[1], 6) is None and compat.distance(7, 6) is None


def test_checkpoint_operator():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(3, 3)
    gm, _ = captured(lambda x: checkpoint(layer, x, use_reentrant=False), torch.ones(2, 3))
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert any(compat.is_checkpoint(t) and compat.is_higher_order(t) for t in targets)
    assert not compat.is_higher_order(torch.add)


def test_flex_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, kv: kv <= q, 1, 1, 256, 256, device="cpu")
    tensors = {name: getattr(mask, name) for name in BlockTensors._fields}
    ours = compat.flex_block_mask(256, tensors, 128, mask.mask_mod)
    theirs = mask.as_tuple()
    assert len(ours) == len(theirs) and all(a is b or a == b for a, b in zip(ours, theirs, strict=True))


def test_flex_operator_and_its_options():
    """What torch's own `flex_attention` gives the operator, as Dynamo sees it, is what we give it."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 2, 128, 16)
    with torch.no_grad():
        gm, _ = captured(lambda q: flex_attention(q, q, q, kernel_options={"num_warps": 4}), q)
    (call,) = (n for n in gm.graph.nodes if n.target is compat.FLEX_ATTENTION)
    assert compat.is_higher_order(call.target) and call.args[:3] == (call.args[0],) * 3
    assert dict(call.args[6]) == compat.flex_options(torch.device("cpu"), {"num_warps": 4})
    (result,) = call.users
    assert result.target is operator.getitem and result.args[1] == 0
    if torch.cuda.is_available():
        assert compat.flex_options(torch.device("cuda"), None)["OUTPUT_LOGSUMEXP"] is True


def test_fake_and_real_tensors_inside_a_backend():
    from torch._subclasses.fake_tensor import FakeTensor

    seen = []

    def backend(gm, example_inputs):
        with compat.fake_tensors():
            fake = torch.empty(10**6, 10**6)
            with compat.real_tensors():
                seen.extend([fake, torch.ones(2) + 1])
        return gm

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert isinstance(seen[0], FakeTensor) and not isinstance(seen[1], FakeTensor)
    assert seen[1].tolist() == [2.0, 2.0]


def test_the_switch_is_a_guard():
    calls = []

    def backend(gm, example_inputs):
        compat.guard_on_switch()
        calls.append(gm)
        return gm

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    x = torch.ones(2)
    compiled(x)
    with fx_packing.disabled():
        compiled(x)
    compiled(x)  # the first compilation is found again
    assert len(calls) == 2
    compat.guard_on_switch()  # outside of a compilation: nothing happens


def test_mark_dynamic():
    shapes = []

    def backend(gm, example_inputs):
        shapes.append(placeholders(gm)[-1].meta["example_value"].shape)
        return gm

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(compat.mark_dynamic(torch.ones(5, 3), 0))
    compiled(compat.mark_dynamic(torch.ones(9, 3), 0))
    assert len(shapes) == 1


def test_dump_graph_and_a_lazy_graph_under_a_nested_compile(monkeypatch):
    import torch._dynamo.utils as utils

    assert list(inspect.signature(utils.lazy_format_graph_code).parameters)[:2] == ["name", "gm"]
    gm, inputs = captured(lambda x: x + 1, torch.ones(2))

    def depyf_like(name, gm, maybe_id=None, **kwargs):
        gm.meta["shown"] = name

    with monkeypatch.context() as patch:
        trace, handler = logging.getLogger("torch.__trace"), logging.Handler()
        patch.setattr(trace, "handlers", [])  # pytest's are among them
        compat.dump_graph("grpo_pack.test", lambda: pytest.fail("made, though nobody looks"))
        traced = []
        handler.emit = traced.append
        trace.addHandler(handler)
        patch.setattr(utils.lazy_format_graph_code, "__code__", depyf_like.__code__)  # as depyf does
        compat.dump_graph("grpo_pack.test", lambda: gm)
    assert gm.meta["shown"] == "grpo_pack.test"
    (record,) = (r for r in traced if "artifact" in r.metadata)
    assert record.metadata["artifact"]["name"] == "grpo_pack.test" and "def forward" in record.payload
    nested = torch.compile(lambda *args: gm(*args), backend="eager", fullgraph=True)
    assert nested(*inputs)[0].tolist() == [2.0, 2.0]


def test_autocast_regions_become_blocks():
    """Nested ones too; Dynamo traces the blocks, in torch 2.11 not the calls that it makes of them."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, None))
    inner = graph.call_function(_enter_autocast, ("cpu", None, False, None))
    kept = graph.call_function(torch.mm, (x, x))
    graph.call_function(_exit_autocast, (inner,))
    cast = graph.call_function(torch.mm, (x, x))
    graph.call_function(_exit_autocast, (outer,))
    graph.output((kept, cast, graph.call_function(torch.mm, (x, x))))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    compat.force_recompile(gm)
    compat.force_recompile(gm)  # once is enough
    assert gm.code.count("with torch.autocast(") == 2 and "_autocast" not in gm.code
    compiled = torch.compile(own_function(gm, "blocks"), backend="eager", fullgraph=True)
    x = torch.randn(3, 3)
    for function in (gm, compiled):
        assert [y.dtype for y in function(x)] == [torch.float32, torch.bfloat16, torch.float32]
        assert not torch.is_autocast_enabled("cpu")


def test_count():
    from torch._dynamo.utils import counters

    before = counters["grpo_pack"]["canary"]
    compat.count("canary")
    assert counters["grpo_pack"]["canary"] == before + 1


def test_ddp_is_splitting():
    from torch.nn.parallel import DistributedDataParallel

    assert DistributedDataParallel._get_active_ddp_module() is None
    assert isinstance(torch._dynamo.config.optimize_ddp, (bool, str))
    assert compat.ddp_is_splitting() is False


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_is_collective(one_process):
    def function(x):
        y = x * 2
        torch.distributed.all_reduce(y)
        return y

    gm, _ = captured(function, torch.ones(3))
    assert any(compat.is_collective(n.target) for n in gm.graph.nodes if n.op == "call_function")
    assert not compat.is_collective(torch.add) and not compat.is_collective(torch.ops.aten.add.Tensor)


def test_a_collective_is_refused_though_nobody_reads_its_result(one_process):
    """Ranks that fall back, or check, would run it oftener than others."""

    class Noisy(tiny.PlainDecoder):
        def forward(self, ids, mask):
            counted = mask.sum() * 2
            torch.distributed.all_reduce(counted)
            return super().forward(ids, mask)

    batch = packing.shared_batch("left")
    with torch.no_grad():
        packing.pack(Noisy(layers=1), fullgraph=False)(*batch)
    (graph,) = fx_packing.report().graphs
    assert not graph.rewritten and "all_reduce is a collective" in graph.reason


@pytest.mark.parametrize("way", ("module", "in place", "function"))
def test_fsdp_is_splitting(way, one_process):
    from torch.distributed.fsdp import fully_shard

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.second(self.first(x).relu()) + 1

    def pieces(*sharded):
        model, found = Two(), []
        for name in sharded:
            fully_shard(model.get_submodule(name), mesh=mesh)

        def backend(gm, example_inputs):
            found.append(compat.fsdp_is_splitting())
            return gm

        if way == "in place":
            model.compile(backend=backend)
            run = model
        else:
            run = torch.compile(model if way == "module" else lambda x: model(x) + 1, backend=backend)
        run(torch.ones(2, 3))
        return found

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    assert pieces() == [False]
    assert set(pieces("second", "")) == {True}
    assert set(pieces("")) == {False}


def test_inductor_options():
    from torch._inductor import config

    patches = compat.inductor_options()["config_patches"]
    assert len(patches) == 5
    with config.patch(patches):  # raises for a name that is no option
        assert config.deterministic
    for name in ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning", "benchmark_fusion"):
        with config.patch({name: True, "deterministic": False}):
            assert "deterministic" not in compat.inductor_options()["config_patches"]


@pytest.mark.parametrize("expanded", (False, True))
def test_flex_attention_gets_eager_layouts(expanded):
    """A rotated q, whose angles are read transposed, as Qwen3's: each of q, k and v keeps its order. One that
    is expanded over the heads has none: it is left alone."""
    from torch._inductor.utils import get_code

    def attend(q, k, v, angles):
        cos, sin = angles.T.cos(), angles.T.sin()
        q, k = (t.transpose(1, 2) for t in (q, k))
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        v = v.transpose(1, 2)
        return flex_attention(q, k, v[:, :1].expand(-1, 4, -1, -1) if expanded else v)

    seen = []
    patches = compat.inductor_options()["config_patches"]
    ours = patches["post_grad_custom_post_pass"]

    class Watched(type(ours)):
        def __call__(self, graph):
            super().__call__(graph)
            for flex in graph.find_nodes(op="call_function", target=compat.FLEX_ATTENTION):
                seen.extend(flex.args[:3])  # the masks are graphs too, without one

        def uuid(self):
            return None  # nothing comes from Inductor's cache

    inputs = [torch.randn(1, 256, 4, 16, generator=tiny.generator(i)) for i in range(3)]
    inputs.append(torch.randn(16, 256, generator=tiny.generator(3)))
    patches |= {"post_grad_custom_post_pass": Watched()}
    with torch.no_grad():  # not run: the CPU kernel of torch 2.11 writes past such tensors
        code = "".join(get_code(torch.compile(attend, options=patches), *inputs))
    ordered = torch.ops.prims.inductor_force_stride_order.default
    assert [n.target is ordered for n in seen] == [True, True, not expanded]
    assert all(n.args[1] == (16384, 16, 64, 1) for n in seen if n.target is ordered)
    # q and k are computed into tensors of that order
    assert len(re.findall(r"\(\(1, 4, 256, 16\), \(16384, 16, 64, 1\)", code)) >= 2
    assert ours.uuid()  # without one, Inductor would keep nothing in its cache

    mine = Watched()
    with torch._inductor.config.patch(post_grad_custom_post_pass=mine):
        assert "post_grad_custom_post_pass" not in compat.inductor_options()["config_patches"]


def test_depyf_repaired():
    pytest.importorskip("depyf")
    import depyf.explain.patched_load_by_key_path as patched
    from torch._inductor.codecache import PyCodeCache

    original = patched.patched_load_by_key_path
    with compat.depyf_repaired():
        taken = inspect.signature(PyCodeCache.load_by_key_path).parameters
        inside = patched.patched_load_by_key_path
        accepts = inspect.signature(inside, follow_wrapped=False).parameters
        assert "set_sys_modules" not in taken or "_" in accepts or "set_sys_modules" in accepts
    assert patched.patched_load_by_key_path is original


@pytest.mark.parametrize(
    "operator, names",
    [
        ("_flash_attention_forward", ["scale", "window_size_left", "window_size_right"]),
        ("_flash_attention_backward", ["scale", "window_size_left", "window_size_right"]),
    ],
)
def test_flash_operators(operator, names):
    (schema,) = [
        getattr(torch.ops.aten, operator).default._schema
    ]  # the positional order that compat_kernels relies on
    known = [a.name for a in schema.arguments]
    assert set(names) <= set(known)
    order = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert [n for n in known if n in order] == order


def test_flash_forward_refuses_what_its_backward_cannot_address():
    huge = torch.empty(1, device="meta").expand(2**24, 8, 128)
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(RuntimeError, match="max_tokens"):
        compat_kernels.flash_forward(huge, huge, huge, bounds, 10, 1.0, None)


def test_the_entry_point():
    from torch._dynamo.backends.registry import list_backends

    assert "grpo_pack" in list_backends()
    assert packing.pack(nn.Linear(2, 2)) is not None


# -- calls of compiled modules ---------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x, scale=2):
        return super().forward(x) * scale


def test_module_call_being_captured():
    found = []

    def backend(gm, example_inputs):
        found.append(compat.module_call_being_captured())
        return gm

    x, module = torch.ones(2, 3), Doubled(3, 3)
    module.compile(backend=backend)
    module(x, scale=3)
    torch._dynamo.reset()  # the next one has the same code
    wrapped = torch.compile(Doubled(3, 3), backend=backend)
    wrapped(x, scale=3)
    torch.compile(lambda m, x: m(x), backend=backend)(nn.Linear(3, 3), x)
    assert compat.module_call_being_captured() is None
    in_place, outer, function = found
    assert function is None
    for call, holder in ((in_place, module), (outer, wrapped)):
        assert call.holder is holder and call.args[0] is x and call.kwargs == {"scale": 3}
        seen = []

        def replaced(*args, call=call, seen=seen, **kwargs):
            seen.append(kwargs)
            return call.compiled(*args, **kwargs)

        replaced.__wrapped__ = call.compiled
        call.replace(replaced)
        assert torch.equal(holder(x, scale=4), call.eager(x, scale=4)) and seen == [{"scale": 4}]
    assert in_place.module is module and outer.module is wrapped._orig_mod


def test_what_watches_a_module_is_left_out_of_copies():
    import copy
    import pickle

    module = Doubled(3, 3)
    module.compile(backend="eager")
    module.__dict__["_compiled_call_impl"] = lambda *args: None
    assert copy.deepcopy(module)._compiled_call_impl is None
    assert pickle.loads(pickle.dumps(module))._compiled_call_impl is None
    wrapped = torch.compile(Doubled(3, 3), backend="eager")
    wrapped.__dict__["forward"] = lambda *args: None
    assert torch.equal(copy.copy(wrapped)(torch.ones(2, 3)), wrapped._orig_mod(torch.ones(2, 3)))


def test_on_recompile_limit(monkeypatch):
    import logging

    told = []
    monkeypatch.setattr(compat, "_is_for_us", lambda: True)
    log = logging.getLogger("torch._dynamo.convert_frame")
    before = list(log.filters)
    compat.on_recompile_limit(lambda *told_: told.append(told_))
    try:
        function = torch.compile(lambda x: x + 1, backend="eager")
        with torch._dynamo.config.patch(recompile_limit=1):
            function(torch.ones(2))
            with torch.no_grad():
                function(torch.ones(2))
    finally:
        log.filters[:] = before
    ((limit, value, name, reason),) = told
    assert (limit, value) == ("recompile_limit", 1) and "lambda" in name and "grad_mode" in reason


def test_why_dynamo_is_off():
    assert compat.why_dynamo_is_off() is None
    with torch.compiler.set_stance("force_eager"):
        assert "force_eager" in compat.why_dynamo_is_off()
    with torch._dynamo.config.patch(disable=True):
        assert "disable" in compat.why_dynamo_is_off()


def test_reset_with_dynamo():
    class Backend:
        resets = 0

        def reset(self):
            self.resets += 1

    backend = Backend()
    for times in (1, 2):
        compat.reset_with_dynamo(backend)
        torch._dynamo.reset()
        assert backend.resets == times
    torch._dynamo.reset()
    assert backend.resets == 2
