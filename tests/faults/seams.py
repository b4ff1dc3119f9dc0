"""Where a fault can be put in, without touching the captured graph: `in_plan`, `in_runs`, `in_graph` and
so on each return a function that does it for one test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import bench
import pytest
import tiny
import torch
from bench import Setting, Subject
from torch.fx import Graph, GraphModule, Node

from fx_packing import passes, runtime
from fx_packing.attention import segments
from fx_packing.capture import Capture
from fx_packing.forest import Plan
from fx_packing.passes.flatten import FlatGraph, TailGraph

_numbers = itertools.count()
Inject = Callable[[pytest.MonkeyPatch, Subject], None]


@dataclass(frozen=True)
class Fault:
    """`inject` puts the fault into the setting. Only gradients are wrong where `gradient` is set.

    `before` runs first, with the fault in place, and must itself go well: it makes the state that
    the fault lives on. The run that must be caught is on `batch`, with the model number `model`.
    """

    name: str
    changes: str  # "plan", "positions", "way in", "way out", "kernel", "graph", "tail", "gradient", "state"
    setting: Setting
    inject: Inject
    gradient: bool = False
    before: Callable[[Subject], None] | None = None
    runs: str | None = None  # the layout that the faulty graph runs, where it is another one
    batch: Callable[[], tiny.Batch] | None = None
    model: int = 0


def in_plan(change: Callable[[Plan], dict]) -> Inject:
    """The fields that `change` returns take the place of a plan's own."""

    def inject(patch: pytest.MonkeyPatch, subject: Subject) -> None:
        real = runtime.make_plan

        def make(*args, **kwargs):
            plan = real(*args, **kwargs)
            if plan.rows < bench.ROWS:  # a few rows, on which the check tries itself
                return plan
            return dataclasses.replace(plan, **change(plan), _memo={})

        patch.setattr(runtime, "make_plan", make)

    return inject


def in_runs(change: Callable[[list[list[int]]], None]) -> Inject:
    """`change` edits the kernel's list of ``[start, stop, parent]``, one for each run of the forest."""

    def inject(patch: pytest.MonkeyPatch, subject: Subject) -> None:
        real = segments.inputs

        def inputs(plan, window):
            (structure,) = real(plan, window)
            runs = structure[2:].view(-1, 3).tolist()
            if len(runs) > 12:  # not where the check has removed the boundaries itself
                change(runs)
            flat = [len(runs), int(structure[1]), *(n for run in runs for n in run)]
            changed = torch.tensor(flat)
            torch._dynamo.maybe_mark_dynamic(changed, 0)
            return (changed,)

        patch.setattr(segments, "inputs", inputs)

    return inject


def in_graph(change: Callable[[Graph], None]) -> Inject:
    """`change` edits the flat graph after it was written, before it is compiled."""
    return in_module(lambda gm: change(gm.graph))


def in_module(change: Callable[[GraphModule], None]) -> Inject:
    """As `in_graph`, on the module."""

    def edit(flat: FlatGraph, capture: Capture) -> FlatGraph:
        for node, key in zip(flat.gm.graph.find_nodes(op="placeholder"), flat.inputs, strict=True):
            node.meta["from"] = capture.inputs[key[1]].source if key[0] == "input" else ""
        change(flat.gm)
        return flat

    return _written_anew(edit)


def in_tail(change: Callable[[Graph], None]) -> Inject:
    """`change` edits the graph of what comes after the LM head, which runs in tiles of tokens."""

    def edit(flat: FlatGraph, capture: Capture) -> TailGraph:
        change(flat.tail.gm.graph)
        return flat.tail

    return _written_anew(edit)


def _written_anew(edit: Callable[[FlatGraph, Capture], FlatGraph | TailGraph]) -> Inject:
    def inject(patch: pytest.MonkeyPatch, subject: Subject) -> None:
        real, number = passes.flatten, next(_numbers)

        def flatten(capture, *args, **kwargs):
            flat = real(capture, *args, **kwargs)
            edited = edit(flat, capture)
            edited.gm.graph.lint()
            edited.gm.recompile()
            edited.structure += f" with fault {number}"  # equal graphs are compiled once
            return flat

        patch.setattr(passes, "flatten", flatten)
        for packed in bench.packed():  # which are written anew, and afterwards are the old ones again
            patch.setattr(packed.analysis, "_flats", {})

    return inject


def in_function(holder: object, name: str, wrap: Callable[[Callable], Callable]) -> Inject:
    """``wrap(function)`` takes the place of a function."""

    def inject(patch: pytest.MonkeyPatch, subject: Subject) -> None:
        patch.setattr(holder, name, wrap(getattr(holder, name)))

    return inject


# -- the rewritten graph ---------------------------------------------------------------------------


def nodes(graph: Graph, target) -> list[Node]:
    found = [n for n in graph.nodes if n.target is target or n.target == target]
    assert found, f"{target} is not in\n{graph}"
    return found


def inputs_of(graph: Graph, *words: str) -> list[Node]:
    """The parameters whose places in the model have all these words."""
    given = graph.find_nodes(op="placeholder")
    found = [n for n in given if all(f"'{word}'" in n.meta["from"] for word in words)]
    assert found, [n.meta["from"] for n in given]
    return found


def weight(*words: str, through: Callable[[Graph, Node], Node]) -> Inject:
    """Something is done to a parameter before it is used."""

    def change(graph):
        (node,) = inputs_of(graph, *words)
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            new = through(graph, node)
        inside, todo = set(), [new]
        while todo:
            inside.add(step := todo.pop())
            todo += [n for n in step.all_input_nodes if n is not node and n.op != "placeholder"]
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)

    return in_graph(change)


# -- the attention of one layer --------------------------------------------------------------------


def attends(graph: Graph) -> list[Node]:
    found = [n for n in graph.nodes if n.target is segments.attend]
    assert found
    return found


def argument(layer: int, **changed: Callable) -> Inject:
    """Constants of the attention of one layer, each by what it was."""

    def change(graph):
        node = attends(graph)[layer]
        node.kwargs = node.kwargs | {k: new(node.kwargs[k]) for k, new in changed.items()}

    return in_graph(change)


def operand(layer: int, *places: int, through: Callable[[Graph, Node], Node]) -> Inject:
    """Something is done to operands (0 query, 1 key, 2 value) of the attention of one layer."""

    def change(graph):
        node = attends(graph)[layer]
        for place in places:
            with graph.inserting_before(node):
                node.update_arg(place, through(graph, node.args[place]))

    return in_graph(change)


def result(layer: int, through: Callable[[Graph, Node], Node]) -> Inject:
    """Something is done to the result of the attention of one layer."""

    def change(graph):
        node = attends(graph)[layer]
        with graph.inserting_after(node):
            new = through(graph, node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return in_graph(change)


def method(name: str, *args) -> Callable[[Graph, Node], Node]:
    return lambda graph, node: graph.call_method(name, (node, *args))
