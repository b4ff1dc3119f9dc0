"""Write the flat graph: the captured one with B := 1 and L := T.

    captured                                     flat
    ids [B, L] -> embedding -> view(B, L, ..)    ids [1, T] -> embedding -> view(1, T, ..)
    arange(L)                                    positions [T]
    sdpa(q, repeat(k), repeat(v), mask)          attend(q, k, v, *plan), or FlexAttention nodes (`flex.py`)
    h[:, -K:] -> lm_head                         h.index_select(1, read) -> lm_head

It knows neither B nor L: T comes with the inputs, so one compiled flat graph serves every padded
shape, and a later capture of the same model, whose flat graph is the same text, reuses it. What has a
value a token comes in blocks [1, n, 128] and is joined to [1, 128 * n] first of all: so every compiler
sees that T is whole blocks.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import attention as kernels
from ..capture import Capture, Input
from ..errors import Refused
from . import flex
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

    ``("input", i)`` captured input i as it is; ``("token", i, d)`` its real tokens, [1, n, 128, ...],
    or [n, 128] where its columns are its first dimension (d = 0); ``("positions",)`` [n, 128] int64;
    ``("read", symbol)`` the stored tokens that a slice of the sequence reads, [S] int64;
    ``("kernel", window, j)`` the j-th plan tensor of the attention kernel.
    """

    gm: GraphModule
    kernel: str
    inputs: list[tuple]
    outputs: list[Output]
    structure: str = ""


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
    root = Scope(writer)
    writer.write(capture.gm, root)
    outputs, results = [], []
    for arg in _leaves(capture.output.args[0]):
        output = _output(capture, roles, layouts, arg)
        if output.kind in ("padded", "merged", "plain"):
            results.append(root.get(output.value))
            output.value = len(results) - 1
        outputs.append(output)
    root.graph.output(tuple(results))
    gm = GraphModule(root.modules, root.graph, class_name="FlatGraph")
    gm.graph.lint()
    flat = FlatGraph(gm, kernel, root.keys, outputs)
    symbols = list(dict.fromkeys(k[1] for k in root.keys if k[0] == "read"))
    flat.structure = _text(gm) + repr(
        [
            ("read", symbols.index(k[1])) if k[0] == "read" else k if k[0] == "kernel" else k[0]
            for k in root.keys
        ]
    )
    return flat


class Scope:
    """A graph being written, and the values it has; a body takes what it lacks as an argument."""

    def __init__(self, writer: _Writer, parent: Scope | None = None) -> None:
        self.graph, self.modules = Graph(), torch.nn.Module()
        self.values: dict[Key, Node] = {}
        self.keys: list[Key] = []  # what the placeholders stand for, in order
        self._writer, self._parent = writer, parent
        self._names: set[str] = set()
        self._last: Node | None = None  # argument
        self._last_joined: Node | None = None

    def get(self, key: Key) -> Node:
        """The node of a value, which becomes an argument where it was not computed here."""
        if key not in self.values:
            if self._parent is None and isinstance(key, Node):
                raise AssertionError(f"{key} was not written")
            name, dim = self._writer.name(key), self._writer.in_blocks(key)
            joined = self._parent is None and dim is not None
            node = self._argument(f"{name}_blocks" if joined else name)
            self.values[key] = self._join(node, dim, name) if joined else node
            self.keys.append(key)
        return self.values[key]

    def _argument(self, name: str) -> Node:
        while name in self._names:
            name += "_"
        self._names.add(name)
        if self._last is not None:
            place = self.graph.inserting_after(self._last)
        else:  # before all nodes, or at the end of an empty graph
            place = self.graph.inserting_before(next(iter(self.graph.nodes), None))
        with place:
            self._last = self.graph.placeholder(name)
        return self._last

    def _join(self, blocks: Node, dim: int, name: str) -> Node:
        with self.graph.inserting_after(self._last_joined or self._last):
            self._last_joined = self.graph.create_node(
                "call_method", "flatten", (blocks, dim, dim + 1), name=name
            )
            self._last_joined.meta["stack_trace"] = None  # it stands on no line of the model
        return self._last_joined


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

    def name(self, key: Key) -> str:
        """What an argument of the flat graph is called."""
        if isinstance(key, Node):
            return key.name
        if key[0] in ("input", "token"):
            return _readable(self.capture.inputs[key[1]])
        if key[0] == "kernel":
            name = kernels.KERNELS[self.kernel].NAMES[key[2]]
            return name if key[1] is None or name in kernels.flex.PER_TOKEN else f"{name}_window_{key[1]}"
        return "_".join(map(str, key))

    def in_blocks(self, key: Key) -> int | None:
        """The first of the two dimensions [n, 128] in which an argument has T, None if it has not."""
        if isinstance(key, Node):
            return None
        if key[0] == "kernel":
            return 0 if kernels.KERNELS[self.kernel].NAMES[key[2]] in kernels.flex.PER_TOKEN else None
        return {"token": key[-1], "positions": 0}.get(key[0])

    def write(self, gm: GraphModule, scope: Scope) -> None:
        for node in gm.graph.nodes:
            if node in self.capture.bodies:
                self._body(node, scope)
            elif node in self.live:
                last = next(iter(reversed(scope.graph.nodes)), None)
                scope.values[node] = self._node(node, scope)
                for written in _behind(last, scope.graph):
                    if written.op != "placeholder" and "stack_trace" in node.meta:
                        written.meta.setdefault("stack_trace", node.meta["stack_trace"])

    def _body(self, call: Node, scope: Scope) -> None:
        """A checkpointed body stays one, so that memory stays checkpointed."""
        inner = Scope(self, scope)
        self.write(self.capture.bodies[call], inner)
        results = self.capture.alias[call]
        results = results if isinstance(results, tuple) else (results,)
        resolved = [self.capture.resolve(r) for r in results]
        wanted = [r for r in resolved if isinstance(r, Node) and r in inner.values]
        wanted = list(dict.fromkeys(wanted))
        if not wanted:
            return
        inner.graph.output(tuple(inner.get(r) for r in wanted))
        name = f"body_{sum(name.startswith('body_') for name, _ in scope.modules.named_children())}"
        scope.modules.add_module(name, GraphModule(inner.modules, inner.graph))
        target = scope.graph.get_attr(name)
        args = (target, *(scope.get(k) for k in inner.keys))
        result = scope.graph.call_function(call.target, args, dict(call.kwargs))
        for index, node in enumerate(wanted):
            scope.values[node] = scope.graph.call_function(operator.getitem, (result, index))

    def _node(self, node: Node, scope: Scope) -> Node:
        graph, roles = scope.graph, self.roles
        if node.op == "placeholder":
            return scope.get(self._input(node))
        if node.op == "get_attr":
            name = f"constant_{node.name}"
            scope.modules.register_buffer(name, node.meta["fx_packing_attr"].detach())
            return graph.get_attr(name)
        if node in self.attention:
            return self._attend(self.attention[node], scope)
        args, kwargs = roles.args[node]
        if node in roles.slices or node in roles.tables:
            dim = roles.slices[node][0] if node in roles.slices else roles.tables[node]
            base, index = scope.get(self.capture.resolve(args[0])), args[1]
            key = ("read", roles.slices[node][1].symbol) if node in roles.slices else ("positions",)
            whole = node in roles.slices and roles.slices[node][1].symbol == roles.slices[node][1].parent
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
        if "L" in symbols and item.kind == "user":
            return ("token", item.index, min(len(item.shape), 2) - 1)
        return ("input", item.index)

    def _value(self, node: Node, scope: Scope) -> Any:
        resolved = self.capture.resolve(node)
        if not isinstance(resolved, Node):
            return map_arg(resolved, lambda n: self._value(n, scope))
        value = self.roles.values[resolved]
        if is_number(value):
            return value
        return scope.get(resolved)

    def _sizes(self, args: Any, scope: Scope) -> Any:
        if isinstance(args, Size):
            return self._size(args, scope)
        if type(args) in (tuple, list):
            return type(args)(self._sizes(a, scope) for a in args)
        return {k: self._sizes(v, scope) for k, v in args.items()} if isinstance(args, dict) else args

    def _size(self, size: Size, scope: Scope) -> Any:
        symbols = [s for s in size.symbols if s != "B"]
        result: Any = size.coefficient
        for symbol in symbols:
            length = self._length(symbol, scope)
            result = length if result == 1 else scope.graph.call_function(operator.mul, (length, result))
        return result

    def _length(self, symbol: str, scope: Scope) -> Node:
        key = ("length", symbol)
        if key not in scope.values:
            source = ("positions",) if symbol == "L" else ("read", symbol)
            scope.values[key] = scope.graph.call_method("size", (scope.get(source), 0))
        return scope.values[key]

    def _attend(self, found: Attention, scope: Scope) -> Node:
        kernel = kernels.KERNELS[self.kernel]
        q, k, v = (scope.get(self.capture.resolve(n)) for n in (found.query, found.key, found.value))
        if found.key_transposed:
            k = scope.graph.call_method("transpose", (k, 2, 3))
        constants = {"scale": found.scale, "window": found.window, "softcap": found.softcap}
        if self.kernel == "flex":
            return self._flex(found, q, k, v, constants, scope)
        plan = [scope.get(("kernel", found.window, j)) for j in range(len(kernel.NAMES))]
        return scope.graph.call_function(kernel.attend, (q, k, v, *plan), constants)

    def _flex(
        self, found: Attention, q: Node, k: Node, v: Node, constants: dict[str, Any], scope: Scope
    ) -> Node:
        first = next(iter(self.attention.values())).window  # whose per-token inputs all others share

        def plan(name: str) -> Node:
            window = first if name in kernels.flex.PER_TOKEN else found.window
            return scope.get(("kernel", window, kernels.flex.NAMES.index(name)))

        q, k = (
            x if _dtype(n) is _dtype(found.value) else scope.graph.call_method("type_as", (x, v))
            for x, n in ((q, found.query), (k, found.key))
        )
        value = found.value.meta["example_value"]
        return flex.flex_attention(
            scope, q, k, v, plan, self._length("L", scope), **constants,
            options=flex.options(value.device, value.dtype, found.head_dim, found.v_head_dim),
        )  # fmt: skip


def _behind(last: Node | None, graph: Graph) -> Iterator[Node]:
    """The nodes after `last`, backwards."""
    return itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))


def _readable(item: Input) -> str:
    """``layers_0_self_attn_q_proj_weight``, ``input_ids``: after the place where Dynamo found it."""
    source = item.source
    if item.kind == "module":  # from the module on, wherever that came from
        source = source[max(source.find("._modules["), 0) :]
    name = "_".join(w for w in re.findall(r"\['?(\w+)'?\]", source) if w != "kwargs")
    # A word alone may be one that Python or the generated code has a use for.
    return name if "_" in name and not name[0].isdigit() else f"input_{name}"


def _dtype(node: Node) -> torch.dtype:
    return node.meta["example_value"].dtype


def _output(capture: Capture, roles: Roles, layouts: dict[Node, Layout], arg: Any) -> Output:
    node = capture.resolve(arg)
    if not isinstance(node, Node):
        return Output("constant", node)
    if node in capture.by_node:
        return Output("input", capture.by_node[node].index)
    if is_number(roles.values[node]):
        value = roles.values[node]
        return Output("size", roles.size(value)) if type(value) is int else Output("constant", value)
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
    hint = "keys and values of a cache? pass use_cache=False" if len(layout) == 4 else "not supported"
    raise Refused(f"an output of shape [{text}] is neither [B, L, ...] nor [B * L, ...] ({hint})")


def _leaves(args: Any) -> list[Any]:
    return [leaf for a in args for leaf in _leaves(a)] if isinstance(args, (tuple, list)) else [args]


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
    return f"{module}.{getattr(target, '__qualname__', None) or getattr(target, '__name__', target)}"
