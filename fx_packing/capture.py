"""The captured graph, read once: what each input is, and every node in the order it runs.

Inputs are told apart by their Dynamo source (a module's tensor, a scalar that Dynamo lifted, a
size, or something the user passed), never by their names. Bodies of activation checkpointing are
listed in line, so that later passes see one straight program.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from . import compat
from .errors import Refused, describe, where


@dataclass
class Input:
    """One placeholder of the captured graph.

    `kind`: ``module`` (parameter, buffer, constant), ``scalar`` (a Python float that Dynamo wrapped
    into a 0-d tensor), ``size`` (a SymInt), ``user`` (a tensor that the caller passes).
    """

    index: int
    node: Node
    kind: str
    source: str
    example: Any
    shape: tuple[int, ...] = ()


@dataclass
class Capture:
    """A captured graph and what is known of it. The graph itself is never changed; where its loops are
    folded (`passes/loops.py`), `gm` is a copy of `captured`."""

    gm: GraphModule
    inputs: list[Input]
    nodes: list[Node]
    alias: dict[Node, Any]  # body placeholder -> the caller's argument; checkpoint call -> its result
    bodies: dict[Node, GraphModule]  # checkpoint call -> its body
    rows: int  # B at capture
    columns: int  # L at capture
    output: Node
    by_node: dict[Node, Input] = field(default_factory=dict)
    ids: list[Input] = field(default_factory=list)  # the inputs [B, L] that embeddings look up
    folded_from: GraphModule | None = None

    @property
    def captured(self) -> GraphModule:
        """The graph as Dynamo gave it."""
        return self.folded_from or self.gm

    @property
    def symbolic_shape(self) -> tuple[Any, Any]:
        """(B, L) as Dynamo sees them: ints, or the SymInts that guards are made of."""
        for item in self.inputs:
            if item.kind == "user" and item.shape[:2] == (self.rows, self.columns):
                rows, columns = item.node.meta.get("example_value", item.example).shape[:2]
                return rows, columns
        return self.rows, self.columns

    def resolve(self, arg: Any) -> Any:
        """Follow body placeholders and checkpoint results to the node that computes the value."""
        while isinstance(arg, Node):
            if arg in self.alias:
                arg = self.alias[arg]
            elif (
                arg.target is operator.getitem
                and isinstance(arg.args[0], Node)
                and isinstance(self.alias.get(arg.args[0]), (tuple, list))
            ):
                arg = self.alias[arg.args[0]][arg.args[1]]
            else:
                return arg
        return arg

    def operands(self, node: Node) -> list[Node]:
        """The nodes that `node` reads, resolved."""
        found = [self.resolve(n) for n in node.all_input_nodes]
        flat: list[Node] = []
        for item in found:
            flat.extend([self.resolve(i) for i in item] if isinstance(item, (tuple, list)) else [item])
        return [n for n in flat if isinstance(n, Node)]


def row(batch: Tensor) -> Tensor:
    """In a folded graph: each row in turn. Of a flat batch, the only one."""
    return batch[0]


def each_row(value: Tensor, rows: int) -> Tensor:
    """In a folded graph: what each row became, of all rows. Of a flat batch, the only one."""
    return torch.stack([value] * rows)


def read(gm: GraphModule, example_inputs: Sequence[Any]) -> Capture:
    """Read a captured graph. Raises `Refused` where it has no padded token input."""
    inputs = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for index, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
        inputs.append(_classify(index, node, example))
    capture = Capture(gm, inputs, [], {}, {}, 0, 0, next(iter(reversed(gm.graph.nodes))))
    capture.by_node = {i.node: i for i in inputs}
    _linearise(gm, capture)
    capture.rows, capture.columns = _token_shape(capture)
    return capture


def _classify(index: int, node: Node, example: Any) -> Input:
    source = compat.source_of(node)
    name = compat.source_name(source)
    if isinstance(example, (int, torch.SymInt)):
        return Input(index, node, "size", name, example)
    if not isinstance(example, torch.Tensor):
        raise Refused(f"an input of type {type(example).__name__} ({name}) is not supported")
    meta = node.meta.get("example_value", example)
    shape = tuple(compat.size_hint(s) for s in meta.shape)
    if isinstance(example, torch.nn.Parameter) or re.search(r"\b_(parameters|buffers)\[", name):
        kind = "module"
    elif example.dim() == 0 and node.users and all(u.target == "item" for u in node.users):
        kind = "scalar"
    else:
        kind = "module" if compat.is_module_source(source) else "user"
    return Input(index, node, kind, name, example, shape)


def _linearise(gm: GraphModule, capture: Capture) -> Any:
    """Append the nodes of `gm` in execution order; returns the arguments of its output node."""
    for node in gm.graph.nodes:
        if node.op == "output":
            return node.args[0]
        if node.op == "call_function" and compat.is_checkpoint(node.target):
            body = getattr(gm, node.args[0].target)
            bound = [n for n in body.graph.nodes if n.op == "placeholder"]
            for placeholder, arg in zip(bound, node.args[1:], strict=True):
                if placeholder in capture.alias:
                    raise Refused("one checkpointed body is called twice, which is not supported")
                capture.alias[placeholder] = arg
            capture.bodies[node] = body
            result = _linearise(body, capture)
            capture.alias[node] = tuple(result) if isinstance(result, (tuple, list)) else result
        elif node.op == "get_attr" and isinstance(_attribute(gm, node), GraphModule):
            continue
        elif node.op == "placeholder" and node in capture.alias:
            continue
        elif node.op == "call_function" and compat.is_higher_order(node.target):
            raise Refused(f"the higher-order operation {describe(node)} is not supported, {where(node)}")
        elif node.op == "call_function" and compat.is_collective(node.target):
            raise Refused(  # also where nobody reads the result: a check or a fallback is one rank's own
                f"{describe(node)} is a collective, which all ranks have to run equally often; keep it "
                f"outside the compiled function, {where(node)}"
            )
        elif node.op == "call_module":
            raise Refused(f"a module call ({node.target}) in the graph is not supported, {where(node)}")
        else:
            if node.op == "get_attr":
                node.meta["fx_packing_attr"] = _attribute(gm, node)
            capture.nodes.append(node)
    raise Refused("the graph has no output")


def _attribute(gm: GraphModule, node: Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


_VIEWS = {"view", "reshape", "to", "long", "int", "contiguous", "clone", "detach", "clamp"}


def _token_shape(capture: Capture) -> tuple[int, int]:
    """(B, L) at capture: of the ids that feed an embedding (positions may be [1, L], so the
    largest), else of the embeddings passed in."""
    shapes = []
    for node in capture.nodes:
        if node.op == "call_function" and node.target is torch.nn.functional.embedding:
            ids = capture.resolve(node.args[0])
            while isinstance(ids, Node) and ids.op == "call_method" and ids.target in _VIEWS:
                ids = capture.resolve(ids.args[0])
            found = capture.by_node.get(ids)
            if found and found.kind == "user" and len(found.shape) == 2:
                capture.ids.append(found)
                shapes.append((found.shape[0], found.shape[1]))
    if shapes:
        return max(shapes)
    for found in capture.inputs:
        if found.kind == "user" and len(found.shape) == 3 and found.example.is_floating_point():
            return found.shape[0], found.shape[1]
    raise Refused(
        "no padded token input was found: the graph has neither token ids [B, L] that feed an "
        "embedding nor embeddings [B, L, H]"
    )
