"""A canary for each private API that `compat.py` and `compat_kernels.py` touch: a new torch that
moves one shows here, by name, before anything else breaks."""

from __future__ import annotations

import inspect

import packing
import pytest
import torch
from torch import nn

import fx_packing
from fx_packing import compat, compat_kernels


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


def test_checkpoint_operator():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(3, 3)
    gm, _ = captured(lambda x: checkpoint(layer, x, use_reentrant=False), torch.ones(2, 3))
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert any(compat.is_checkpoint(t) and compat.is_higher_order(t) for t in targets)
    assert not compat.is_higher_order(torch.add)


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


def test_dump_graph_and_a_lazy_graph_under_a_nested_compile():
    import torch._dynamo.utils as utils

    assert list(inspect.signature(utils.lazy_format_graph_code).parameters)[:2] == ["name", "gm"]
    gm, inputs = captured(lambda x: x + 1, torch.ones(2))
    compat.dump_graph("grpo_pack.test", gm)
    nested = torch.compile(lambda *args: gm(*args), backend="eager", fullgraph=True)
    assert nested(*inputs)[0].tolist() == [2.0, 2.0]


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
