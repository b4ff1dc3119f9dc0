"""Write the flat graph: the captured one with B := 1 and L := T.

    captured                                     flat
    ids [B, L] -> embedding -> view(B, L, ..)    ids [1, T] -> embedding -> view(1, T, ..)
    arange(L)                                    positions [T]
    sdpa(q, repeat(k), repeat(v), mask)          attend(q, k, v, *plan)
    h[:, -K:] -> lm_head                         h.index_select(1, read) -> lm_head

It knows neither B nor L: T comes with the inputs, so one compiled flat graph serves every padded
shape, and a later capture of the same model, whose flat graph is the same text, reuses it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import attention as kernels
from ..capture import Capture
from ..errors import Refused
from .attention import Attention
from .inplace import storages
from .roles import Roles, Size, index_dims, is_number
from .tokenwise import Layout

Key = Any  # what a value of the flat graph stands for: a captured node, or a tuple naming an input


@dataclass
class Output:
    """How one captured output is made from the flat ones.

    `kind`: ``padded`` ([B, n, ...]) or ``merged`` ([B * n, ...]) are gathered back, n columns of
    the sequence symbol `symbol`; ``plain`` is taken as it is; ``input`` is a captured input;
    ``size`` is a size; ``constant`` is a constant.
    """

    kind: str
    value: Any = None
    symbol: str = "L"


@dataclass
class FlatGraph:
    """A rewritten graph. `inputs` names what each placeholder takes, in order:

    ``("input", i)`` captured input i as it is; ``("token", i)`` its real tokens, [1, T, ...];
    ``("positions",)`` [T] int64; ``("read", symbol)`` the stored tokens that a slice of the sequence
    reads, [S] int64; ``("kernel", window, j)`` the j-th plan tensor of the attention kernel.
    """

    gm: GraphModule
    kernel: str
    inputs: list[tuple]
    outputs: list[Output]
    structure: str = ""
    windows: list[int | None] = field(default_factory=list)


def flatten(
    capture: Capture,
    roles: Roles,
    live: list[Node],
    attention: list[Attention],
    layouts: dict[Node, Layout],
    kernel: str,
    *,
    dropout: bool = True,
) -> FlatGraph:
    """The flat graph with the given attention kernel; with ``dropout=False``, dropout is left out.

    Raises `Refused` where an output cannot be given its padded shape back.
    """
    writer = _Writer(capture, roles, set(live), {a.node: a for a in attention}, kernel, dropout)
    root = _Scope(Graph(), None)
    writer.write(capture.gm, root)
    outputs, results = [], []
    for arg in _leaves(capture.output.args[0]):
        output = _output(capture, roles, layouts, arg)
        if output.kind in ("padded", "merged", "plain"):
            results.append(root.get(output.value))
            output.value = len(results) - 1
        outputs.append(output)
    root.graph.output(tuple(results))
    gm = GraphModule(writer.modules, root.graph, class_name="FlatGraph")
    gm.graph.lint()
    windows = sorted({a.window for a in attention}, key=lambda w: (w is None, w))
    flat = FlatGraph(gm, kernel, root.keys, outputs, windows=windows)
    symbols = list(dict.fromkeys(k[1] for k in root.keys if k[0] == "read"))
    flat.structure = _text(gm) + repr(
        [
            ("read", symbols.index(k[1])) if k[0] == "read" else k if k[0] == "kernel" else k[0]
            for k in root.keys
        ]
    )
    return flat


class _Scope:
    """A graph being written, and the values it has; a body takes what it lacks as an argument."""

    def __init__(self, graph: Graph, parent: _Scope | None) -> None:
        self.graph, self.parent = graph, parent
        self.values: dict[Key, Node] = {}
        self.keys: list[Key] = []  # what the placeholders stand for, in order
        self._last: Node | None = None

    def get(self, key: Key) -> Node:
        if key not in self.values:
            name = key.name if isinstance(key, Node) else "_".join(str(k) for k in key)
            if self.parent is None and isinstance(key, Node):
                raise AssertionError(f"{key} was not written")
            if self._last is not None:
                place = self.graph.inserting_after(self._last)
            else:  # before all nodes, or at the end of an empty graph
                first = next(iter(self.graph.nodes), None)
                place = self.graph.inserting_before(first)
            with place:
                self._last = self.graph.placeholder(name)
            self.values[key] = self._last
            self.keys.append(key)
        return self.values[key]


class _Writer:
    def __init__(
        self,
        capture: Capture,
        roles: Roles,
        live: set[Node],
        attention: dict[Node, Attention],
        kernel: str,
        dropout: bool,
    ) -> None:
        self.capture, self.roles, self.live = capture, roles, live
        self.attention, self.kernel, self.dropout = attention, kernel, dropout
        self.modules = torch.nn.Module()

    def write(self, gm: GraphModule, scope: _Scope) -> None:
        for node in gm.graph.nodes:
            if node in self.capture.bodies:
                self._body(node, scope)
            elif node in self.live:
                written = self._node(node, scope)
                if written.op not in ("placeholder", "output") and "stack_trace" in node.meta:
                    written.meta.setdefault("stack_trace", node.meta["stack_trace"])
                scope.values[node] = written

    def _body(self, call: Node, scope: _Scope) -> None:
        """A checkpointed body stays one, so that memory stays checkpointed."""
        inner = _Scope(Graph(), scope)
        self.write(self.capture.bodies[call], inner)
        results = self.capture.alias[call]
        results = results if isinstance(results, tuple) else (results,)
        resolved = [self.capture.resolve(r) for r in results]
        wanted = [r for r in resolved if isinstance(r, Node) and r in inner.values]
        wanted = list(dict.fromkeys(wanted))
        if not wanted:
            return
        inner.graph.output(tuple(inner.get(r) for r in wanted))
        name = f"body_{sum(1 for _ in self.modules.children())}"
        self.modules.add_module(name, GraphModule(torch.nn.Module(), inner.graph))
        target = scope.graph.get_attr(name)
        args = (target, *(scope.get(k) for k in inner.keys))
        result = scope.graph.call_function(call.target, args, dict(call.kwargs))
        for index, node in enumerate(wanted):
            scope.values[node] = scope.graph.call_function(operator.getitem, (result, index))

    def _node(self, node: Node, scope: _Scope) -> Node:
        graph, roles = scope.graph, self.roles
        if node.op == "placeholder":
            return scope.get(self._input(node))
        if node.op == "get_attr":
            name = f"constant_{node.name}"
            self.modules.register_buffer(name, node.meta["fx_packing_attr"].detach())
            return graph.get_attr(name)
        if node in self.attention:
            return self._attend(self.attention[node], scope)
        args, kwargs = roles.args[node]
        if node in roles.slices or node in roles.tables:
            dim = roles.slices[node][0] if node in roles.slices else roles.tables[node]
            base, index = scope.get(self.capture.resolve(args[0])), args[1]
            key = ("read", roles.slices[node][1].symbol) if node in roles.slices else ("positions",)
            whole = (
                node in roles.slices
                and roles.slices[node][1].symbol == roles.slices[node][1].parent
            )
            if not whole:
                base = graph.call_method("index_select", (base, dim, scope.get(key)))
            index = index if isinstance(index, tuple) else (index,)
            dims = index_dims(index, roles.values[self.capture.resolve(args[0])].dim())
            rest = tuple(slice(None) if d == dim else i for i, d in zip(index, dims, strict=True))
            if all(i == slice(None) or i is Ellipsis for i in rest):
                return base
            return graph.call_function(operator.getitem, (base, rest))
        if node.target is torch.arange and roles.size(roles.values[node].shape[0]).symbols:
            changed = {s for m in roles.mutations.values() for s in m} & storages(roles, node)
            options = {"dtype": kwargs.get("dtype") or torch.int64, "copy": bool(changed)}
            return graph.call_method("to", (scope.get(("positions",)),), options)
        if node.target is torch.nn.functional.dropout and not self.dropout:
            return graph.call_method("view_as", (scope.get(self.capture.resolve(args[0])),) * 2)
        args, kwargs = map_arg((args, kwargs), lambda n: self._value(n, scope))
        args, kwargs = self._sizes((args, kwargs), scope)
        return graph.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _input(self, node: Node) -> Key:
        item = self.capture.by_node[node]
        symbols = {s for size in self.roles.shape(node) for s in size.symbols}
        return ("token" if "L" in symbols and item.kind == "user" else "input", item.index)

    def _value(self, node: Node, scope: _Scope) -> Any:
        resolved = self.capture.resolve(node)
        if not isinstance(resolved, Node):
            return map_arg(resolved, lambda n: self._value(n, scope))
        value = self.roles.values[resolved]
        if is_number(value):
            return value
        return scope.get(resolved)

    def _sizes(self, args: Any, scope: _Scope) -> Any:
        if isinstance(args, Size):
            return self._size(args, scope)
        if type(args) in (tuple, list):
            return type(args)(self._sizes(a, scope) for a in args)
        return (
            {k: self._sizes(v, scope) for k, v in args.items()} if isinstance(args, dict) else args
        )

    def _size(self, size: Size, scope: _Scope) -> Any:
        symbols = [s for s in size.symbols if s != "B"]
        result: Any = size.coefficient
        for symbol in symbols:
            key = ("length", symbol)
            if key not in scope.values:
                source = ("positions",) if symbol == "L" else ("read", symbol)
                scope.values[key] = scope.graph.call_method("size", (scope.get(source), 0))
            result = (
                scope.values[key]
                if result == 1
                else scope.graph.call_function(operator.mul, (scope.values[key], result))
            )
        return result

    def _attend(self, found: Attention, scope: _Scope) -> Node:
        kernel = kernels.KERNELS[self.kernel]
        q, k, v = (
            scope.get(self.capture.resolve(n)) for n in (found.query, found.key, found.value)
        )
        if found.key_transposed:
            k = scope.graph.call_method("transpose", (k, 2, 3))
        count = kernel.INPUTS
        plan = [scope.get(("kernel", found.window, j)) for j in range(count)]
        kwargs = {"scale": found.scale, "window": found.window, "softcap": found.softcap}
        return scope.graph.call_function(kernel.attend, (q, k, v, *plan), kwargs)


def _output(capture: Capture, roles: Roles, layouts: dict[Node, Layout], arg: Any) -> Output:
    node = capture.resolve(arg)
    if not isinstance(node, Node):
        return Output("constant", node)
    if node in capture.by_node:
        return Output("input", capture.by_node[node].index)
    if is_number(roles.values[node]):
        value = roles.values[node]
        return (
            Output("size", roles.size(value)) if type(value) is int else Output("constant", value)
        )
    layout = layouts[node]
    row = ("B",) if "B" in roles.primes else ()
    symbols = [[f for f in factors if isinstance(f, str)] for factors in layout]
    if not any(symbols):
        return Output("plain", node)
    if len(layout) >= 2 and layout[0] == row and len(layout[1]) == 1 and not any(symbols[2:]):
        (symbol,) = symbols[1] or ["B"]
        if symbol != "B":
            return Output("padded", node, symbol)
    if layout[0][:-1] == row and symbols[0][-1:] not in ([], ["B"]) and not any(symbols[1:]):
        return Output("merged", node, symbols[0][-1])
    text = ", ".join("*".join(map(str, f)) or "1" for f in layout)
    hint = (
        "keys and values of a cache? pass use_cache=False" if len(layout) == 4 else "not supported"
    )
    raise Refused(f"an output of shape [{text}] is neither [B, L, ...] nor [B * L, ...] ({hint})")


def output_nodes(capture: Capture) -> list[Any]:
    """What computes each captured output: a node, or a constant."""
    return [capture.resolve(leaf) for leaf in _leaves(capture.output.args[0])]


def _leaves(args: Any) -> list[Any]:
    return (
        [leaf for a in args for leaf in _leaves(a)] if isinstance(args, (tuple, list)) else [args]
    )


def _text(gm: GraphModule) -> str:
    """The graph as text with numbered values: equal for equal graphs, whatever the names."""
    numbers: dict[Node, int] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = len(numbers)
        args = map_arg((node.args, node.kwargs), lambda n: _Number(numbers[n]))
        target = node.target if isinstance(node.target, str) else _qualified(node.target)
        if node.op == "placeholder":
            target = ""
        if node.op == "get_attr":
            value = getattr(gm, str(node.target))
            target = _text(value) if isinstance(value, GraphModule) else f"constant {id(value)}"
        lines.append(f"{numbers[node]} {node.op} {target} {args}")
    return "\n".join(lines)


class _Number(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _qualified(target: Any) -> str:
    module = getattr(target, "__module__", "")
    return (
        f"{module}.{getattr(target, '__qualname__', None) or getattr(target, '__name__', target)}"
    )
