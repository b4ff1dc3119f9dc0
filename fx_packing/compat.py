"""Every private torch API that the package touches, each with a canary in ``tests/test_compat.py``.

Supported: torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._dynamo.exc import ShortenTraceback
from torch.fx import Graph, GraphModule, Node

FLEX_ATTENTION = torch.ops.higher_order.flex_attention


class LeavesDynamo(ShortenTraceback):
    """An exception of a backend that reaches the user as it is; Dynamo wraps any other kind into
    ``BackendCompilerFailed``, where ``except ValueError`` and the like do not see it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


def lookup_backend(name: str) -> Callable[..., Any]:
    """The compiler function of a backend name; raises ``torch._dynamo.exc.InvalidBackend``."""
    from torch._dynamo.backends.registry import lookup_backend as lookup

    return lookup(name)


def source_of(node: Node) -> Any:
    """Dynamo's `Source` of a placeholder, or None: where in the user's frame the input lives."""
    grapharg = node.meta.get("grapharg")
    return getattr(grapharg, "source", None)


def source_name(source: Any) -> str:
    """``L['kwargs']['input_ids']`` and the like (a method on older torch, a property on newer)."""
    if source is None:
        return ""
    name = source.name
    return name() if callable(name) else name


def is_module_source(source: Any) -> bool:
    """Whether a source lies in an ``nn.Module`` (a parameter, a buffer, an attribute)."""
    if source is None:
        return False
    kind = source.guard_source
    kind = kind() if callable(kind) else kind
    return bool(kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module() or kind.is_fsdp_module())


def model_being_captured() -> str:
    """The class of the module whose forward Dynamo is capturing, or an empty string."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return ""
    scope = InstructionTranslator.current_tx().f_locals
    found = [*scope.values(), *(v for s in scope.values() if isinstance(s, tuple) for v in s)]
    return next((type(v).__name__ for v in found if isinstance(v, torch.nn.Module)), "")


@dataclass
class ModuleCall:
    """A call of a compiled module that Dynamo is capturing something of. `eager` runs it past Dynamo."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compiled: Callable[..., Any]
    eager: Callable[..., Any]
    holder: torch.nn.Module
    place: str  # the attribute of `holder` that its calls go through

    def replace(self, function: Callable[..., Any]) -> None:
        """Let the holder's later calls go through `function`. Copies and pickles of it leave both out."""
        self.holder.__dict__[self.place] = function


def module_call_being_captured() -> ModuleCall | None:
    """The call of a module compiled as such (in place or by ``torch.compile``) whose graph is being
    compiled, found on the Python stack; None for a compiled function, and after `ModuleCall.replace`."""
    from torch._dynamo import eval_frame

    frame: FrameType | None = sys._getframe(1)
    while frame and not (
        frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == eval_frame.__file__
    ):
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return None
    given, caller = frame.f_locals, frame.f_back
    args, kwargs = given.get("args"), given.get("kwargs")
    holder = caller.f_locals.get("self")
    if not isinstance(holder, torch.nn.Module) or args is None or kwargs is None:
        return None
    if isinstance(holder, eval_frame.OptimizedModule):
        if caller.f_code is not torch.nn.Module._call_impl.__code__:
            return None
        inner, place = holder._orig_mod, "forward"
        eager: Callable[..., Any] = inner
    else:
        inner, place, eager = holder, "_compiled_call_impl", holder._call_impl
    compiled = holder.__dict__.get(place)
    code = getattr(compiled, "__code__", None)
    if code is not frame.f_code:
        return None
    return ModuleCall(inner, args, kwargs, compiled, eager, holder, place)


def reset_with_dynamo(backend: Any) -> None:
    """Have ``torch._dynamo.reset`` call ``backend.reset`` the next time: it forgets whom to call each time,
    and learns it again only where something is compiled anew with ``torch.compile``."""
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(backend), backend)


def why_dynamo_is_off() -> str | None:
    """What the user switched Dynamo off with, or None."""
    from torch._dynamo import eval_frame

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    if stance != "default":
        return f"torch.compiler.set_stance({stance!r})"
    return "torch._dynamo.config.disable" if torch._dynamo.config.disable else None


def on_recompile_limit(tell: Callable[[str, int, str, str], None]) -> None:
    """Call ``tell(limit, value, function, reason)`` whenever Dynamo stops compiling variants of a function
    for this backend. Read off its log line, hence not while its warnings are switched off."""
    start = "torch._dynamo hit config.%s"

    def look(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(start) and isinstance(record.args, tuple) and _is_for_us():
            limit, value, function, reason = record.args[:4]
            tell(str(limit), int(value), str(function), str(reason))
        return True

    logging.getLogger("torch._dynamo.convert_frame").addFilter(look)


def _is_for_us() -> bool:
    """Whether the frame that Dynamo is compiling is for this backend."""
    from torch._dynamo import convert_frame
    from torch._dynamo.eval_frame import innermost_backend

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == convert_frame.__file__ and "compiler_fn" in frame.f_locals:
            found = innermost_backend(frame.f_locals["compiler_fn"])
            found = getattr(found, "compiler_fn", found)
            return getattr(found, "__name__", None) == "grpo_pack"
        frame = frame.f_back
    return False


def size_hint(size: int | torch.SymInt) -> int:
    """The value a size had when the graph was captured."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise ValueError(f"the size {size} depends on data")
    return int(hint)


def distance(larger: int | torch.SymInt, smaller: int | torch.SymInt) -> int | None:
    """``larger - smaller`` where both are SymInts and the guards make it the same at every call."""
    if not (isinstance(larger, torch.SymInt) and isinstance(smaller, torch.SymInt)):
        return None
    less = larger.node.expr - smaller.node.expr
    return int(less) if less.is_Integer else None


def is_checkpoint(target: Any) -> bool:
    """Whether a ``call_function`` target is the activation-checkpointing higher-order operator."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


def is_collective(target: Any) -> bool:
    """Whether a ``call_function`` target is a collective of ``torch.distributed``, as Dynamo writes them."""
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", "")
    return str(name).lstrip("_").startswith("c10d_functional::")


def is_higher_order(target: Any) -> bool:
    """Whether a ``call_function`` target is a higher-order operator."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def flex_block_mask(length: Any, tensors: Mapping[str, Any], block: int, mask: Any) -> tuple[Any, ...]:
    """The block mask as FlexAttention's operator takes it; FX nodes stand for tensors and for T.

    The order, and what else there is in it, is that of ``BlockMask.as_tuple``, which newer torch extends.
    """
    from torch.nn.attention.flex_attention import BlockMask

    stand_ins = {name: torch.empty(1, 1, 1, 1) for name in tensors}
    given = {id(stand_in): tensors[name] for name, stand_in in stand_ins.items()}
    taken = BlockMask((length, length), **stand_ins, BLOCK_SIZE=(block, block), mask_mod=mask).as_tuple()
    return tuple(given.get(id(item), item) for item in taken)


def flex_options(device: torch.device, options: dict[str, Any] | None) -> dict[str, Any]:
    """`options` as ``flex_attention`` completes them, with the log-sum-exp that a backward needs."""
    from torch.nn.attention.flex_attention import _apply_kernel_options

    with torch.enable_grad():
        like = torch.empty(0, device=device)
        return dict(_apply_kernel_options(like, like, like, False, options))


@contextlib.contextmanager
def fake_tensors() -> Iterator[Any]:
    """A fresh mode in which tensors have shapes but no storage; no ambient fake mode is mixed in."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    # A reading that does not work is expected here; the fake mode would log each as an error.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    thread = threading.get_ident()
    quiet = lambda record: record.thread != thread  # noqa: E731
    log.addFilter(quiet)
    try:
        with tracing(None), _disable_current_modes():
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
                yield mode
    finally:
        log.removeFilter(quiet)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Computation on real tensors, also inside a backend, where Dynamo has a fake mode active."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with tracing(None), _disable_current_modes(), torch.no_grad():
        yield


def guard_on_switch() -> None:
    """Make Dynamo guard the frame being compiled on ``fx_packing.switch.ENABLED``."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, ImportSource
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return

    source = AttrSource(AttrSource(ImportSource("fx_packing"), "switch"), "ENABLED")
    install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))


def mark_dynamic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Let a nested ``torch.compile`` treat these dimensions as dynamic from its first compile."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def inductor_options() -> dict[str, Any]:
    """Arguments of the Inductor backend for graphs that run at every length, with and without gradients.

    By default Inductor asks whether a norm's backward is worth fusing (5 * 2**20 elements, 4096 rows),
    and guards on the answer: a length on the other side of it compiles anew. So does torch 2.11 to 2.13.

    Old and new log-probs should be equal where the weights are, but a fused kernel does not round in
    between, as eager operations in half precision do, and what is fused differs between a graph with
    gradients and one without. The order of a reduction depends on it too: its block is timed, or chosen
    by how many tensors a kernel loads. So kernels round here as if nothing were fused, sums that are
    used twice are stored (a residual stream, which would be added up anew in each kernel that reads it),
    and nothing is timed, unless autotuning was asked for.

    A graph without gradients stores q and k as it likes, and that can be the slowest way; see
    `_eager_layouts`, which a pass of the user's own in this place takes precedence over.
    """
    from torch._inductor import config

    patches: dict[str, Any] = {}
    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):
        patches["triton.mix_order_reduction_non_strict_mode"] = True
    if hasattr(config, "emulate_precision_casts"):
        patches["emulate_precision_casts"] = True
    if hasattr(config, "realize_reads_threshold"):
        patches["realize_reads_threshold"] = 1
    tuned = ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning", "benchmark_fusion")
    if hasattr(config, "deterministic") and not any(getattr(config, name, False) for name in tuned):
        patches["deterministic"] = True
    if getattr(config, "post_grad_custom_post_pass", True) is None:
        patches["post_grad_custom_post_pass"] = _eager_layouts()
    return {"config_patches": patches} if patches else {}


@functools.cache
def _eager_layouts() -> Any:
    """A pass of Inductor's: q, k and v of FlexAttention are stored in the order that eager tensors have.

        flex_attention(q, k, v, ..)    ->    flex_attention(force_stride_order(q, strides of q), ..)

    Rotary embeddings are read transposed, so Inductor stores a rotated q with the head's elements
    outermost, unless a backward asks for it, and the kernel takes twice the time (H200, torch 2.11).
    """
    from torch._inductor import inductor_prims
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class EagerLayouts(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=FLEX_ATTENTION):
                with graph.inserting_before(node):
                    node.args = (*map(ordered, node.args[:3]), *node.args[3:])

        def uuid(self) -> str:  # a part of the key of Inductor's cache
            return "fx_packing: eager layouts for FlexAttention, 1"

    def ordered(tensor: Node) -> Node:
        value = tensor.meta["val"]
        if any(type(stride) is int and stride == 0 for stride in value.stride()):
            return tensor  # expanded: no layout of its own
        result = tensor.graph.call_function(inductor_prims.force_stride_order, (tensor, value.stride()))
        result.meta["val"] = value
        return result

    return EagerLayouts()


def force_recompile(gm: GraphModule) -> None:
    """Generate the Python of a graph and of its bodies now: a lazy one cannot be traced. Autocast
    regions become ``with`` blocks: Dynamo of torch 2.11 does not trace the calls that it makes of them."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            if not module.meta.get("fx_packing_blocks") and any(map(_enters_autocast, module.graph.nodes)):
                module.meta["fx_packing_blocks"] = True
                module.graph.on_generate_code(
                    lambda before: lambda body: _autocast_blocks(before(body) if before else body)
                )
            getattr(module, "real_recompile", module.recompile)()


def _enters_autocast(node: Node) -> bool:
    return node.target is torch.amp.autocast_mode._enter_autocast


_ENTER = re.compile(r"(\w+) = torch\.amp\.autocast_mode\._enter_autocast\((.*?)\)(;.*)?$")
_EXIT = re.compile(r"\w+ = torch\.amp\.autocast_mode\._exit_autocast\((\w+)\)(;.*)?$")


def _autocast_blocks(body: list[str]) -> list[str]:
    """The lines of a graph's Python with ``with torch.autocast(...)`` for what enters and exits it."""
    lines: list[str] = []
    open_blocks: list[str] = []
    for line in "".join(body).splitlines():
        indent = "    " * len(open_blocks)
        if entered := _ENTER.match(line):
            lines += [f"{indent}with torch.autocast({entered[2]}):", f"{indent}    pass"]
            open_blocks.append(entered[1])
        elif exited := _EXIT.match(line):
            if not open_blocks or open_blocks.pop() != exited[1]:
                return body  # not nested: left as it is
        else:
            lines.append(indent + line)
    return body if open_blocks else [line + "\n" for line in lines]


def dump_graph(name: str, make: Callable[[], GraphModule]) -> None:
    """Show a graph to depyf and to ``TORCH_TRACE``; it is made only if one of them looks."""
    import torch._dynamo.utils as utils
    from torch._logging import trace_structured

    show = utils.lazy_format_graph_code
    if show.__code__.co_filename != sys.modules[show.__module__].__file__:  # depyf's code is in it
        gm = make()
        force_recompile(gm)
        show(name, gm)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: make().print_readable(print_output=False),
    )


def count(key: str, times: int = 1) -> None:
    """Add `times` to ``torch._dynamo.utils.counters["grpo_pack"][key]``."""
    from torch._dynamo.utils import counters

    counters["grpo_pack"][key] += times


def forget_counts() -> None:
    """Drop the counts; ``torch._dynamo.reset`` keeps its own."""
    from torch._dynamo.utils import counters

    counters.pop("grpo_pack", None)


def ddp_is_splitting() -> bool:
    """Whether Dynamo's DDPOptimizer is cutting the graphs being compiled at DDP's buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None and bool(
        torch._dynamo.config.optimize_ddp
    )


def fsdp_is_splitting() -> bool:
    """Whether FSDP has hooks on modules inside what is being compiled: Dynamo breaks the graph at each."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(
        isinstance(part, kinds) and part is not whole
        for whole in _modules_being_compiled() for part in whole.modules()
    )  # fmt: skip


def _modules_being_compiled() -> list[torch.nn.Module]:
    """The modules whose calls are under way, from the one that is compiled inwards."""
    from torch._dynamo import eval_frame
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    found: list[Any] = []
    if TracingContext.try_get() is not None:  # pieces of a compiled function have no call on the stack
        found += InstructionTranslator.current_tx().f_locals.values()
    calls: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            calls.append(frame.f_locals.get("self"))
        elif frame.f_code.co_filename == eval_frame.__file__ and frame.f_code.co_name == "compile_wrapper":
            holder = frame.f_back.f_locals.get("self") if frame.f_back else None
            found, calls = [*found, *calls, getattr(holder, "_orig_mod", holder)], []
        frame = frame.f_back
    return [m for m in found if isinstance(m, torch.nn.Module)]


@contextlib.contextmanager
def depyf_repaired() -> Iterator[None]:
    """Repair depyf 0.20 where it breaks, and do nothing where it does not.

    Its loader lacks an argument of torch's (``set_sys_modules``). And where a forward's arguments are
    used in a comprehension, rebuilding its bytecode recurses without end on Python before 3.12, for
    any backend; told that this is a syntax error, depyf keeps Dynamo's own bytecode.
    """
    import functools
    import inspect

    import depyf.code_transform as code_transform
    import depyf.explain.enable_debugging as enabling
    import depyf.explain.patched_load_by_key_path as patched

    replaced: list[tuple[Any, str, Any]] = []
    original = getattr(patched, "patched_load_by_key_path", None)
    if original and "set_sys_modules" not in inspect.signature(original).parameters:

        @functools.wraps(original)
        def load(key: str, path: str, linemap: Any = None, attrs: Any = None, **_: Any) -> Any:
            return original(key, path, linemap, attrs)

        replaced += [(m, original.__name__, load) for m in (patched, enabling)]
    rebuild = getattr(code_transform, "fix_irregular_code", None)
    if rebuild:
        inside = False

        @functools.wraps(rebuild)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # the outermost call tells it: depyf prints the trace
                return rebuild(*args, **kwargs)
            inside = True
            try:
                return rebuild(*args, **kwargs)
            except RecursionError:
                raise SyntaxError("depyf cannot rebuild this function's bytecode") from None
            finally:
                inside = False

        replaced.append((code_transform, "fix_irregular_code", bounded))
    with contextlib.ExitStack() as undo:
        for holder, name, repaired in replaced:
            if hasattr(holder, name):
                undo.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, repaired)
        yield
