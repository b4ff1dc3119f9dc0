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
from ..errors import Refused, where
from . import flex
from .attention import Attention
from .inplace import storages
from .roles import Roles, Size, index_dims, is_number
from .tail import Tail, line_dim, line_of, line_width
from .tokenwise import Layout, Proof

Key = Any  # what a value of the flat graph stands for: a captured node, or a tuple naming an input


@dataclass
class Output:
    """How one captured output is made from the flat ones.

    `kind`: ``padded`` ([B, n, ...]) or ``merged`` ([B * n, ...]) are gathered back; ``plain`` is
    taken as it is; ``input`` is a captured input; ``size`` is a size; ``constant`` is a constant.
    `columns` names the columns of the batch that it has, see `tokenwise.Columns`.
    """

    kind: str
    value: Any = None
    columns: str = "L"
    late: bool = False  # a result of the tail
    detached: bool = False  # whether it has no gradient where it was captured


@dataclass
class FlatGraph:
    """A rewritten graph. `inputs` names what each placeholder takes, in order:

    ``("input", i)`` captured input i as it is; ``("token", i, d)`` its real tokens, [1, n, 128, ...],
    or [n, 128] where its columns are its first dimension (d = 0); ``("positions",)`` [n, 128] int64;
    ``("read", columns)`` what a slice of the sequence reads of its parent's tokens, [S] int64;
    ``("entry", columns, part)`` which token of one of several joined slices each pair of them has, [N]
    int64; ``("kernel", window, j)`` the j-th plan tensor of the attention kernel.
    """

    gm: GraphModule
    kernel: str
    inputs: list[tuple]
    outputs: list[Output]
    structure: str = ""
    tail: TailGraph | None = None


@dataclass
class Entering:
    """A result of the flat graph that its tail takes: token by token along `dim`, of the line `line`
    and as `part` of the tail's, or (`part` None) the same for all tokens."""

    result: int
    part: str | None = None
    line: str | None = None
    dim: int = 0


@dataclass
class Scalar:
    """The number in a captured input, which Dynamo made of a float of the caller's."""

    index: int


@dataclass
class TailGraph:
    """What comes after the LM head, for some tokens: `inputs` says what each placeholder takes, the
    head's result (None), something that enters, a number, or captured input i. Its outputs follow the first
    `after` results of the flat graph."""

    gm: GraphModule
    columns: str
    after: int
    hidden: Entering
    weight: int
    bias: int | None
    width: int  # columns of the head's result
    dim: int  # that hold the tokens of the head's result
    inputs: list[Entering | Scalar | int | None]
    dims: list[int]  # that hold the tokens, of each output
    structure: str = ""


def flatten(
    capture: Capture,
    roles: Roles,
    live: list[Node],
    attention: list[Attention],
    proof: Proof,
    kernel: str,
    tail: Tail | None = None,
    *,
    dropout: bool = True,
) -> FlatGraph:
    """The flat graph with the given attention kernel; with ``dropout=False``, dropout is left out.
    What `tail` has is cut off, for `FlatGraph.tail`.

    Raises `Refused` where an output cannot be given its padded shape back.
    """
    by_node = {a.node: a for a in attention}
    apart = set(tail.nodes) if tail else set()
    writer = _Writer(capture, roles, set(live) - apart, by_node, proof, kernel, dropout)
    root = Scope(writer)
    writer.write(capture.gm, root)
    outputs, results, late = [], [], []
    for arg in _leaves(capture.output.args[0]):
        output = _output(capture, roles, proof.layouts, arg)
        output.detached = _has_no_gradient(output.value)
        if output.value in apart:
            output.late = True
            late.append(output)
        elif output.kind in ("padded", "merged", "plain"):
            results.append(root.get(output.value))
            output.value = len(results) - 1
        outputs.append(output)
    cut = _write_tail(writer, tail, [o.value for o in late], root, results) if tail else None
    for number, output in enumerate(late):
        output.value = cut.after + number  # type: ignore[union-attr]
    root.graph.output(tuple(results))
    gm = GraphModule(root.modules, root.graph, class_name="FlatGraph")
    gm.graph.lint()
    flat = FlatGraph(gm, kernel, root.keys, outputs, tail=cut)
    names = list(dict.fromkeys(n for k in root.keys if k[0] in _BY_COLUMNS for n in k[1:]))
    flat.structure = _text(gm) + repr([_unnamed(k, names) for k in root.keys])
    return flat


def _write_tail(
    whole: _Writer, tail: Tail, outputs: list[Node], root: Scope, results: list[Node]
) -> TailGraph:
    """The tail as a graph of its own; what enters it is appended to the `results` of the flat one."""
    writer = _TailWriter(
        whole.capture, whole.roles, set(tail.nodes), {}, whole.proof, whole.kernel, whole.dropout
    )
    writer.tail = tail
    scope = Scope(writer, root)
    scope.get(tail.head)
    writer.write(whole.capture.gm, scope)
    scope.graph.output(tuple(scope.get(n) for n in outputs))
    gm = GraphModule(scope.modules, scope.graph, class_name="Tail")
    gm.graph.lint()
    after, layouts = len(results), whole.proof.layouts

    def enter(node: Node) -> Entering:
        results.append(root.get(node))
        if node in tail.parts:
            layout = layouts[node]
            return Entering(len(results) - 1, tail.parts[node], line_of(layout), line_dim(layout))
        return Entering(len(results) - 1)

    def given(node: Key) -> Entering | Scalar | int | None:
        if node is tail.head:
            return None
        if isinstance(node, tuple):
            return Scalar(node[1])
        item = whole.capture.by_node.get(node)
        return item.index if item and node not in tail.parts else enter(node)

    index = whole.capture.by_node
    return TailGraph(
        gm, tail.columns, after, enter(tail.hidden), index[tail.weight].index,
        index[tail.bias].index if tail.bias else None, line_width(layouts[tail.head]),
        line_dim(layouts[tail.head]), [given(n) for n in scope.keys],
        [line_dim(layouts[n]) for n in outputs], _text(gm),
    )  # fmt: skip


_BY_COLUMNS = ("read", "entry")


def _unnamed(key: tuple, names: list[str]) -> Any:
    """An input's key without what differs between captures of one model."""
    if key[0] in _BY_COLUMNS:
        return (key[0], *(names.index(n) for n in key[1:]))
    return key if key[0] == "kernel" else key[0]


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
            # It stands on no line of the model. Not None: autograd's tracing joins such texts.
            self._last_joined.meta["stack_trace"] = ""
        return self._last_joined


class _Writer:
    def __init__(
        self,
        capture: Capture,
        roles: Roles,
        live: set[Node],
        attention: dict[Node, Attention],
        proof: Proof,
        kernel: str,
        dropout: bool,
    ) -> None:
        self.capture, self.roles, self.live = capture, roles, live
        self.attention, self.kernel, self.dropout = attention, kernel, dropout
        self.proof = proof
        self.tail: Tail | None = None

    def name(self, key: Key) -> str:
        """What an argument of the flat graph is called."""
        if isinstance(key, Node):
            return key.name
        if key[0] in ("input", "token", "scalar"):
            return _readable(self.capture.inputs[key[1]])
        if key[0] == "kernel":
            name = kernels.KERNELS[self.kernel].NAMES[key[2]]
            return name if key[1] is None or name in kernels.flex.PER_TOKEN else f"{name}_window_{key[1]}"
        return re.sub(r"\W+", "_", "_".join(map(str, key))).rstrip("_")

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
            key = ("read", self.proof.cuts.get(node)) if node in roles.slices else ("positions",)
            whole = node in roles.slices and roles.slices[node][1].symbol == roles.slices[node][1].parent
            if not whole and self.tail is None:  # all of a tail is of the same tokens
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
        args, kwargs = map_arg((args, kwargs), lambda n: self._value(n, scope, node))
        args, kwargs = self._sizes((args, kwargs), scope, node)
        return graph.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _input(self, node: Node) -> Key:
        item = self.capture.by_node[node]
        symbols = {s for size in self.roles.shape(node) for s in size.symbols}
        if "L" in symbols and item.kind == "user":
            return ("token", item.index, min(len(item.shape), 2) - 1)
        return ("input", item.index)

    def _value(self, node: Node, scope: Scope, user: Node) -> Any:
        resolved = self.capture.resolve(node)
        if not isinstance(resolved, Node):
            return map_arg(resolved, lambda n: self._value(n, scope, user))
        value = self.roles.values[resolved]
        if resolved in self.roles.free:
            scalar = self.capture.resolve(resolved.args[0])
            return scope.get(("scalar", self.capture.by_node[scalar].index))
        if is_number(value):
            return value
        return self._spread(resolved, scope, user)

    def _spread(self, node: Node, scope: Scope, user: Node) -> Node:
        """A value as its user needs it: where that joins slices, an entry for each pair of tokens."""
        value, layouts = scope.get(node), self.proof.layouts
        if node not in layouts or user not in layouts:
            return value
        have, need = _names(layouts[node]), _names(layouts[user])
        for name in need:
            parts = self.proof.columns[name].parts if name in self.proof.columns else ()
            for own in (n for n in have if parts and n != name and n not in need):
                if own not in parts:
                    if not self.proof.columns[own].parts:
                        continue
                    raise Refused(f"joins slices step by step, which is not supported, {where(user)}")
                key = ("spread", node, name)
                if key not in scope.values:
                    dim = next(d for d, factors in enumerate(layouts[node]) if own in factors)
                    index = scope.get(("entry", name, own))
                    scope.values[key] = scope.graph.call_method("index_select", (value, dim, index))
                value = scope.values[key]
        return value

    def _sizes(self, args: Any, scope: Scope, user: Node) -> Any:
        if isinstance(args, Size):
            return self._size(args, scope, user)
        if type(args) in (tuple, list):
            return type(args)(self._sizes(a, scope, user) for a in args)
        return {k: self._sizes(v, scope, user) for k, v in args.items()} if isinstance(args, dict) else args

    def _size(self, size: Size, scope: Scope, user: Node) -> Any:
        symbols = [s for s in size.symbols if s != "B"]
        result: Any = size.coefficient
        for symbol in symbols:
            length = self._length("L" if symbol == "L" else self._columns(symbol, user), scope)
            result = length if result == 1 else scope.graph.call_function(operator.mul, (length, result))
        return result

    def _length(self, name: str, scope: Scope) -> Node:
        """The node of how many tokens a line has."""
        key = ("length", name)
        if key not in scope.values:
            parts = self.proof.columns[name].parts if name != "L" else ()
            source = ("entry", name, parts[0]) if parts else ("read", name)
            size = (scope.get(("positions",) if name == "L" else source), 0)
            scope.values[key] = scope.graph.call_method("size", size)
        return scope.values[key]

    def _columns(self, symbol: str, user: Node) -> str:
        """Which slice a length is of, where several are as long: that of the result."""
        own = _names(self.proof.layouts.get(user, ()))
        every = [c.name for c in self.proof.columns.values() if c.symbol == symbol]
        if not every:
            raise Refused(f"a size of the sequence that no slice has is not supported, {where(user)}")
        return next((n for n in every if n in own), every[0])


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


class _TailWriter(_Writer):
    """All of a tail is of the same tokens, those of its head."""

    tail: Tail

    def _node(self, node: Node, scope: Scope) -> Node:
        written = self._written(node, scope)
        if node in self.tail.detached and isinstance(self.roles.values[node], torch.Tensor):
            return scope.graph.call_method("detach", (written,))
        return written

    def _written(self, node: Node, scope: Scope) -> Node:
        if node is not self.tail.head:
            return super()._node(node, scope)
        # What the graph changes in place must not be the leaf that gradients are taken of.
        changed = any(n in self.roles.mutations for n in self.tail.nodes)
        head = scope.get(node)
        return scope.graph.call_method("clone", (head,)) if changed else head

    def _spread(self, node: Node, scope: Scope, user: Node) -> Node:
        return scope.get(node)

    def _length(self, name: str, scope: Scope) -> Node:
        head = self.tail.head
        size = (scope.get(head), line_dim(self.proof.layouts[head]))
        return scope.graph.call_method("size", size)


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


def _has_no_gradient(node: Any) -> bool:
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    return isinstance(example, torch.Tensor) and example.is_floating_point() and not example.requires_grad


def output_nodes(capture: Capture) -> list[Any]:
    """What computes each captured output: a node, or a constant."""
    return [capture.resolve(leaf) for leaf in _leaves(capture.output.args[0])]


def _names(layout: Layout) -> list[str]:
    return [f for factors in layout for f in factors if isinstance(f, str)]


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
