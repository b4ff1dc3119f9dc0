"""What the flat graph still needs: everything that reaches an output, once attention takes the
queries, keys and values alone.

    ids -> ... -> q, k, v -> attention -> ... -> output        live
    attention_mask -> causal, padding -> 4-D mask -^           not live any more
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..capture import Capture
from ..errors import Refused, describe, where
from .attention import Attention
from .roles import STATE, Roles, is_number

_IN_PLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.setitem,
}  # fmt: skip
_ALIASING = {
    "view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "t", "flatten",
    "unflatten", "contiguous", "to", "detach", "chunk", "split", "unbind", "narrow", "select", "T",
    "view_as", "expand_as", "movedim", "swapaxes", "type", "float", "reshape_as",
}  # fmt: skip


def live_nodes(capture: Capture, roles: Roles, attention: list[Attention]) -> list[Node]:
    """The nodes of the flat graph in order; sizes and scalars, which become constants, left out.
    Raises `Refused` where an input is changed in place."""
    by_node = {a.node: a for a in attention}
    mutations = {
        n: _root(capture, n)
        for n in capture.nodes
        if _is_in_place(n) and not is_number(roles.values[n])
    }
    for node, root in mutations.items():
        if root in capture.by_node:
            raise Refused(
                f"the graph changes its input {capture.by_node[root].source} in place with "
                f"{describe(node)}, {where(node)}"
            )
    live: set[Node] = set()
    todo = [n for n in _nodes(capture, capture.output.args)]
    todo += [n for n in capture.nodes if n.target in STATE]
    while True:
        while todo:
            node = todo.pop()
            if node in live or (is_number(roles.values[node]) and node.target not in STATE):
                continue
            live.add(node)
            found = by_node.get(node)
            todo += [found.query, found.key, found.value] if found else capture.operands(node)
        roots = {_root(capture, n) for n in live}
        todo = [n for n, root in mutations.items() if n not in live and root in roots]
        if not todo:
            return [n for n in capture.nodes if n in live]


def _nodes(capture: Capture, args: Any) -> list[Node]:
    found: list[Node] = []

    def visit(arg: Any) -> None:
        arg = capture.resolve(arg)
        if isinstance(arg, Node):
            found.append(arg)
        elif isinstance(arg, (tuple, list)):
            for item in arg:
                visit(item)
        elif isinstance(arg, dict):
            for item in arg.values():
                visit(item)

    visit(args)
    return found


def _is_in_place(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target in STATE:
        return False
    if node.target in _IN_PLACE_OPERATORS:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    changes = name.endswith("_") and not name.endswith("__")
    return changes or node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None


def _root(capture: Capture, node: Node) -> Node:
    """The tensor whose memory a node's value may share, through views and in-place operations."""
    while node.args and isinstance(capture.resolve(node.args[0]), Node):
        base = capture.resolve(node.args[0])
        aliases = (
            _is_in_place(node)
            or node.target in _ALIASING
            or node.target is operator.getitem
            or node.target in (torch.reshape, torch.transpose, torch.permute, torch.chunk, torch.split)
        )
        if not aliases:
            break
        node = base
    return node
