"""Every private torch API that the package touches, each with a canary in ``tests/test_compat.py``.

Supported: torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.exc import ShortenTraceback
from torch.fx import GraphModule, Node


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
    return bool(
        kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module() or kind.is_fsdp_module()
    )


def model_being_captured() -> str:
    """The class of the module whose forward Dynamo is capturing, or an empty string."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return ""
    scope = InstructionTranslator.current_tx().f_locals
    found = [*scope.values(), *(v for s in scope.values() if isinstance(s, tuple) for v in s)]
    return next((type(v).__name__ for v in found if isinstance(v, torch.nn.Module)), "")


def size_hint(size: int | torch.SymInt) -> int:
    """The value a size had when the graph was captured."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise ValueError(f"the size {size} depends on data")
    return int(hint)


def is_checkpoint(target: Any) -> bool:
    """Whether a ``call_function`` target is the activation-checkpointing higher-order operator."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


def is_higher_order(target: Any) -> bool:
    """Whether a ``call_function`` target is a higher-order operator."""
    return isinstance(target, torch._ops.HigherOrderOperator)


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


def force_recompile(gm: GraphModule) -> None:
    """Generate the Python of a graph and of its bodies now: a lazy one cannot be traced."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            getattr(module, "real_recompile", module.recompile)()


def dump_graph(name: str, gm: GraphModule) -> None:
    """Show a graph to ``TORCH_LOGS``-style tools and to depyf, which patches this very function."""
    import torch._dynamo.utils as utils

    force_recompile(gm)
    utils.lazy_format_graph_code(name, gm)


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

    return (
        DistributedDataParallel._get_active_ddp_module() is not None
        and bool(torch._dynamo.config.optimize_ddp)
    )


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

        @functools.wraps(rebuild)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            try:
                return rebuild(*args, **kwargs)
            except RecursionError:
                raise SyntaxError("depyf cannot rebuild this function's bytecode") from None

        replaced.append((code_transform, "fix_irregular_code", bounded))
    with contextlib.ExitStack() as undo:
        for holder, name, repaired in replaced:
            if hasattr(holder, name):
                undo.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, repaired)
        yield
