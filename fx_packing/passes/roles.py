"""Roles of dimensions: which literal is B, which is L?

Dynamo burns sizes into the graph as literals. Re-running the graph on fake tensors at other sizes,
primes that divide nothing else, shows the role of every dimension in its size, with no rule per
operation. Where a literal has several readings (B, L, a product, or just a number), each is tried
until the operation works and its result has the captured shape; a dead end goes back to the latest
choice that it depends on.

    captured                              at B=1009, L=10007
    ids: [4, 32]                          ids: [1009, 10007]
    h = embedding(ids, w)   [4, 32, 64]   [1009, 10007, 64]
    v = h.view(4, 32, -1, 16)             h.view(B, L, -1, 16)     readings: B, L, -1, 16
    s = h[:, -9:]           [4, 9, 64]    [1009, 9973, 64]         K0 = a new sequence symbol
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .. import compat
from ..capture import Capture, Input, each_row
from ..errors import Refused, describe, where
from .hints import hint

# Large primes: no dimension of a model is a multiple of one (checked, with the next tried instead).
_PRIMES = (10007, 1009, 9973, 9967, 9949, 9941, 9931, 9929, 9923, 9907, 9901, 9887, 9883, 9871)

_SHAPE_METHODS = {
    "view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_full", "new_empty",
    "unflatten", "broadcast_to", "tile",
}  # fmt: skip
_SHAPE_FUNCTIONS = {
    torch.reshape, torch.zeros, torch.ones, torch.full, torch.empty, torch.broadcast_to, torch.rand,
    torch.randn, torch.unflatten, torch.tile, torch.Size,
}  # fmt: skip
# How many arguments come before the sizes, where that is not just the tensor of a method; and the
# operations whose sizes are a single argument, with other numbers behind it.
_BEFORE_SIZES = {
    torch.reshape: 1, torch.broadcast_to: 1, torch.tile: 1, torch.unflatten: 2, "unflatten": 2,
}  # fmt: skip
_ONE_ARGUMENT = {torch.full, "new_full"}
# The source of a SymInt that is a tensor's size, not an int that the caller passes.
_SIZE = re.compile(r"\.(size\(\)|shape)\[\d+\]$")
# Nodes that set a state rather than compute: sizes do not depend on them.
STATE = {
    torch._C._set_grad_enabled,
    torch._C._log_api_usage_once,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}


@dataclass(frozen=True)
class Size:
    """A size as a product: ``coefficient * symbols``, e.g. ``1 * B * L``."""

    coefficient: int
    symbols: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [str(self.coefficient)] if self.coefficient != 1 or not self.symbols else []
        return "*".join(parts + list(self.symbols))


@dataclass(frozen=True)
class Slice:
    """A slice along the sequence: columns ``[start, stop)`` of a line of length `parent`.

    Its length is the symbol `symbol`, shared by all slices that were as long when captured: which
    columns they are of is told apart by the proof. `start` and `stop` are as the graph has them:
    None, an int, or the node of a SymInt; `text` names them.
    """

    symbol: str
    parent: str
    start: Any
    stop: Any
    text: str = ""


@dataclass
class Roles:
    """The outcome: fake values at prime sizes, and how every literal is to be read."""

    values: dict[Node, Any] = field(default_factory=dict)  # a fake tensor, an int, a tuple, ...
    args: dict[Node, tuple[tuple, dict]] = field(default_factory=dict)  # with `Size` for literals
    slices: dict[Node, tuple[int, Slice]] = field(default_factory=dict)  # node -> (dim, slice)
    tables: dict[Node, int] = field(default_factory=dict)  # node -> dim of a table cut to length L
    primes: dict[str, int] = field(default_factory=dict)  # symbol -> size in the re-run
    captured: dict[str, int] = field(default_factory=dict)  # symbol -> size at capture
    lengths: dict[int, str] = field(
        default_factory=dict
    )  # length of a slice in the re-run -> symbol
    lines: set[str] = field(default_factory=set)  # the symbols that are lengths of slices
    pinned: dict[Node, float] = field(default_factory=dict)  # scalars, by the node that reads them
    free: set[Node] = field(default_factory=set)  # scalars that may be others at each call
    varying: set[Node] = field(default_factory=set)  # numbers that B, L or a caller's int decide
    mutations: dict[Node, set[int]] = field(default_factory=dict)  # in place -> storages, `inplace`

    def size(self, value: int) -> Size:
        """Read a size of the re-run as a product of symbols."""
        symbols = []
        for symbol, prime in self.primes.items():
            while value and value % prime == 0:
                value //= prime
                symbols.append(symbol)
        if value in self.lengths:  # a SymInt such as ``s1 - 1``: the length of a slice
            symbols.append(self.lengths[value])
            value = 1
        return Size(value, tuple(symbols))

    def at(self, size: Size, sizes: dict[str, int]) -> int:
        """The value of a `Size` where the symbols have these `sizes`."""
        value = size.coefficient
        for symbol in size.symbols:
            value *= sizes[symbol]
        return value

    def exact(self, node: Node, known: Iterable[str] | None = None) -> bool:
        """Whether a node is a number that follows from the sizes of symbols (of `known` ones): a
        constant, or a product of symbols. ``L - 1`` and ``L ** 0.5`` are not."""
        value = self.values.get(node)
        if value is None or not is_number(value) or node in self.free:
            return False
        if node not in self.varying:
            return True
        symbols = {s for size in map(self.size, as_sizes(value)) for s in size.symbols}
        return bool(symbols) and (known is None or symbols <= set(known))

    def shape(self, node: Node) -> tuple[Size, ...]:
        """The shape of a node's value as products of symbols."""
        return tuple(self.size(s) for s in self.values[node].shape)


def find_roles(capture: Capture) -> Roles:
    """Give every dimension and every literal size its role. Raises `Refused` where none fits."""
    if capture.columns < 2:
        raise Refused(f"the batch has L = {capture.columns} column: there is nothing to pack")
    from .inplace import find_mutations

    with compat.fake_tensors():
        roles = _Solver(capture).solve()
        roles.mutations = find_mutations(capture, roles)
    return roles


@dataclass
class _Reading:
    """One way to read a node: its arguments with a `Size` for each literal size."""

    args: tuple
    kwargs: dict
    cut: tuple[int, Slice] | None = None
    table: int | None = None


class _Solver:
    """Depth-first over the nodes in order, with jumps back along the graph's own dependencies."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.roles = Roles()
        primes = self._primes()
        ints = [i for i in capture.inputs if is_callers_int(i)]
        ints.sort(key=lambda i: compat.size_hint(i.node.meta["example_value"]), reverse=True)
        # A caller's ints, which cut lines, get smaller primes than any line, in the order of their values.
        last = max(2, len(primes) - len(ints))
        self.ints = {i.node: prime for i, prime in zip(ints, primes[last:], strict=False)}
        self.ints |= self._tied(ints, primes[0])
        self.spare = iter(primes[2:last])
        self.roles.captured = {"L": capture.columns, "B": capture.rows}
        # One row needs no symbol: the flat graph is the captured graph with one row.
        self.roles.primes = ({"B": primes[1]} if capture.rows > 1 else {}) | {"L": primes[0]}
        self.cuts: dict[tuple[str, int, int], Slice] = {}

    def _tied(self, ints: list[Input], length: int) -> dict[Node, int]:
        """Ints from which L follows: where all columns but one are asked for, Dynamo finds L equal to K + 1,
        guards on it, and writes L so. In the re-run such an int is one less than L then too."""
        columns, tied = self.capture.symbolic_shape[1], length - 1
        if tied in _PRIMES or any(s % tied == 0 for s in self._sizes()):  # no number of its own
            return {}
        nodes = [i.node for i in ints]
        return {n: tied for n in nodes if compat.distance(columns, n.meta["example_value"]) == 1}

    def _sizes(self) -> set[int]:
        """All sizes of the captured graph, but 0."""
        return {s for n in self.capture.nodes for s in _sizes(n.meta.get("example_value")) if s}

    def _primes(self) -> list[int]:
        sizes = self._sizes()
        good = [p for p in _PRIMES if not any(s % p == 0 for s in sizes)]
        if len(good) < 4:
            raise Refused("the model's sizes are multiples of every prime that tells B and L apart")
        return good

    def solve(self) -> Roles:
        nodes = self.capture.nodes
        readings: dict[int, list[_Reading]] = {}  # what is left to try at each node
        depends: dict[Node, int] = {}  # the choice points a node depends on, as a bit set
        conflict: dict[int, int] = {}
        problem: dict[int, str] = {}
        position, deepest, budget = 0, 0, 40 * len(nodes) + 4000
        while position < len(nodes):
            node, budget = nodes[position], budget - 1
            before = 0
            for operand in self.capture.operands(node):
                before |= depends[operand]
            if position not in readings:
                readings[position] = self._readings(node)
                conflict[position] = before
                depends[node] = before | (len(readings[position]) > 1) << position
            while readings[position]:
                reading = readings[position].pop(0)
                try:
                    value = self._run(node, reading)
                except Exception as error:  # the operation does not work at these sizes
                    problem[position] = (
                        f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                    )
                    continue
                if self._fits(node, value):
                    self._keep(node, reading, value)
                    break
            else:
                back = conflict[position]
                deepest = max(deepest, position)
                if not back or budget < 0:
                    node = nodes[deepest]
                    raise Refused(
                        f"no reading of the sizes fits {describe(node)}, {where(node)} (captured "
                        f"with B = {self.capture.rows}, L = {self.capture.columns}"
                        + (f"; {problem[deepest]})" if deepest in problem else ")")
                        + hint(node)
                    )
                latest = back.bit_length() - 1
                conflict[latest] |= back & ~(1 << latest)
                for later in range(latest + 1, position + 1):
                    readings.pop(later, None)
                position = latest
                continue
            position += 1
        self._find_varying()
        return self.roles

    def _find_varying(self) -> None:
        """Numbers made from sizes that are not the same in every batch."""
        roles = self.roles
        for node in self.capture.nodes:
            value = roles.values[node]
            if not is_number(value) or node in roles.pinned:
                continue
            operands = [roles.values[n] for n in self.capture.operands(node)]
            from_numbers = bool(operands) and all(is_number(v) for v in operands)
            if from_numbers and node.target is not operator.getitem:
                varies = any(n in roles.varying for n in self.capture.operands(node))
            else:  # an input, a tensor's size or shape, or an entry of its shape
                varies = any(roles.size(s).symbols for s in as_sizes(value))
            if varies:
                roles.varying.add(node)

    def _run(self, node: Node, reading: _Reading) -> Any:
        roles = self.roles
        args, kwargs = map_sizes(
            (reading.args, reading.kwargs), lambda s: roles.at(s, roles.primes)
        )
        if node.op in ("placeholder", "get_attr"):
            (value,) = args
            return value() if callable(value) else value
        args, kwargs = self._values((args, kwargs))
        if node.target in STATE:
            return None
        if reading.cut is not None:
            dim, length = reading.cut[0], roles.primes[reading.cut[1].symbol]
            if args[0].shape[dim] < length:  # one length for slices of lines that differ
                shape = [length if d == dim else s for d, s in enumerate(args[0].shape)]
                args = (args[0].new_empty(shape), args[1])
            return cut_table(args, dim, length)
        if reading.table is not None:
            base, index = args
            wide = torch.zeros(roles.primes["L"], dtype=torch.int64, device=base.device)
            return cut_table((base.index_select(reading.table, wide), index), reading.table, None)
        if node.op == "call_method":
            if node.target == "item" and node in roles.pinned:
                return roles.pinned[node]
            if node.target in ("view", "reshape", "expand"):
                _precheck(roles, node.target, args[0], args[1:])
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        if node.target is operator.getitem:
            _precheck_rows(roles, *args)
        return node.target(*args, **kwargs)

    def _values(self, args: Any) -> Any:
        def value(node: Node) -> Any:
            resolved = self.capture.resolve(node)
            return _map_nodes(resolved, lambda n: self.roles.values[n])

        return map_arg(args, value)

    def _fits(self, node: Node, value: Any) -> bool:
        """Whether the value has the captured shape, once the symbols have their captured sizes."""
        expected = node.meta.get("example_value")
        values, wanted = tensors(value), tensors(expected)
        if expected is None or len(values) != len(wanted):
            return True
        for got, want in zip(values, wanted, strict=True):
            if got.dim() != want.dim():
                return False
            for size, captured in zip(got.shape, want.shape, strict=True):
                if self.roles.at(self.roles.size(size), self.roles.captured) != compat.size_hint(
                    captured
                ):
                    return False
        return True

    def _keep(self, node: Node, reading: _Reading, value: Any) -> None:
        roles = self.roles
        roles.values[node] = value
        roles.args[node] = (reading.args, reading.kwargs)
        for table, entry in ((roles.slices, reading.cut), (roles.tables, reading.table)):
            table.pop(node, None)
            if entry is not None:
                table[node] = entry

    # -- readings ------------------------------------------------------------------------------

    def _readings(self, node: Node) -> list[_Reading]:
        if node.op == "placeholder":
            return [_Reading((v,), {}) for v in self._input(node)]
        if node.op == "get_attr":
            value = node.meta["fx_packing_attr"]
            return [_Reading((_fake(value) if isinstance(value, torch.Tensor) else value,), {})]
        if node.target is operator.getitem:
            return self._getitem(node)
        if node.op == "call_method" and node.target == "item":
            source = self.capture.by_node.get(self.capture.resolve(node.args[0]))
            if source is not None and source.kind == "scalar":
                with compat.real_tensors():
                    self.roles.pinned[node] = source.example.item()
        if node.target is each_row:
            return [_Reading((node.args[0], Size(1, ("B",))), {})]
        if node.target is torch.arange:
            return self._literals(node, ("L", "B"))
        if node.target in (_SHAPE_METHODS if node.op == "call_method" else _SHAPE_FUNCTIONS):
            return self._literals(node, ("B", "L"))
        return [_Reading(node.args, node.kwargs)]

    def _input(self, node: Node) -> list[Any]:
        item = self.capture.by_node[node]
        if item.kind == "size":
            return self._symint(node, item.source)
        if item.kind == "scalar":
            return [item.example]
        if item.kind == "module":
            return [_fake(item.example)]
        values = []
        token = item.shape[:2] == (self.capture.rows, self.capture.columns)
        slots = [self._candidates(s, ("B", "L")) for s in item.shape[2 * token :]]
        if token:
            slots = [
                [self._candidates(s, (n,))[0]] for s, n in zip(item.shape, "BL", strict=False)
            ] + slots
        shapes = _fewest_repeats(slots)
        for shape in shapes:
            sizes = [self.roles.at(s, self.roles.primes) for s in shape]
            values.append(_fake(item.example, sizes))
        return values

    def _symint(self, node: Node, source: str) -> list[int]:
        captured = compat.size_hint(node.meta["example_value"])
        if _SIZE.search(source):
            sizes = self._candidates(captured, ("B", "L"))
            return [self.roles.at(s, self.roles.primes) for s in sizes]
        # An int that the caller passes may be another one at the next call: never read it as B or
        # L.
        prime = self.ints.get(node)
        if prime not in self.roles.primes.values():
            self._symbol(captured, prime)
        return [prime]

    def _symbol(self, captured: int, prime: int | None = None) -> str:
        symbol = f"K{sum(s.startswith('K') for s in self.roles.primes)}"
        prime = prime or next(self.spare, None)
        if prime is None:
            raise Refused("the graph cuts the sequence in too many ways")
        self.roles.primes[symbol] = prime
        self.roles.captured[symbol] = captured
        return symbol

    def _candidates(self, literal: int, first: tuple[str, ...]) -> list[Size]:
        """The readings of a literal, the likeliest first."""
        roles = self.roles
        order = [s for s in first if s in roles.primes]
        order += [s for s in roles.primes if s not in order]
        found = [Size(1, (s,)) for s in order if roles.captured[s] == literal]
        if "B" in roles.primes:
            found += [
                Size(1, ("B", s))
                for s in order
                if s != "B" and roles.captured["B"] * roles.captured[s] == literal
            ]
        found.append(Size(literal))
        for symbols in (("B",), ("L",), ("B", "L")):  # a merge such as B * heads
            if all(s in roles.primes for s in symbols):
                one = math.prod(roles.captured[s] for s in symbols)
                if literal > one > 1 and literal % one == 0:
                    found.append(Size(literal // one, symbols))
        return found

    def _either(self, size: Size) -> list[Size]:
        """The symbols that the SymInt of one may stand for: Dynamo has one for equal sizes."""
        if size.coefficient != 1 or len(size.symbols) != 1:
            return [size]
        captured = self.roles.captured
        others = [s for s in self.roles.primes if captured[s] == captured[size.symbols[0]]]
        return list(dict.fromkeys([size, *(Size(1, (s,)) for s in others)]))

    def _literals(self, node: Node, first: tuple[str, ...]) -> list[_Reading]:
        """Readings of a node whose ints are sizes; ints from SymInts are read by their value."""
        slots: list[list[Size]] = []

        def visit(arg: Any) -> None:
            if isinstance(arg, Node):
                arg = self.capture.resolve(arg)
                value = self.roles.values.get(arg) if isinstance(arg, Node) else None
                slots.extend(self._either(self.roles.size(s)) for s in as_sizes(value))
            elif type(arg) is int:
                slots.append(self._candidates(arg, first))
            elif isinstance(arg, (tuple, list)):
                for item in arg:
                    visit(item)

        sized_kwargs = {
            k: v for k, v in node.kwargs.items() if k in ("size", "sizes", "shape", "end")
        }
        low = _BEFORE_SIZES.get(node.target, int(node.op == "call_method"))
        high = low + 1 if node.target in _ONE_ARGUMENT else len(node.args)
        visit(node.args[low:high])
        visit(list(sized_kwargs.values()))
        return [
            _Reading(node.args[:low] + args + node.args[high:], {**node.kwargs, **kwargs})
            for args, kwargs in (
                self._fill((node.args[low:high], sized_kwargs), shape)
                for shape in _fewest_repeats(slots)
            )
        ]

    def _fill(self, args: Any, sizes: tuple[Size, ...]) -> Any:
        left = iter(sizes)

        def fill(arg: Any) -> Any:
            if isinstance(arg, Node):
                value = self.roles.values.get(self.capture.resolve(arg))
                sizes = tuple(next(left) for _ in as_sizes(value))
                return arg if not sizes else sizes[0] if type(value) is int else sizes
            if type(arg) is int:
                return next(left)
            if isinstance(arg, dict):
                return {k: fill(v) for k, v in arg.items()}
            if isinstance(arg, (tuple, list)):
                return tuple(fill(a) for a in arg)
            return arg

        return fill(args)

    def _getitem(self, node: Node) -> list[_Reading]:
        """Slices along the sequence make a new symbol; a table cut to L rows is read as such."""
        plain = _Reading(node.args, node.kwargs)
        base = self._values(node.args[0])
        index = node.args[1]
        if not isinstance(base, torch.Tensor):
            return [plain]
        index = index if isinstance(index, tuple) else (index,)
        dims = index_dims(index, base.dim())
        if dims is None:
            return [plain]
        for item, dim in zip(index, dims, strict=True):
            if not isinstance(item, slice) or item.step not in (None, 1):
                continue
            size = self.roles.size(base.shape[dim])
            if size.coefficient == 1 and len(size.symbols) == 1 and size.symbols[0] != "B":
                cut = self._slice(item, size.symbols[0])
                if cut is not None:
                    reading = _Reading(node.args, node.kwargs, cut=(dim, cut))
                    literal = not any(isinstance(e, Node) for e in (item.start, item.stop))
                    return [reading, plain] if literal else [reading]
            elif not size.symbols and item.start in (None, 0) and item.stop is not None:
                stop = self._values(item.stop)
                line = Size(1, ("L",))
                if isinstance(item.stop, Node) and line in self._either(self.roles.size(stop)):
                    return [_Reading(node.args, node.kwargs, table=dim)]
                if type(item.stop) is int and item.stop == self.capture.columns:
                    return [plain, _Reading(node.args, node.kwargs, table=dim)]
        return [plain]

    def _slice(self, item: slice, parent: str) -> Slice | None:
        """The sequence symbol of a slice of `parent`; None where the slice is all of it."""
        roles = self.roles
        ends = [self._values(e) for e in (item.start, item.stop)]
        hints = [
            compat.size_hint(e.meta["example_value"]) if isinstance(e, Node) else e
            for e in (item.start, item.stop)
        ]
        start, stop, _ = slice(*ends).indices(roles.primes[parent])
        low, high, _ = slice(*hints).indices(roles.captured[parent])
        by_symint = any(isinstance(e, Node) for e in (item.start, item.stop))
        if (start, stop) == (0, roles.primes[parent]):
            tied = isinstance(item.start, Node) and ends[0] == -stop  # ``-L:``, by a tied int
            return Slice(parent, parent, None, None) if tied else None
        if (low, high) == (0, roles.captured[parent]) and not by_symint:
            return Slice(parent, parent, None, None)
        key = (parent, start, stop)
        if key not in self.cuts:
            symbol = self._line(max(stop - start, 0), max(high - low, 0), parent)
            ends = [None if e is None else n for e, n in zip((item.start, item.stop), ends, strict=True)]
            text = "[{}:{}]".format(*("" if e is None else e for e in ends))
            self.cuts[key] = Slice(symbol, parent, item.start, item.stop, text)
        return self.cuts[key]

    def _line(self, length: int, captured: int, parent: str) -> str:
        """The symbol for a length of slices: that of a known one, by its value in the re-run (an int
        that the caller passes) or at capture (``ids[:, 1:]`` and ``logits[:, :-1]``)."""
        roles = self.roles
        symbol = {v: k for k, v in roles.primes.items()}.get(length)
        others = (s for s in roles.primes if s not in ("B", "L", parent))
        same = (s for s in others if roles.captured[s] == captured)
        symbol = symbol or next(same, None) or self._symbol(captured)
        # A length that is the same number in the re-run, as of ``-1024:``, is read as any number is.
        if length > 1000 and length not in (captured, roles.primes[symbol]):
            roles.lengths[length] = symbol
        roles.captured[symbol] = captured  # of ``-K:`` with K = 0 all columns, where K itself is 0
        roles.lines.add(symbol)
        return symbol


def is_callers_int(item: Input) -> bool:
    """Whether an input is an int that the caller passes, not the size of a tensor."""
    return item.kind == "size" and not _SIZE.search(item.source)


def index_dims(index: tuple, rank: int) -> list[int | None] | None:
    """The dimension that each item of an index refers to (None for new axes); None if it has
    tensors."""
    if any(isinstance(i, (Node, torch.Tensor, list)) for i in index):
        return None
    used = sum(i is not None and i is not Ellipsis for i in index)
    dims: list[int | None] = []
    dim = 0
    for item in index:
        if item is None:
            dims.append(None)
        elif item is Ellipsis:
            dims.append(None)
            dim += rank - used
        else:
            dims.append(dim)
            dim += 1
    return dims


def cut_table(args: tuple, dim: int, length: int | None) -> torch.Tensor:
    """``args[0][args[1]]``, with the slice at `dim` replaced by the first `length` entries (or
    all)."""
    base, index = args
    index = index if isinstance(index, tuple) else (index,)
    dims = index_dims(index, base.dim())
    assert dims is not None
    return base[tuple(slice(length) if d == dim else i for i, d in zip(index, dims, strict=True))]


def _precheck(roles: Roles, method: str, tensor: torch.Tensor, sizes: tuple) -> None:
    """Reject a wrong reading of the commonest methods sooner than the operation would.

    A view keeps the order of the symbols and the count of plain entries between them: one that
    would turn [B, L, 4] into [B, 4, L] reads the data in another order than the captured one.
    """
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if not all(type(s) is int for s in sizes):
        return
    if method == "expand":
        old = (1,) * (len(sizes) - tensor.dim()) + tuple(tensor.shape)
        good = all(s in (-1, o) or o == 1 for s, o in zip(sizes, old, strict=True))
    else:
        rest, numel = math.prod(s for s in sizes if s != -1), math.prod(tensor.shape)
        good = numel % rest == 0 if -1 in sizes and rest else numel == rest
        if good and numel:
            whole = [numel // rest if s == -1 else s for s in sizes]
            good = _profile(roles, tensor.shape) == _profile(roles, whole)
    if not good:
        raise ValueError(f"{method}{sizes} of {tuple(tensor.shape)}")


def _precheck_rows(roles: Roles, base: Any, index: Any) -> None:
    """Reject rows looked up by their columns' numbers, ``mask[arange(L)[:, None], ...]``: where B = L at
    capture, the next operations would take it, and far behind it is too late to try all else."""
    first = index[0] if isinstance(index, tuple) and index else index
    if not (isinstance(base, torch.Tensor) and isinstance(first, torch.Tensor)) or base.dim() == 0:
        return
    rows, entries = (roles.size(n).symbols for n in (base.shape[0], first.numel()))
    if rows == ("B",) and "L" in entries and "B" not in entries:
        raise ValueError(f"{tuple(first.shape)} entries of {base.shape[0]} rows")


def _profile(roles: Roles, shape: Any) -> list[Any]:
    """The symbols in order, and between them the product of the plain sizes."""
    profile: list[Any] = [1]
    for size in map(roles.size, shape):
        if len(size.symbols) > 1:
            merged = (
                tuple(sorted(size.symbols, key=["B", "L"].index))
                if set(size.symbols) <= {"B", "L"}
                else size.symbols
            )
            for symbol in merged:
                profile += [symbol, 1]
        elif size.symbols:
            # Of "symbol * plain" in one dimension the order is not known; assume the symbol first.
            profile += [size.symbols[0], 1]
        profile[-1] *= size.coefficient
    return profile


def _fewest_repeats(slots: list[list[Size]]) -> list[tuple[Size, ...]]:
    """All combinations, those that use a symbol twice last, else in the given order."""

    def repeats(sizes: tuple[Size, ...]) -> int:
        symbols = [s for size in sizes for s in size.symbols]
        return len(symbols) - len(set(symbols))

    combinations = itertools.islice(itertools.product(*slots), 4096)
    return sorted(combinations, key=repeats)


def _fake(tensor: torch.Tensor, sizes: list[int] | None = None) -> Any:
    """A maker of a fake tensor like `tensor`, with other `sizes`."""
    shape = [compat.size_hint(s) for s in tensor.shape] if sizes is None else sizes
    dtype, device = tensor.dtype, tensor.device
    if sizes is None and not tensor.is_contiguous():
        strides = [compat.size_hint(s) for s in tensor.stride()]
        return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return lambda: torch.empty(shape, dtype=dtype, device=device)


def map_sizes(args: Any, fn: Callable[[Size], int]) -> Any:
    """Replace every `Size` in nested arguments."""
    if isinstance(args, Size):
        return fn(args)
    if type(args) in (tuple, list):
        return type(args)(map_sizes(a, fn) for a in args)
    if isinstance(args, dict):
        return {k: map_sizes(v, fn) for k, v in args.items()}
    return args


def as_sizes(value: Any) -> tuple[int, ...]:
    """The ints of an int or of a shape; nothing for anything else."""
    if type(value) is int:
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(type(v) is int for v in value):
        return tuple(value)
    return ()


def is_number(value: Any) -> bool:
    """Whether a node's value is a size, a shape or a scalar, which the flat graph has as a
    constant."""
    if isinstance(value, (tuple, list)):
        return all(is_number(v) for v in value)
    return isinstance(value, (bool, int, float, torch.dtype, torch.device))


def _map_nodes(arg: Any, fn: Callable[[Node], Any]) -> Any:
    return map_arg(arg, fn)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return []


def _sizes(value: Any) -> set[int]:
    return {compat.size_hint(s) for t in tensors(value) for s in t.shape}
