"""Run the captured graph, or part of it, at other sizes.

The readings found by `roles` make the captured graph a function of (B, L): the same operations,
with its own attention and its own masks, on a batch of any shape. Masks are probed and rewritten
graphs are checked with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..capture import Capture
from .inplace import storages
from .roles import STATE, Roles, Size, Slice, cut_table, map_sizes


def ancestors(
    capture: Capture,
    roles: Roles,
    targets: Iterable[Node],
    stop: Iterable[Node] = (),
    *,
    whole: bool = False,
) -> list[Node]:
    """`targets` and all that they read, in order, not going past the nodes in `stop`, nor past
    sizes that B and L decide: a mask of length ``x.size(1)`` does not depend on x. With `whole`,
    the ends of slices along the sequence are not read."""
    stop, seen, todo = set(stop), set(), list(targets)
    while todo:
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node not in stop and not roles.exact(node, ("B", "L")):
                todo += _operands(capture, roles, node, whole)
        if roles.mutations:
            touched = {s for n in seen - stop for s in storages(roles, n)}
            todo = [n for n, s in roles.mutations.items() if n not in seen and s & touched]
    return [n for n in capture.nodes if n in seen]


def _operands(capture: Capture, roles: Roles, node: Node, whole: bool) -> list[Node]:
    if node in roles.tables or (node in roles.slices and _takes_all(roles, node, whole)):
        return [capture.resolve(node.args[0])]
    return capture.operands(node)


def _takes_all(roles: Roles, node: Node, whole: bool) -> bool:
    cut = roles.slices[node][1]
    return whole or cut.symbol == cut.parent


def evaluate(
    capture: Capture,
    roles: Roles,
    targets: list[Node],
    sizes: dict[str, int],
    feeds: dict[Node, Any],
    *,
    whole: bool = False,
    take: Callable[[Any, int, Slice], Any] | None = None,
    literal: Callable[[Node, Any], Any] | None = None,
    state: bool = False,
) -> dict[Node, Any]:
    """The values of `targets` where the symbols have the given `sizes`.

    `feeds` gives the values of some nodes (placeholders, or any node at which to start). With
    `whole`, slices along the sequence take all of it, or what ``take(tensor, dim, cut)`` gives.
    `literal` may replace numbers in arguments.
    With `state`, the graph's own autocast regions hold, and where gradients are recorded its
    no-grad regions too; both end as they began. Raises whatever an operation raises, and KeyError
    where an input was not fed.
    """
    sizes = dict(sizes)
    values: dict[Node, Any] = {}
    wanted = set(ancestors(capture, roles, targets, feeds, whole=whole))
    nodes = [n for n in capture.nodes if n in wanted or (state and n.target in STATE)]
    last: dict[Node, Node] = {}
    for node in nodes:
        for operand in capture.operands(node):
            last[operand] = node
    with _regions() as switch:
        for node in nodes:
            if node in feeds:
                values[node] = feeds[node]
                continue
            if state and node.target in STATE:
                values[node] = switch(node.target, [values.get(a, a) for a in node.args])
                continue
            values[node] = _run(capture, roles, node, values, sizes, whole, take, literal)
            for operand in set(capture.operands(node)):
                if last[operand] is node and operand not in targets:
                    values.pop(operand, None)
    return {t: values[t] for t in targets}


@contextmanager
def _regions() -> Iterator[Callable[[Any, list[Any]], Any]]:
    """A function that runs a node which changes a mode; what it changed is undone at the end."""
    record = torch.is_grad_enabled()
    with ExitStack() as undo:
        undo.callback(torch.set_grad_enabled, record)
        entered: dict[int, ExitStack] = {}

        def switch(target: Any, args: list[Any]) -> Any:
            if target is torch._C._set_grad_enabled and record:
                torch.set_grad_enabled(args[0])
            elif target is torch.amp.autocast_mode._enter_autocast:
                device, dtype, enabled, _ = args
                cached = torch.is_autocast_cache_enabled()
                region = torch.autocast(device, dtype, enabled, cache_enabled=cached)
                entered[id(region)] = undo.enter_context(ExitStack())
                return entered[id(region)].enter_context(region)
            elif target is torch.amp.autocast_mode._exit_autocast:
                entered[id(args[0])].close()
            return None

        yield switch


def _run(
    capture: Capture,
    roles: Roles,
    node: Node,
    values: dict[Node, Any],
    sizes: dict[str, int],
    whole: bool,
    take: Callable[[Any, int, Slice], Any] | None,
    literal: Callable[[Node, Any], Any] | None,
) -> Any:
    if roles.exact(node, sizes):
        return _number(roles, roles.values[node], sizes)
    if node.op == "placeholder":
        raise KeyError(node.name)
    if node.op == "get_attr":
        return node.meta["fx_packing_attr"]
    if node.target in STATE:
        return None
    args, kwargs = roles.args[node]
    if literal is not None:
        args, kwargs = literal(node, (args, kwargs))
    args, kwargs = map_sizes((args, kwargs), lambda s: roles.at(s, sizes))

    def value(arg: Any) -> Any:
        return map_arg(arg, lambda n: map_arg(capture.resolve(n), lambda r: values[r]))

    if node in roles.tables:
        return cut_table((value(args[0]), args[1]), roles.tables[node], sizes["L"])
    if node in roles.slices:
        dim, cut = roles.slices[node]
        if _takes_all(roles, node, whole):
            base = value(args[0])
            if cut.symbol != cut.parent:
                base = take(base, dim, cut) if take is not None else base
                sizes[cut.symbol] = base.shape[dim]
            return cut_table((base, args[1]), dim, None)
        result = value(args[0])[value(args[1])]
        line = Size(1, (cut.symbol,))
        out = [d for d, s in enumerate(roles.shape(node)) if s == line]
        sizes[cut.symbol] = result.shape[out[0]] if out else sizes.get(cut.symbol, 1)
        return result
    args, kwargs = value((args, kwargs))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _number(roles: Roles, value: Any, sizes: dict[str, int]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_number(roles, v, sizes) for v in value)
    return roles.at(roles.size(value), sizes) if type(value) is int else value


def probe_inputs(capture: Capture) -> dict[Node, Any]:
    """The real values of everything that is not passed by the caller: parameters and constants."""
    return {
        i.node: i.example.detach() if isinstance(i.example, torch.Tensor) else i.example
        for i in capture.inputs
        if i.kind in ("module", "scalar")
    }
