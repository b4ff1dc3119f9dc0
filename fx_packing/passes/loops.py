"""Fold a loop over the batch's rows, which Dynamo has unrolled, into what it does with one row.

    captured                                          folded
    y0 = f(logits[0], ids[0])                         y = f(row(logits), row(ids))
    y1 = f(logits[1], ids[1])
    torch.stack([y0, y1])                             each_row(y, B)

The flat batch has one row: there the loop runs once, as it was written, and no dimension changes its
number. Folded is a loop whose copies are equal operation by operation and number by number, over all
rows in their order, of which nothing is read but the stack. Everything else is left as it is.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..capture import Capture, each_row, read, row
from .inplace import mutated
from .roles import STATE

_UNBIND = {"unbind", torch.unbind}
_SELECT = {"select", torch.select}


def fold_loops(capture: Capture) -> Capture | None:
    """The same program with its loops over rows folded, None where it has none."""
    if capture.rows < 2:
        return None
    order = {n: i for i, n in enumerate(capture.nodes)}
    barriers = [i for n, i in order.items() if n.target in STATE or mutated(capture, n) is not None]
    loops = [_Loop(capture, n) for n in capture.nodes if _is_stack(capture, n)]
    loops = [loop for loop in loops if loop.matches and not loop.crosses(order, barriers)]
    while True:  # what one loop reads of another keeps both only if both stay
        inside = {n for loop in loops for n in loop.nodes}
        stacks = {loop.stack for loop in loops}
        closed = [loop for loop in loops if loop.closed(inside, stacks)]
        if len(closed) == len(loops):
            break
        loops = closed
    return _rewrite(capture, loops) if loops else None


def _is_stack(capture: Capture, node: Node) -> bool:
    if node.target is not torch.stack or node.graph is not capture.gm.graph or not node.args:
        return False
    dims = [*node.args[1:], *node.kwargs.values()]
    known = set(node.kwargs) <= {"dim"} and all(type(d) is int and d == 0 for d in dims)
    return known and isinstance(node.args[0], (list, tuple)) and len(node.args[0]) == capture.rows


class _Differs(Exception):
    """The copies are not the same."""


class _Loop:
    """What the copies of a loop have in common: `body` and `rows` hold each node with its copies."""

    def __init__(self, capture: Capture, stack: Node) -> None:
        self.capture, self.stack = capture, stack
        self.rows: dict[tuple[Node, ...], tuple[Node, list[tuple]]] = {}  # x[i][index].. -> x, indices
        self.body: set[tuple[Node, ...]] = set()
        self.outside: set[Node] = set()  # what all copies read
        self._todo: list[tuple] = []
        try:
            self._same(tuple(stack.args[0]))
            while self._todo:
                self._copies(self._todo.pop())
            self.matches = bool(self.rows)
        except _Differs:
            self.matches = False

    @property
    def nodes(self) -> set[Node]:
        return {n for copies in (*self.rows, *self.body) for n in copies}

    def crosses(self, order: dict[Node, int], barriers: list[int]) -> bool:
        """Whether the copies may differ by when they run: before or after a change in place, inside or
        outside an autocast region."""
        first = min(order[n] for n in self.nodes)
        return any(first < b < order[self.stack] for b in barriers)

    def closed(self, inside: set[Node], stacks: set[Node]) -> bool:
        """Whether nothing else reads the rows, and no copy those of another."""
        users = {u for n in self.nodes for u in n.users}
        return users <= inside | stacks and not self.outside & inside

    def _same(self, args: tuple) -> None:
        """`args`, one a copy, have to be equal numbers, one value from outside, or copies of one."""
        first = args[0]
        if isinstance(first, Node):
            args = tuple(self.capture.resolve(a) for a in args)
            if not all(isinstance(a, Node) for a in args):
                raise _Differs
            if all(a is args[0] for a in args):
                self.outside.add(args[0])
            else:
                self._todo.append(args)
            return
        if not all(type(a) is type(first) for a in args):
            raise _Differs
        if isinstance(first, (tuple, list)) and all(len(a) == len(first) for a in args):
            for items in zip(*args, strict=True):
                self._same(items)
        elif isinstance(first, dict) and all(list(a) == list(first) for a in args):
            for name in first:
                self._same(tuple(a[name] for a in args))
        elif isinstance(first, slice):
            self._same(tuple((a.start, a.stop, a.step) for a in args))
        elif not all(a == first and repr(a) == repr(first) for a in args):  # 0.0 == -0.0
            raise _Differs

    def _copies(self, nodes: tuple[Node, ...]) -> None:
        """`nodes` have to be copies of one operation, or the rows of one value in order."""
        if nodes in self.body or self._are_rows(nodes):
            return
        first = nodes[0]
        for node in nodes:
            known = node.op in ("call_function", "call_method") and node.graph is self.capture.gm.graph
            if not known or (node.op, node.target) != (first.op, first.target):
                raise _Differs
        self.body.add(nodes)
        self._same(tuple(n.args for n in nodes))
        self._same(tuple(n.kwargs for n in nodes))

    def _are_rows(self, nodes: tuple[Node, ...]) -> bool:
        if nodes in self.rows:
            return True
        taken = [_taken(n) for n in nodes if n.graph is self.capture.gm.graph]
        if len(taken) < len(nodes) or None in taken:
            return False
        bases, indices = zip(*taken, strict=True)
        numbers = [index[0] if index else None for index in indices]
        if len({self.capture.resolve(b) for b in bases}) == 1:
            if repr(numbers) != repr(list(range(len(nodes)))):  # False == 0
                return False
            batch, before, indices = bases[0], [], tuple(index[1:] for index in indices)
        elif self._are_rows(bases):  # a slice of rows, x[i][:-1]: rows of the slice, x[:, :-1][i]
            batch, before = self.rows[bases]
        else:
            return False
        self._same(indices)
        self.rows[nodes] = (batch, [*before, indices[0]] if indices[0] else before)
        return True


def _taken(node: Node) -> tuple[Node, tuple] | None:
    """(x, index) of ``x[index]`` where that takes rows, slices or the like of a tensor."""
    if node.target in _SELECT and len(node.args) == 3 and node.args[1] == 0:
        return node.args[0], (node.args[2],)
    if node.target is not operator.getitem:
        return None
    base, index = node.args
    if base.target in _UNBIND:
        first = [*base.args[1:], *base.kwargs.values()] in ([], [0])
        return (base.args[0], (index,)) if first and len(base.args) else None
    index = index if isinstance(index, tuple) else (index,)
    basic = all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in index)
    return (base, index) if basic and isinstance(base.meta.get("example_value"), Tensor) else None


def _rewrite(capture: Capture, loops: list[_Loop]) -> Capture:
    graph = Graph()
    new: dict[Node, Node] = {}
    graph.output(graph.graph_copy(capture.gm.graph, new))

    def insert(old: Node, target: Any, *args: Any) -> Node:
        args = map_arg(args, lambda n: new.get(n, n))
        with graph.inserting_before(new[old]):
            made = graph.call_function(target, args)
        made.meta = {k: v for k, v in old.meta.items() if k != "example_value"}
        return made

    def become(old: Node, made: Node) -> None:
        made.meta = dict(old.meta)
        new[old].replace_all_uses_with(made)

    for nodes, (batch, indices) in {k: v for loop in loops for k, v in loop.rows.items()}.items():
        for index in indices:
            batch = insert(nodes[0], operator.getitem, batch, (slice(None), *index))
        become(nodes[0], insert(nodes[0], row, batch))
    for loop in loops:
        become(loop.stack, insert(loop.stack, each_row, new[loop.stack].args[0][0], capture.rows))
    dead = {n for loop in loops for n in (*loop.nodes, loop.stack)}
    dead |= {n for n in capture.gm.graph.nodes if n.target in _UNBIND}
    for node in reversed(list(capture.gm.graph.nodes)):
        if node in dead and not new[node].users:
            graph.erase_node(new[node])
    gm = GraphModule(capture.gm, graph)
    graph.lint()
    return replace(read(gm, [i.example for i in capture.inputs]), folded_from=capture.gm)
