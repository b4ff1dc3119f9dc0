"""Run the captured graph, or part of it, at other sizes.

The readings found by `roles` make the captured graph a function of (B, L): the same operations,
with its own attention and its own masks, on a batch of any shape. Masks are probed and rewritten
graphs are checked with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..capture import Capture, each_row, row
from .inplace import storages
from .roles import STATE, Roles, Size, cut_table, is_number, map_sizes
from .widen import Widened


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


class Step(NamedTuple):
    """One node to run."""

    node: Node
    operands: list[Node]
    done: list[Node]  # operands that nothing reads any more
    args: tuple[Any, ...]  # of `operands`, constants and sizes
    kwargs: dict[str, Any]
    sized: bool  # there are sizes among the arguments
    flat: bool  # no operand is inside a tuple, a list or a slice
    number: bool  # its value is a size, a shape or a scalar


def schedule(
    capture: Capture,
    roles: Roles,
    targets: list[Node],
    feeds: Iterable[Node],
    *,
    whole: bool = False,
    state: bool = False,
) -> list[Step]:
    """What `evaluate` has to run for `targets`: the same for all sizes."""
    wanted = set(ancestors(capture, roles, targets, feeds, whole=whole))
    nodes = [n for n in capture.nodes if n in wanted or (state and n.target in STATE)]
    operands = {n: capture.operands(n) for n in nodes}
    last = {operand: n for n in nodes for operand in operands[n]}
    kept, steps = set(targets), []
    for node in nodes:
        read = dict.fromkeys(operands[node])
        done = [o for o in read if last[o] is node and o not in kept]
        given = roles.args.get(node, ((), {}))
        args, kwargs = map_arg(given, lambda n: map_arg(capture.resolve(n), capture.resolve))
        flat = not any(map(_holds_nodes, (*args, *kwargs.values())))
        number = is_number(roles.values.get(node))
        steps.append(Step(node, operands[node], done, args, kwargs, _has_sizes(given), flat, number))
    return steps


def _holds_nodes(arg: Any) -> bool:
    found: list[Node] = []
    if not isinstance(arg, Node):
        map_arg(arg, found.append)
    return bool(found)


def _has_sizes(args: Any) -> bool:
    found: list[Size] = []
    map_sizes(args, lambda s: found.append(s) or 0)  # type: ignore[func-returns-value]
    return bool(found)


def evaluate(
    capture: Capture,
    roles: Roles,
    targets: list[Node],
    sizes: dict[str, int],
    feeds: dict[Node, Any],
    *,
    whole: bool = False,
    take: Callable[[Any, int, Node], Any] | None = None,
    literal: Callable[[Node, Any], Any] | None = None,
    state: bool = False,
    widened: Widened | None = None,
    steps: list[Step] | None = None,
) -> dict[Node, Any]:
    """The values of `targets` where the symbols have the given `sizes`.

    `feeds` gives the values of some nodes (placeholders, or any node at which to start). With
    `whole`, slices along the sequence take all of it, or what ``take(tensor, dim, node)`` gives.
    `literal` may replace numbers in arguments. With `state`, the graph's own autocast regions hold,
    and where gradients are recorded its no-grad regions too; both end as they began. With `widened`,
    all is in float32 at least. `steps` is the `schedule`, if it is known. Raises whatever an operation
    raises, and KeyError where an input was not fed.
    """
    sizes = dict(sizes)
    values: dict[Node, Any] = {}
    if steps is None:
        steps = schedule(capture, roles, targets, feeds, whole=whole, state=state)
    run = partial(_run, roles, sizes, whole, take, literal, widened)
    folded = any(step.node.target is row for step in steps)
    with _regions() as switch:
        for step in steps:
            node = step.node
            if node in feeds:
                values[node] = feeds[node]
                continue
            if state and node.target in STATE:
                if widened is not None and node.target is not torch._C._set_grad_enabled:
                    continue
                values[node] = switch(node.target, [values.get(a, a) for a in node.args])
                continue
            values[node] = _in_loops(run, step, values) if folded else run(step, values)
            for operand in step.done:
                values.pop(operand, None)
    return {t: values[t] for t in targets}


class _Rows(list):
    """A value in a loop over the rows: what it is for each of them."""


def _in_loops(run: Callable[[Step, dict[Node, Any]], Any], step: Step, values: dict[Node, Any]) -> Any:
    """`run`, of each row where an operand has a value for each."""
    if step.node.target is row:
        return _Rows(values[step.operands[0]])
    if step.node.target is each_row:
        return torch.stack(values[step.operands[0]])
    rows = max((len(v) for o in step.operands if isinstance(v := values.get(o), _Rows)), default=None)
    if rows is None:
        return run(step, values)
    parts = [{o: _part(values.get(o), i) for o in step.operands} for i in range(rows)]
    return _Rows(run(step, part) for part in parts)


def _part(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, _Rows) else value


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
    roles: Roles,
    sizes: dict[str, int],
    whole: bool,
    take: Callable[[Any, int, Node], Any] | None,
    literal: Callable[[Node, Any], Any] | None,
    widened: Widened | None,
    step: Step,
    values: dict[Node, Any],
) -> Any:
    node = step.node
    if step.number and roles.exact(node, sizes):
        return _number(roles, roles.values[node], sizes)
    if node.op == "placeholder":
        raise KeyError(node.name)
    if node.op == "get_attr":
        return node.meta["fx_packing_attr"]
    if node.target in STATE:
        return None
    args, kwargs = step.args, step.kwargs
    if literal is not None:
        args, kwargs = literal(node, (args, kwargs))
    if step.sized:
        args, kwargs = map_sizes((args, kwargs), lambda s: roles.at(s, sizes))

    def value(arg: Any) -> Any:
        arg = map_arg(arg, values.__getitem__)
        return arg if widened is None else _each(widened, arg)

    if node in roles.tables:
        return cut_table((value(args[0]), args[1]), roles.tables[node], sizes["L"])
    if node in roles.slices:
        dim, cut = roles.slices[node]
        if _takes_all(roles, node, whole):
            base = value(args[0])
            if cut.symbol != cut.parent:
                base = take(base, dim, node) if take is not None else base
                sizes[cut.symbol] = base.shape[dim]
            return cut_table((base, args[1]), dim, None)
        result = value(args[0])[value(args[1])]
        line = Size(1, (cut.symbol,))
        out = [d for d, s in enumerate(roles.shape(node)) if s == line]
        sizes[cut.symbol] = result.shape[out[0]] if out else sizes.get(cut.symbol, 1)
        return result
    target = node.target
    if step.flat and widened is None:  # most of them, and each counts: a check is bound by its launches
        args = [values[a] if isinstance(a, Node) else a for a in args]
        kwargs = {k: values[a] if isinstance(a, Node) else a for k, a in kwargs.items()}
    else:
        args, kwargs = value((args, kwargs))
    if widened is not None and node.op == "call_method":
        target = widened.method(target)
    if node.op == "call_method":
        result = getattr(args[0], target)(*args[1:], **kwargs)
    else:
        result = target(*args, **kwargs)
    if widened is not None:
        widened.done()
    return result


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """`change` of every leaf of nested arguments."""
    if type(value) in (tuple, list):
        return type(value)(_each(change, v) for v in value)
    if type(value) is dict:
        return {k: _each(change, v) for k, v in value.items()}
    return change(value)


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
