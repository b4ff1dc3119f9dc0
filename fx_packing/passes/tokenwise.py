"""The proof that, attention aside, every operation treats each token on its own.

Every live node is run on fake tensors at prime sizes, and each ATen operation that it makes is
checked: it must be known, and must leave the token dimensions alone (element by element, or as
batch dimensions). The layout of a tensor says, dimension by dimension, which symbols it holds, in
order:

    hidden [B, L, 64]  ->  view(-1, 64)  [(B, L), 64]  ->  mm  [(B, L), 96]      token-wise
    hidden [B, L, 64]  ->  mean(dim=1)                                   mixes tokens: refused

The world is closed: an operation that is not listed here refuses the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..capture import Capture, each_row, row
from ..errors import Refused, describe, where
from .attention import Attention
from .hints import hint
from .roles import (
    STATE,
    Roles,
    Size,
    Slice,
    as_sizes,
    cut_table,
    index_dims,
    is_callers_int,
    is_number,
    map_sizes,
    tensors,
)

Layout = tuple[tuple[Any, ...], ...]  # for each dimension its factors: names, and plain ints > 1


@dataclass(frozen=True)
class Columns:
    """Which columns of the batch a line of tokens holds: a slice of `parent`, as in
    ``L[-9:]``; or, joined, what several slices of equal length hold side by side, as in
    ``L[:-1]&L[1:]``, the logits of one token and the id of the next. There is an entry where all parts
    have a token, or where the one part `anchor` has. A slice of joined slices is the same slice of each,
    joined, with them as its `parent`."""

    name: str
    symbol: str  # its length
    parent: str = ""
    cut: Slice | None = None
    parts: tuple[str, ...] = ()
    anchor: str | None = None


@dataclass
class Proof:
    """The layout of every live tensor, and the columns that its lines are of."""

    layouts: dict[Node, Layout] = field(default_factory=dict)
    columns: dict[str, Columns] = field(default_factory=dict)  # parents and parts come first
    cuts: dict[Node, str] = field(default_factory=dict)  # slice along the sequence -> its columns


class Mixes(Exception):
    """An ATen operation that is not known to treat each token on its own; ``str()`` says how."""


def prove(
    capture: Capture, roles: Roles, live: list[Node], attention: list[Attention]
) -> Proof:
    """The layout of every live tensor. Raises `Refused`, naming the first operation that may
    mix."""
    by_node = {a.node: a for a in attention}
    with compat.fake_tensors():
        checker = _Checker(roles)
        layouts = checker.proof.layouts
        values: dict[Node, Any] = {}
        inside: set[Node] = set()  # what loops over the rows do with one of them
        for node in live:
            try:
                values[node] = _value(capture, roles, node, values, by_node, checker)
                reads = capture.operands(node)
                if node.target is row or (node.target is not each_row and inside.intersection(reads)):
                    inside.add(node)
                    _keep_to_row(values, node, () if node.target is row else reads, checker)
            except Mixes as found:
                raise Refused(f"{describe(node)} {found}, {where(node)}{hint(node)}") from None
            if isinstance(values[node], torch.Tensor):
                layouts[node] = checker.layout(values[node])
                _no_pairs(layouts[node], node)
            elif not is_number(values[node]) and _joined_inside(capture, node, values, checker):
                raise Refused(
                    f"{describe(node)} combines different slices of the sequence in several results, "
                    f"which is not supported, {where(node)}"
                )
    _check_joined(capture, roles, checker.proof)
    return checker.proof


def _check_joined(capture: Capture, roles: Roles, proof: Proof) -> None:
    """Slices are joined row by row: each has to be of a [B, L, ...] tensor."""
    rows = [("B",)] if "B" in roles.primes else [(), ("B",)]
    for node in proof.cuts if any(c.parts for c in proof.columns.values()) else ():
        base = capture.resolve(node.args[0])
        if roles.slices[node][0] != 1 or proof.layouts[base][0] not in rows:
            raise Refused(
                f"slices of equal length are combined, and one is of a tensor that is not "
                f"[B, L, ...], {where(node)}"
            )


def _joined_inside(
    capture: Capture, node: Node, values: dict[Node, Any], checker: _Checker
) -> bool:
    """Whether one of several results is of lines that no operand has."""
    names = lambda t: {f for factors in checker.layout(t) for f in factors if isinstance(f, str)}  # noqa: E731
    given = [t for n in capture.operands(node) if n in values for t in tensors(values[n])]
    return bool(set().union(*map(names, tensors(values[node]))) - set().union(*map(names, given), {"B"}))


def _keep_to_row(values: dict[Node, Any], node: Node, reads: Iterable[Node], checker: _Checker) -> None:
    """In a loop over the rows, one of them must not meet what all of them have."""
    found = [t for n in (node, *reads) if n in values for t in tensors(values[n])]
    if any("B" in factors for t in found for factors in checker.layout(t)):
        raise Mixes("combines one row of the batch with all rows")


def _no_pairs(layout: Layout, node: Node) -> None:
    symbols = [f for factors in layout for f in factors if isinstance(f, str)]
    if len(symbols) != len(set(symbols)):
        raise Refused(
            f"{describe(node)} makes a token-by-token matrix that is not part of an attention "
            f"that is understood, {where(node)}"
        )


def _value(
    capture: Capture,
    roles: Roles,
    node: Node,
    values: dict[Node, Any],
    attention: dict[Node, Attention],
    checker: _Checker,
) -> Any:
    if node.op == "placeholder":
        return _placeholder(capture, roles, node, checker)
    if node.op == "get_attr" or node in roles.pinned:
        return roles.values[node]
    if node.target in STATE:
        return None
    known = roles.values[node]
    if node in attention:
        return checker.named(torch.empty_like(known))
    _no_sizes(capture, roles, node)
    args, kwargs = map_sizes(roles.args[node], lambda s: roles.at(s, roles.primes))
    args, kwargs = map_arg(
        (args, kwargs),
        lambda n: map_arg(
            capture.resolve(n), lambda r: values[r] if r in values else roles.values[r]
        ),
    )
    if node.target is row:
        base, layout = args[0], checker.layout(args[0])
        if layout[0] != ("B",):
            raise Mixes("loops over something other than the rows of the batch")
        return checker.set(base.new_empty(base.shape[1:]), layout[1:])
    if node.target is each_row:
        value, rows = args
        return checker.set(value.new_empty((rows, *value.shape)), (("B",), *checker.layout(value)))
    if node in roles.slices:
        dim, cut = roles.slices[node]
        base = args[0]
        if cut.symbol == cut.parent:  # as long as the sequence, or longer
            with checker:
                return cut_table(args, dim, None)
        shape = list(base.shape)
        shape[dim] = roles.primes[cut.symbol]
        shorter = base.new_empty(shape)
        layout = list(checker.layout(base))
        name = checker.slice(layout[dim], cut)
        checker.proof.cuts[node] = name
        layout[dim] = (name,)
        checker.set(shorter, tuple(layout))
        with checker:
            return cut_table((shorter, args[1]), dim, None)
    if node in roles.tables:
        dim = roles.tables[node]
        shape = list(args[0].shape)
        shape[dim] = roles.primes["L"]
        table = checker.named(args[0].new_empty(shape))
        with checker:
            return cut_table((table, args[1]), dim, None)
    if node.target is torch.arange and isinstance(known, torch.Tensor):
        size = roles.size(known.shape[0])
        if "B" in size.symbols:
            raise Mixes("numbers the rows of the batch")
        if size.symbols:
            _count_positions(roles, node)
            checker.positional.add(node)
            return checker.named(torch.empty_like(known))
    _no_random(node)
    _no_lengths(capture, roles, node, checker)
    with checker:
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def _placeholder(capture: Capture, roles: Roles, node: Node, checker: _Checker) -> Any:
    item, value = capture.by_node[node], roles.values[node]
    if item.kind == "user":
        layout = checker.named(value) if item.shape else value
        symbols = {f for factors in checker.layout(layout) for f in factors if isinstance(f, str)}
        if "B" in symbols and "L" not in symbols:
            raise Refused(
                f"the input {item.source} of shape {list(item.shape)} is [B, ...] with other columns than "
                f"the batch's {capture.columns}, which is not supported: what has one entry a row, or one a "
                f"kept column, is best combined with the result, outside"
            )
        if "B" in roles.primes and "L" in symbols and "B" not in symbols and item.shape[0] != 1:
            raise Refused(
                f"the input {item.source} of shape {list(item.shape)} has one entry a column, not "
                f"one a token; pass it as [B, L]"
            )
    return value


def _count_positions(roles: Roles, node: Node) -> None:
    """An arange over the sequence must count it one by one from 0."""
    args, kwargs = roles.args[node]
    if len(args) > 2 or "step" in kwargs:
        raise Mixes("numbers the sequence in steps")
    start, end = (
        args[0] if len(args) == 2 else kwargs.get("start", 0),
        (*args[-1:], kwargs.get("end"))[0],
    )
    if start not in (0, Size(0)):
        raise Mixes("numbers the sequence from a start other than 0")
    if roles.size(roles.values[node].shape[0]) != Size(1, ("L",)) or not isinstance(
        end, (Size, Node)
    ):
        raise Mixes("numbers a part of the sequence")


def _no_sizes(capture: Capture, roles: Roles, node: Node) -> None:
    """Refuse arithmetic with B, L or a caller's int as a number: the flat graph knows none of them.

    They may only be sizes of a shape, and the ends of a slice along the sequence.
    """
    kept: list[Node] = []
    map_arg(roles.args[node], lambda n: kept.append(capture.resolve(n)))
    if node in roles.slices or node in roles.tables:
        dim = roles.slices[node][0] if node in roles.slices else roles.tables[node]
        kept = _nodes_beside(capture, roles, node, dim)
    for number in capture.operands(node):
        if number not in roles.varying:
            continue
        value = roles.values[number]
        if type(value) is not int and not isinstance(value, (tuple, list)):
            raise Mixes("computes with a number made from the batch's sizes")
        if number in kept or not roles.exact(number):
            if (node in roles.slices or node in roles.tables) and number not in kept:
                continue
            given = capture.by_node.get(number)
            if given is not None and is_callers_int(given):
                raise Mixes(
                    f"computes with the int {given.source}, which varies from call to call and is a size to "
                    "Dynamo (a float that only comes after the LM head may vary)"
                )
            sizes = [str(s) for s in map(roles.size, as_sizes(value)) if s.symbols]
            what = (
                f"the size {' and '.join(sizes)}"
                if sizes
                else "a number made from the batch's sizes"
            )
            raise Mixes(f"computes with {what} as a number")


def _nodes_beside(capture: Capture, roles: Roles, node: Node, dim: int) -> list[Node]:
    """What an index reads besides the ends of its slice along `dim`."""
    base, index = roles.args[node][0]
    index = index if isinstance(index, tuple) else (index,)
    dims = index_dims(index, roles.values[capture.resolve(base)].dim()) or ()
    found: list[Node] = []
    for item, at in zip(index, dims, strict=True):
        if at != dim:
            map_arg(item, lambda n: found.append(capture.resolve(n)))
    return found


def _no_random(node: Node) -> None:
    """Random numbers, but for dropout, cannot be the same for packed tokens."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in _DROPOUTS or not any(word in name for word in _RANDOM):
        return
    raise Mixes("draws random numbers, which packed tokens would draw differently")


_DROPOUTS = {torch.nn.functional.dropout}
_RANDOM = ("rand", "bernoulli", "dropout", "normal", "uniform", "exponential",
           "multinomial", "poisson",            "cauchy", "geometric", "gumbel", "rrelu")  # fmt: skip


def _no_lengths(capture: Capture, roles: Roles, node: Node, checker: _Checker) -> None:
    """Refuse to compute with the positions and a number that looks like L, as in ``L - 1 -
    arange(L)``.

    Where L was a literal at capture, that is all that is left of it.
    """
    operands = [n for n in capture.operands(node) if tensors(roles.values[n])]
    if not operands or not all(n in checker.positional for n in operands):
        return
    checker.positional.add(node)
    if (
        node in roles.tables
        or isinstance(known := roles.values[node], (tuple, list))
        or not tensors(known)
    ):
        return
    if node.op == "call_function" and node.target is operator.getitem:
        return
    length = roles.captured["L"]
    if length <= 2:
        return
    for number in _plain_numbers(roles.args[node]):
        readings = (abs(number), 1 / abs(number)) if number else ()
        near = (length - 1, length, length + 1)
        if any(abs(reading - n) < 1e-6 * n for reading in readings for n in near):
            raise Mixes(
                f"computes with the positions and the number {number:g}, which may be made from "
                f"the length L = {length}"
            )


def _plain_numbers(args: Any) -> list[float]:
    if isinstance(args, (int, float)) and not isinstance(args, bool):
        return [args]
    if isinstance(args, (tuple, list)):
        return [n for a in args for n in _plain_numbers(a)]
    return [n for a in args.values() for n in _plain_numbers(a)] if isinstance(args, dict) else []


# -- the closed world of ATen operations -----------------------------------------------------------

_ALSO_POINTWISE = {
    "_to_copy", "clone", "copy", "copy_", "detach", "alias", "lift_fresh", "lift_fresh_copy",
    "native_dropout", "bernoulli", "bernoulli_", "fill", "fill_", "zero_", "empty_like",
    "zeros_like", "ones_like", "full_like", "where", "masked_fill", "masked_fill_", "_conj",
    "real", "view_as_real", "isnan", "isinf", "nan_to_num", "_local_scalar_dense",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "prod", "any", "all", "var",
    "std", "var_mean", "logsumexp", "norm", "linalg_vector_norm", "median", "_softmax",
    "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "aminmax", "softmax",
    "log_softmax", "_safe_softmax",
}  # fmt: skip
_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"}
_FACTORIES = {
    "arange", "zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full",
    "new_empty", "empty_strided", "new_empty_strided",
}  # fmt: skip


class _Checker(TorchDispatchMode):
    """Follows the layout of each tensor through the ATen operations made while it is active."""

    def __init__(self, roles: Roles) -> None:
        super().__init__()
        self.roles, self.proof = roles, Proof()
        self.positional: set[Node] = set()  # nodes whose value depends on the positions alone

    # layouts live on the tensors; a tensor without one holds no token symbol, or takes it by size
    def set(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        tensor._fx_packing_layout = layout
        return tensor

    def named(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor the layout that its sizes say: one symbol, or a plain number, a
        dimension."""
        layout = []
        for size in map(self.roles.size, tensor.shape):
            if len(size.symbols) > 1 or (size.symbols and size.coefficient != 1):
                raise Mixes(f"makes a dimension of size {size}")
            layout.append(self.line(size))
        return self.set(tensor, tuple(layout))

    def line(self, size: Size) -> tuple[Any, ...]:
        """The factors of a dimension that is known by its size alone. The length of slices is taken
        for that of the first slice of that length."""
        if size.symbols and size.symbols[0] in self.roles.lines:
            first = (c.name for c in self.proof.columns.values() if c.symbol == size.symbols[0])
            return (next(first, size.symbols[0]),)
        return size.symbols or _plain(size.coefficient)

    def slice(self, factors: tuple[Any, ...], cut: Slice) -> str:
        """The name of a slice of a line."""
        (parent,) = factors
        known = self.proof.columns
        if parent in known and known[parent].parts:
            name = self._side_by_side([self.slice((p,), cut) for p in known[parent].parts])
            known[name] = replace(known[name], parent=parent)
            return name
        name = parent + cut.text
        known.setdefault(name, Columns(name, cut.symbol, parent, cut))
        return name

    def prime(self, name: str) -> int:
        """The size in the re-run of a line, or of the rows."""
        columns = self.proof.columns.get(name)
        return self.roles.primes[columns.symbol if columns else name]

    def meet(self, found: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The factors of a dimension that several tensors share: equal, but for lines that are slices
        of equal length, which are joined."""
        merged, *rest = found
        for other in rest:
            if len(other) != len(merged):
                raise Mixes("combines dimensions that number the tokens differently")
            merged = tuple(self._join(a, b) for a, b in zip(merged, other, strict=True))
        return merged

    def _join(self, a: Any, b: Any) -> Any:
        if a == b:
            return a
        known = self.proof.columns
        if a not in known or b not in known or known[a].symbol != known[b].symbol:
            raise Mixes("combines dimensions that number the tokens differently")
        return self._side_by_side([p for name in (a, b) for p in known[name].parts or (name,)])

    def _side_by_side(self, parts: list[str]) -> str:
        """The name of slices of equal length, joined."""
        parts, known = sorted(set(parts)), self.proof.columns
        name = "&".join(parts)
        known.setdefault(name, Columns(name, known[parts[0]].symbol, parts=tuple(parts)))
        return name

    def layout(self, tensor: torch.Tensor) -> Layout:
        known = getattr(tensor, "_fx_packing_layout", None)
        if known is None or len(known) != tensor.dim():
            self.named(tensor)
            known = tensor._fx_packing_layout
        return known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # asks a tensor for its device
            return out
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        given = _named_arguments(func, args, kwargs)
        outs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if _is_tensor(t)]
        rule = _RULES.get(name)
        if rule is not None:
            layouts = rule(self, given, outs)
        elif name in _ALSO_POINTWISE or torch.Tag.pointwise in func.tags:
            layouts = [self.broadcast(args, kwargs)] * len(outs)
        else:
            raise Mixes(f"uses {name}, which is not known to treat each token on its own")
        for tensor, layout in zip(outs, layouts, strict=True):
            if len(layout) != tensor.dim():  # e.g. an in-place result keeps its own shape
                layout = self.layout(tensor)
            self.set(tensor, layout)
        return out

    def broadcast(self, *args: Any) -> Layout:
        """The layout of an elementwise result: in each dimension, that of the operands not of size
        1."""
        return self.joined([self.layout(t) for t in _tensors(args)])

    def joined(self, layouts: list[Layout]) -> Layout:
        """The layout that tensors of these layouts broadcast to."""
        rank = max((len(lay) for lay in layouts), default=0)
        merged = []
        for dim in range(rank):
            column = [lay[dim - rank + len(lay)] for lay in layouts if dim - rank + len(lay) >= 0]
            found = {c for c in column if c}
            with_symbols = [c for c in dict.fromkeys(column) if _symbols(c)]
            if with_symbols and len(with_symbols) < len(found):
                raise Mixes("combines dimensions that number the tokens differently")
            merged.append(self.meet(with_symbols) if with_symbols else next(iter(found), ()))
        layout = tuple(merged)
        symbols = [s for factors in layout for s in _symbols(factors)]
        if len(symbols) != len(set(symbols)):
            raise Mixes("combines every token with every other (outside an attention)")
        return layout


Rule = Callable[[_Checker, dict[str, Any], list[torch.Tensor]], list[Layout]]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule(*_RESHAPES)
def _reshape(checker, given, outs):
    source = [f for factors in checker.layout(given["self"]) for f in factors]
    size = lambda f: checker.prime(f) if isinstance(f, str) else f  # noqa: E731
    layout = []
    for need in outs[0].shape:
        factors: list[Any] = []
        while need > 1:
            if not source:
                raise Mixes("reshapes tokens in a way that is not understood")
            first = source.pop(0)
            if need % size(first) == 0:
                factors.append(first)
                need //= size(first)
            elif not isinstance(first, str) and first % need == 0:
                factors.append(need)
                source.insert(0, first // need)
                need = 1
            else:
                raise Mixes("reshapes across tokens")
        layout.append(_merge(factors))
    return [tuple(layout)]


@_rule("unsqueeze")
def _unsqueeze(checker, given, outs):
    layout = list(checker.layout(given["self"]))
    layout.insert(given["dim"] % outs[0].dim(), ())
    return [tuple(layout)]


@_rule("squeeze")
def _squeeze(checker, given, outs):
    tensor = given["self"]
    dims = given.get("dim", range(tensor.dim()))
    dims = {d % tensor.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    layout = checker.layout(tensor)
    return [tuple(f for d, f in enumerate(layout) if d not in dims or tensor.shape[d] != 1)]


@_rule("expand")
def _expand(checker, given, outs):
    layout = checker.layout(given["self"])
    layout = ((),) * (outs[0].dim() - len(layout)) + layout
    widened = []
    for factors, size in zip(layout, outs[0].shape, strict=True):
        widened.append(factors or _from_size(checker, size))
    return [tuple(widened)]


@_rule("repeat")
def _repeat(checker, given, outs):
    layout = checker.layout(given["self"])
    layout = ((),) * (outs[0].dim() - len(layout)) + layout
    result = []
    for factors, times, size in zip(layout, given["repeats"], outs[0].shape, strict=True):
        if times != 1 and _symbols(factors):
            raise Mixes("repeats tokens")
        result.append(factors if times == 1 else _from_size(checker, size))
    return [tuple(result)]


@_rule("transpose", "transpose_")
def _transpose(checker, given, outs):
    layout = list(checker.layout(given["self"]))
    a, b = given["dim0"], given["dim1"]
    layout[a], layout[b] = layout[b], layout[a]
    return [tuple(layout)]


@_rule("t")
def _t(checker, given, outs):
    return [tuple(reversed(checker.layout(given["self"])))]


@_rule("permute")
def _permute(checker, given, outs):
    layout = checker.layout(given["self"])
    return [tuple(layout[d] for d in given["dims"])]


@_rule("slice", "narrow")
def _slice(checker, given, outs):
    tensor, dim = given["self"], given.get("dim", 0)
    layout = list(checker.layout(tensor))
    if outs[0].shape[dim] != tensor.shape[dim]:
        _keep_off(layout, [dim], "takes a slice of the tokens")
        layout[dim] = _plain(outs[0].shape[dim])
    return [tuple(layout)]


@_rule("select")
def _select(checker, given, outs):
    layout = list(checker.layout(given["self"]))
    _keep_off(layout, [given["dim"]], "selects one token or row")
    layout.pop(given["dim"])
    return [tuple(layout)]


@_rule("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "tensor_split")
def _split(checker, given, outs):
    layout = checker.layout(given["self"])
    dim = given.get("dim", 0) % len(layout)
    if len(outs) > 1:
        _keep_off(layout, [dim], "splits the tokens")
    results = []
    for out in outs:
        if out.dim() < len(layout):
            results.append(layout[:dim] + layout[dim + 1 :])
        elif len(outs) == 1:
            results.append(layout)
        else:
            results.append(layout[:dim] + (_plain(out.shape[dim]),) + layout[dim + 1 :])
    return results


@_rule("cat", "stack")
def _cat(checker, given, outs):
    tensors = [t for t in given["tensors"] if t.numel() or t.dim() > 1]
    dim = given.get("dim", 0) % outs[0].dim()
    layouts = [checker.layout(t) for t in tensors]
    if outs[0].dim() > len(layouts[0]):
        layouts = [lay[:dim] + ((),) + lay[dim:] for lay in layouts]
    for layout in layouts:
        if len(layouts) > 1:
            _keep_off(layout, [dim], "joins tensors along the tokens")
        if layout[:dim] + layout[dim + 1 :] != layouts[0][:dim] + layouts[0][dim + 1 :]:
            raise Mixes("joins tensors that number the tokens differently")
    return (
        [layouts[0][:dim] + (_plain(outs[0].shape[dim]),) + layouts[0][dim + 1 :]]
        if len(layouts) > 1
        else [layouts[0]]
    )


@_rule("constant_pad_nd", "flip", "roll")
def _pad(checker, given, outs):
    tensor = given["self"]
    layout = list(checker.layout(tensor))
    if "pad" in given:
        pads = given["pad"]
        dims = [tensor.dim() - 1 - i // 2 for i, p in enumerate(pads) if p]
    else:
        dims = given["dims"] or list(range(tensor.dim()))
    _keep_off(layout, dims, "moves tokens along the sequence")
    return [
        tuple(f if _symbols(f) else _plain(s) for f, s in zip(layout, outs[0].shape, strict=True))
    ]


@_rule("repeat_interleave")
def _repeat_interleave(checker, given, outs):
    if "self" not in given or not isinstance(given.get("repeats"), int) or given.get("dim") is None:
        raise Mixes("repeats tokens")
    layout = list(checker.layout(given["self"]))
    dim = given["dim"] % len(layout)
    _keep_off(layout, [dim], "repeats tokens")
    layout[dim] = _plain(outs[0].shape[dim])
    return [tuple(layout)]


@_rule("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmv", "addbmm", "linear", "matmul")
def _product(checker, given, outs):
    pair = [t for k in ("self", "mat1", "mat2", "batch1", "batch2", "vec", "input", "weight")
            if _is_tensor(t := given.get(k))][-2:]  # fmt: skip
    left, right = (checker.layout(t) for t in pair)
    if len(right) < 2 or len(left) != len(right):
        raise Mixes("is a product of shapes that are not understood")
    if _symbols(left[-1]) or _symbols(right[-2]):
        raise Mixes("sums over the tokens in a matrix product")
    batch = ()
    for a, b in zip(left[:-2], right[:-2], strict=True):
        if a and b and a != b and (_symbols(a) or _symbols(b)):
            raise Mixes("multiplies dimensions that number the tokens differently")
        batch += (a if _symbols(a) or not b else b,)
    layout = batch + (left[-2], right[-1])
    symbols = [s for factors in layout for s in _symbols(factors)]
    if len(symbols) != len(set(symbols)):
        raise Mixes("multiplies every token with every other (outside an attention)")
    if any(t is not pair[0] and t is not pair[1] for t in [given.get("self")] if _is_tensor(t)):
        checker.joined([checker.layout(given["self"]), layout])  # what is added to the product
    return [layout]


@_rule(*_REDUCTIONS)
def _reduce(checker, given, outs):
    tensor = given.get("self", given.get("input"))
    layout = checker.layout(tensor)
    if "other" in given and _is_tensor(given["other"]):  # max(a, b) and min(a, b) are elementwise
        return [checker.broadcast(tensor, given["other"])]
    dims = given.get("dim")
    if dims is None and "k" in given or dims is None and "descending" in given:
        dims = -1
    dims = list(range(len(layout))) if dims is None or dims == [] else dims
    dims = (
        [d % max(len(layout), 1) for d in ([dims] if isinstance(dims, int) else dims)]
        if layout
        else []
    )
    _keep_off(layout, dims, "sums, compares or normalises over the tokens")
    results = []
    for out in outs:
        if out.dim() == len(layout):
            results.append(
                tuple(_plain(out.shape[d]) if d in dims else f for d, f in enumerate(layout))
            )
        else:
            results.append(tuple(f for d, f in enumerate(layout) if d not in dims))
    return results


@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _layer_norm(checker, given, outs):
    layout = checker.layout(given["input"])
    count = len(given["normalized_shape"])
    dims = list(range(len(layout) - count, len(layout)))
    _keep_off(layout, dims, "normalises over the tokens")
    return [layout] + [layout[:-count] + ((),) * count] * (len(outs) - 1)


@_rule("embedding")
def _embedding(checker, given, outs):
    weight = checker.layout(given["weight"])
    _keep_off(weight, [0, 1], "looks up tokens by index")
    if given.get("scale_grad_by_freq"):
        raise Mixes("scales gradients by how often a token occurs in the batch")
    return [checker.layout(given["indices"]) + (weight[1],)]


@_rule("index_select", "gather")
def _gather(checker, given, outs):
    source, index, dim = (
        checker.layout(given["self"]), checker.layout(given["index"]),
        given["dim"] % given["self"].dim(),
    )  # fmt: skip
    _keep_off(source, [dim], "looks up tokens by index")
    if len(index) == 1 and len(source) != 1:
        return [source[:dim] + (index[0],) + source[dim + 1 :]]
    if len(source) == 1:
        return [index]
    _keep_off(index, [dim], "gathers along the tokens")
    return [
        tuple(
            index[d] if d == dim else checker.meet([index[d], source[d]]) for d in range(len(index))
        )
    ]


@_rule("nll_loss_forward")
def _nll_loss(checker, given, outs):
    source, target = checker.layout(given["self"]), checker.layout(given["target"])
    if given["reduction"] != 0 or len(source) != 2:
        raise Mixes("sums a loss over the tokens; with reduction='none' it need not be refused")
    _keep_off(source, [1], "looks up tokens by index")
    return [(checker.meet([source[0], target[0]]),), ()]


@_rule("nll_loss2d_forward")
def _nll_loss2d(checker, given, outs):
    source, target = checker.layout(given["self"]), checker.layout(given["target"])
    if given["reduction"] != 0:
        raise Mixes("sums a loss over the tokens; with reduction='none' it need not be refused")
    _keep_off(source, [1], "looks up tokens by index")
    rest = (source[0], *source[2:])
    return [tuple(checker.meet(pair) for pair in zip(rest, target, strict=True)), ()]


@_rule("index")
def _index(checker, given, outs):
    source, indices = checker.layout(given["self"]), given["indices"]
    if any(i is None for i in indices):
        raise Mixes("indexes by tensors in a way that is not understood")
    _keep_off(source, range(len(source)), "looks up tokens by index")
    if any(i.dtype == torch.bool for i in indices):
        raise Mixes("selects by a boolean mask")
    return [checker.broadcast(indices) + source[len(indices) :]]


@_rule(*_FACTORIES)
def _factory(checker, given, outs):
    return [tuple(_from_size(checker, s) for s in outs[0].shape)]


def _from_size(checker: _Checker, value: int) -> tuple[Any, ...]:
    size = checker.roles.size(value)
    if len(size.symbols) > 1 or (size.symbols and size.coefficient != 1):
        raise Mixes(f"makes a dimension of size {size}")
    return checker.line(size)


def _keep_off(layout: Any, dims: Any, what: str) -> None:
    for dim in dims:
        symbols = _symbols(layout[dim])
        if symbols:
            raise Mixes(f"{what} (dimension {'*'.join(symbols)})")


def _symbols(factors: tuple[Any, ...]) -> list[str]:
    return [f for f in factors if isinstance(f, str)]


def _plain(size: int) -> tuple[int, ...]:
    return (size,) if size != 1 else ()


def _merge(factors: list[Any]) -> tuple[Any, ...]:
    """Join neighbouring plain factors, so that equal dimensions have equal layouts."""
    merged: list[Any] = []
    for factor in factors:
        if merged and not isinstance(factor, str) and not isinstance(merged[-1], str):
            merged[-1] *= factor
        else:
            merged.append(factor)
    return tuple(merged)


def _named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [a.name for a in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    return tensors(list(value.values()) if isinstance(value, dict) else value)
