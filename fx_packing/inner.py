"""The inner compiler: nested ``torch.compile`` of graphs, each with its own guards and its own cache.

``torch.compile(gm)`` inside a backend silently does nothing (Dynamo skips FX-generated code), and
Dynamo's recompile limit counts per code object; so each graph gets a small function of its own.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import compat
from .passes.flatten import FlatGraph, TailGraph

_numbers = itertools.count()
_flats: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
_lock = threading.Lock()
_MOST_FLATS = 64


def own_function(target: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that calls `target`, with a code object of its own, hence a Dynamo cache of its own.

    Its code keeps this file's name: code without a file is wrapped by torch 2.11 into one function
    that everything compiled so would share.
    """
    unique = f"{name}_{next(_numbers)}"
    code = _call_target.__code__.replace(co_name=unique)
    scope = {"__name__": __name__, "__builtins__": __builtins__, "target": target}
    return types.FunctionType(code, scope, unique)


def _call_target(*args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)  # noqa: F821 - in the globals that `own_function` gives


class Compiled:
    """A graph under the inner compiler. `compiles` counts how often that compiler was called."""

    def __init__(self, gm: GraphModule, inner: str, name: str) -> None:
        self.gm, self.compiles = gm, 0
        compat.force_recompile(gm)
        name_of_inner = _checkpointing(inner, gm)
        compiler = compat.lookup_backend(name_of_inner)
        options = compat.inductor_options() if name_of_inner == "inductor" else {}

        def counted(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            self.compiles += 1
            return compiler(graph, example_inputs, **options)

        self._function = torch.compile(own_function(gm, name), backend=counted, fullgraph=True)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def compile_flat(flat: FlatGraph | TailGraph, inner: str) -> Compiled:
    """The compiled form of a flat graph: the one that an equal graph already has, if any."""
    key = (flat.structure, inner)
    with _lock:
        if key not in _flats:
            _flats[key] = Compiled(flat.gm, inner, "flat")
            while len(_flats) > _MOST_FLATS:
                _flats.popitem(last=False)
        _flats.move_to_end(key)
        return _flats[key]


@contextmanager
def kept_as_it_was() -> Iterator[None]:
    """Drop afterwards the flat graphs that were compiled inside."""
    with _lock:
        known = set(_flats)
    try:
        yield
    finally:
        with _lock:
            for key in set(_flats) - known:
                del _flats[key]


def forget() -> None:
    """Drop all compiled flat graphs."""
    with _lock:
        _flats.clear()


def compile_captured(gm: GraphModule, example_inputs: Any, inner: str) -> Callable[..., Any]:
    """A refused graph under the inner compiler, as if the user had named that backend."""
    return compat.lookup_backend(_checkpointing(inner, gm))(gm, example_inputs)


def _checkpointing(inner: str, gm: GraphModule) -> str:
    """The inner backend that keeps checkpointed bodies so: run as plain Python, one saves everything."""
    return "aot_eager" if inner == "eager" and any(map(_is_body, gm.graph.nodes)) else inner


def _is_body(node: Node) -> bool:
    return node.op == "call_function" and compat.is_checkpoint(node.target)
