"""Run the captured graph, or part of it, at other sizes.

The readings found by `roles` make the captured graph a function of (B, L): the same operations, with
its own attention and its own masks, on a batch of any shape. Masks are probed and rewritten graphs
are checked with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..capture import Capture
from .roles import STATE, Roles, Size, _cut, _map


def ancestors(capture: Capture, targets: Iterable[Node], stop: Iterable[Node] = ()) -> list[Node]:
    """`targets` and all that they read, in order, not going past the nodes in `stop`."""
    stop, seen, todo = set(stop), set(), list(targets)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stop:
            todo += capture.operands(node)
    return [n for n in capture.nodes if n in seen]


def evaluate(
    capture: Capture,
    roles: Roles,
    targets: list[Node],
    sizes: dict[str, int],
    feeds: dict[Node, Any],
    *,
    whole: bool = False,
    literal: Callable[[Node, Any], Any] | None = None,
) -> dict[Node, Any]:
    """The values of `targets` where the symbols have the given `sizes`.

    `feeds` gives the values of some nodes (placeholders, or any node at which to start). With
    `whole`, slices along the sequence take all of it. `literal` may replace numbers in arguments.
    Raises whatever an operation raises, and KeyError where an input was not fed.
    """
    sizes = dict(sizes)
    values: dict[Node, Any] = {}
    nodes = ancestors(capture, targets, feeds)
    last: dict[Node, Node] = {}
    for node in nodes:
        for operand in capture.operands(node):
            last[operand] = node
    for node in nodes:
        values[node] = feeds[node] if node in feeds else _run(
            capture, roles, node, values, sizes, whole, literal
        )
        if node not in feeds:
            for operand in set(capture.operands(node)):
                if last[operand] is node and operand not in targets:
                    values.pop(operand, None)
    return {t: values[t] for t in targets}


def _run(
    capture: Capture,
    roles: Roles,
    node: Node,
    values: dict[Node, Any],
    sizes: dict[str, int],
    whole: bool,
    literal: Callable[[Node, Any], Any] | None,
) -> Any:
    if node.op == "placeholder":
        item = capture.by_node[node]
        if item.kind == "size":
            return roles.at(roles.size(roles.values[node]), sizes)
        raise KeyError(node.name)
    if node.op == "get_attr":
        return node.meta["fx_packing_attr"]
    if node in roles.pinned:
        return roles.pinned[node]
    if node.target in STATE:
        return None
    if type(roles.values.get(node)) is int:
        return roles.at(roles.size(roles.values[node]), sizes)
    args, kwargs = roles.args[node]
    if literal is not None:
        args, kwargs = literal(node, (args, kwargs))
    args, kwargs = _map((args, kwargs), lambda s: roles.at(s, sizes))
    args, kwargs = map_arg(
        (args, kwargs), lambda n: map_arg(capture.resolve(n), lambda r: values[r])
    )
    if node in roles.slices:
        dim, cut = roles.slices[node]
        value = _cut(args, dim, None) if whole else args[0][args[1]]
        if not whole:
            out = [d for d, s in enumerate(roles.values[node].shape) if roles.size(s) == Size(1, (cut.symbol,))]
            sizes[cut.symbol] = value.shape[out[0]] if out else sizes.get(cut.symbol, 1)
        else:
            sizes[cut.symbol] = sizes["L"]
        return value
    if node in roles.tables:
        return _cut(args, roles.tables[node], sizes["L"])
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def probe_inputs(capture: Capture) -> dict[Node, Any]:
    """The real values of everything that is not passed by the caller: parameters and constants."""
    return {
        i.node: i.example.detach() if isinstance(i.example, torch.Tensor) else i.example
        for i in capture.inputs
        if i.kind in ("module", "scalar")
    }
