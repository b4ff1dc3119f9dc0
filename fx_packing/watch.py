"""Calls of a compiled module that are not for packing, or that Dynamo no longer hands to us.

A module that is compiled in place (``model.compile``) or by ``torch.compile(model)`` gets a thin function
around its compiled call, at its first capture::

    compiled call   ->   a KV cache among the arguments?   run eagerly, past Dynamo
                         else the compiled call; and did it reach any graph of ours?

Generation through the compiled model would otherwise use up Dynamo's recompile limit (a variant for each
state of the cache) within one training step, after which Dynamo runs everything eagerly without a word.
No configuration of Dynamo's is touched, and the module's compiled call stays the one that torch made.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import compat, report

_here = threading.local()
#: What transformers calls the argument; its values are `Cache` objects or, in old code, tuples.
_CACHES = ("past_key_values", "past_key_value", "cache_params", "cache", "layer_past")


def entered(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as what Dynamo calls for a graph: the call that is under way has reached us."""

    def compiled(*args: Any) -> Any:  # a plain function: depyf reads its code object
        reached()
        return run(*args)

    return compiled


def reached() -> None:
    """Note that Dynamo handed something of the call under way to us."""
    _here.count = getattr(_here, "count", 0) + 1


def install(*, bypass: bool) -> bool:
    """Watch the module whose compiled call Dynamo is capturing, if there is one. With `bypass`, its later
    calls with a KV cache run eagerly. Returns whether the call being captured is such a call."""
    reached()
    call = compat.module_call_being_captured()
    if call is None:
        return False
    call.replace(_watched(call.module, call.compiled, call.eager, bypass))
    return bypass and holds_cache(call.args, call.kwargs)


def _watched(
    module: torch.nn.Module, compiled: Callable[..., Any], eager: Callable[..., Any], bypass: bool
) -> Callable[..., Any]:
    model, owner = type(module).__name__, weakref.ref(module)

    @functools.wraps(compiled)  # also takes along what tells Dynamo to trace through it
    def watched(*args: Any, **kwargs: Any) -> Any:
        if bypass and holds_cache(args, kwargs):
            report.ran_outside(model, "a KV cache was passed in (generation): runs eagerly, past Dynamo")
            return eager(*args, **kwargs)
        before, outer = getattr(_here, "count", 0), getattr(_here, "model", "")
        _here.model = model
        try:
            with _without_repeated_hooks(owner()):
                result = compiled(*args, **kwargs)
        finally:
            _here.model = outer
        if getattr(_here, "count", 0) == before:
            _missed(model)
        return result

    return watched


@contextmanager
def _without_repeated_hooks(module: torch.nn.Module | None) -> Iterator[None]:
    """Inside, the hooks are away with which transformers makes embeddings require gradients, if the
    model can do without; else all but one.

    `gradient_checkpointing_enable` adds the hook anew each time, and trainers call that after each
    generation (transformers 5.24): they grow without end, and each number of them is a variant to Dynamo.
    The hook serves reentrant checkpointing alone, whose body needs an input that requires gradients. It
    breaks the graph after frozen embeddings, and gradients of embeddings keep prefixes from being shared.
    """
    hooks = _embedding_hooks(module)
    ours = [n for n, h in hooks.items() if getattr(h, "__name__", "") == "make_inputs_require_grads"]
    ours = [n for n in ours if hooks[n].__closure__ is None]
    if module is None or len(ours) == 0 or (len(ours) == 1 and _is_reentrant(module)):
        yield
        return
    before = list(hooks.items())
    for number in ours[:-1] if _is_reentrant(module) else ours:
        del hooks[number]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


def _embedding_hooks(module: torch.nn.Module | None) -> dict[int, Any]:
    embeddings = getattr(module, "get_input_embeddings", None)
    try:
        return embeddings()._forward_hooks if embeddings else {}
    except (AttributeError, NotImplementedError):
        return {}


def _is_reentrant(module: torch.nn.Module) -> bool:
    """Whether checkpointing is on, and not known to be the non-reentrant kind."""
    for part in module.modules():
        if getattr(part, "gradient_checkpointing", False):
            how = getattr(getattr(part, "_gradient_checkpointing_func", None), "keywords", {})
            if how.get("use_reentrant") is not False:
                return True
    return False


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a KV cache is among the arguments of a call."""
    if any(kwargs.get(name) is not None for name in _CACHES):
        return True
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def _is_cache(value: Any) -> bool:
    return any(
        c.__name__ == "Cache" and c.__module__.startswith("transformers.") for c in type(value).__mro__
    )


def _missed(model: str) -> None:
    """A call of a compiled module that ran without reaching any graph of ours."""
    wanted = compat.why_dynamo_is_off()
    if wanted is not None:
        report.ran_outside(model, wanted)
        return
    report.ran_outside(model, _stopped.get(model) or "Dynamo ran it without calling grpo_pack")
    report.warn_once(
        f"{model} missed",
        f"a call of {model} ran as written, not packed: Dynamo did not hand it to grpo_pack. "
        f"{_stopped.get(model) or 'TORCH_LOGS=dynamo may say why'}",
    )


_stopped: dict[str, str] = {}


def _limit_was_hit(limit: str, value: int, function: str, reason: str) -> None:
    model = getattr(_here, "model", "") or function
    _stopped[model] = (
        f"Dynamo hit torch._dynamo.config.{limit} ({value}) and compiles no further variant; the last "
        f"one was for: {' '.join(reason.split())}. Give this model variants of its own: {_REMEDY}"
    )
    report.ran_outside(model, _stopped[model], calls=0)
    if model == function:  # of a compiled function no call passes through here: this is the last chance
        report.warn_once(f"{model} missed", f"calls of {model} run as written, not packed: {_stopped[model]}")


_REMEDY = (
    "compile it with recompile_limit=64, isolate_recompiles=True (torch 2.13), or raise "
    "torch._dynamo.config.recompile_limit"
)

compat.on_recompile_limit(_limit_was_hit)


def forget() -> None:
    """Forget what was hit so far."""
    _stopped.clear()
