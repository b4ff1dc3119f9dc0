"""The plan of one batch: where each real token of a padded ``[B, L]`` batch is stored in one row.

Every layout is a forest whose tokens are stored in depth-first order::

    rows        varlen (chains)          prefix (each distinct prefix once)
    a b c       a b c | a b d | a e      a -- b -- c          stored   a b c d e
    a b d                                |    `-- d           depth    0 1 2 2 1
    a e                                  `-- e                end      5 4 3 4 5

``end[t]`` is one past the last descendant of ``t``, so a token may see exactly its own path:
``keep(q, kv) = kv <= q and q < end[kv]``. ``depth[t]`` counts the tokens before ``t`` in its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUTS = ("varlen", "prefix")
#: Integers by their size in bytes, to view floats as: what is shared must be equal bit for bit.
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class Read:
    """The stored tokens that a range of columns reads; a shared one is read once."""

    index: Tensor  # [S_pad] int64, stored tokens in order; what fills up S_pad repeats token 0
    slot: Tensor  # [B, n] int64, place in `index` of each real position; -1 where there is none
    tokens: int  # S


@dataclass(frozen=True, eq=False)
class Plan:
    """Index tensors of one batch, all on the device of its mask. ``T_pad`` is ``length``."""

    layout: str  # "varlen" or "prefix"
    rows: int  # B
    columns: int  # L
    real_tokens: int  # how many positions of the mask are True
    run_tokens: int  # T, how many tokens are stored
    length: int  # T_pad: T rounded up to whole blocks, at least two (compilers specialise on 1)
    longest: int  # real tokens of the longest row, the largest depth + 1
    source: Tensor  # [T_pad] int64, b * L + l that each stored token is copied from; pads: 0
    depth: Tensor  # [T_pad] int64, tokens before it in its row; pads: 0
    end: Tensor  # [T_pad] int64, one past its last descendant; pads: their own index + 1
    slot: Tensor  # [B, L] int64, stored token of each real position; -1 where there is none
    starts: Tensor  # [B + 1] int64, first stored token that each row adds, rows as stored; then T
    order: Tensor  # [B] int64, the rows as stored: siblings side by side
    added: Tensor  # [B] int64, how many tokens each row adds, rows as stored
    reads: tuple[Read, ...] = ()  # one for each range of columns that was asked for
    flags: tuple[int, ...] = ()  # the values of the scalars that were passed along
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def remember(self, key: Any, build: Callable[[], Any]) -> Any:
        """``build()``, evaluated once per plan and key. Its tensors may be saved for backward."""
        if key not in self._memo:
            with torch.inference_mode(False), torch.no_grad():
                self._memo[key] = build()
        return self._memo[key]

    @property
    def cu_seqlens(self) -> Tensor:
        """``[B + 2]`` int32 bounds of the chains: the rows in order (an empty row has length 0),
        then the pads as one last chain, so that every stored token belongs to exactly one.

        Raises ValueError for layout "prefix", whose tokens are no chains.
        """
        if self.layout != "varlen":
            raise ValueError(f"cu_seqlens describe chains; this plan has layout {self.layout!r}")

        def bounds() -> Tensor:
            return F.pad(self.starts, (0, 1), value=self.length).int()

        return self.remember("cu_seqlens", bounds)

    def segments(self) -> Tensor:
        """The maximal unbranched runs of the forest, for kernels that walk it on the host.

        ``[2 + 3 * N]`` int64 on the CPU: ``N, T``, then ``start, stop, parent`` of each run in
        stored order; ``parent`` is a run's number, -1 at a root. One host synchronisation.
        """
        return self.remember("segments", self._segments)

    def _segments(self) -> Tensor:
        end, depth = self.end[: self.run_tokens], self.depth[: self.run_tokens]
        # A token continues the run of the one before it if it is that token's only child.
        only_child = (depth[1:] == depth[:-1] + 1) & (end[1:] == end[:-1])
        first = F.pad(~only_child, (1, 0), value=True)[: self.run_tokens].nonzero().squeeze(1)
        starts, ends = torch.stack((first, end[first])).tolist()
        structure, open_runs = [len(starts), self.run_tokens], []
        for run, start in enumerate(starts):
            while open_runs and ends[open_runs[-1]] <= start:
                open_runs.pop()
            stop = starts[run + 1] if run + 1 < len(starts) else self.run_tokens
            structure += [start, stop, open_runs[-1] if open_runs else -1]
            open_runs.append(run)
        return torch.tensor(structure, dtype=torch.int64)


def make_plan(
    mask: Tensor,
    keys: Sequence[Tensor] = (),
    *,
    layout: str,
    block: int = 128,
    min_sharing: float = 1.0,
    reads: Sequence[tuple[int, int]] = (),
    flags: Sequence[Tensor] = (),
) -> Plan:
    """The plan of a batch whose real tokens are where ``mask`` (``[B, L]`` bool) is True.

    ``keys`` say when two tokens are the same: every key must agree at them and at every token
    before them in their rows. A key is ``[B, L]``, or ``[B, L, H]`` compared as a vector; floats
    are compared bit for bit. Layout "varlen" stores every row by itself and ignores the keys;
    "auto" is "prefix" where that stores at least ``min_sharing`` times fewer tokens. ``reads`` are
    ranges of columns ``[low, high)`` whose stored tokens are wanted; ``flags`` are scalar tensors
    whose values are wanted on the host as well.

    Runs on the mask's device in O(B * L) memory (O(B * L * H) with vectors) with one host
    synchronisation. Raises ValueError for an unknown layout, a mask that is not a non-empty
    ``[B, L]`` bool, keys of another shape, or layout "prefix" or "auto" without keys.
    """
    if layout not in (*LAYOUTS, "auto"):
        raise ValueError(f"unknown layout {layout!r}: expected one of {', '.join(LAYOUTS)}, auto")
    if mask.dim() != 2 or mask.dtype != torch.bool or mask.numel() == 0:
        got = f"{mask.dtype} {list(mask.shape)}"
        raise ValueError(f"expected a non-empty [B, L] bool mask, got {got}")
    if layout != "varlen" and not keys:
        raise ValueError(f"layout {layout!r} needs at least one key to compare tokens by")
    for key in keys:
        if key.dim() not in (2, 3) or key.shape[:2] != mask.shape:
            raise ValueError(f"key of shape {list(key.shape)} for a mask of {list(mask.shape)}")
    with torch.inference_mode(False), torch.no_grad():
        return _plan(mask, keys if layout != "varlen" else (), layout, block, min_sharing, reads, flags)


def _plan(
    mask: Tensor,
    keys: Sequence[Tensor],
    layout: str,
    block: int,
    min_sharing: float,
    reads: Sequence[tuple[int, int]],
    flags: Sequence[Tensor],
) -> Plan:
    # A plan costs its launches on a GPU, hardly the work in them. So each step is as few operations
    # as it can be, and a sorted tensor is searched (`searchsorted`, `cummax`) instead of rebuilt.
    rows, columns = mask.shape
    group, depths = _packing(rows, columns) if keys else (1, columns)
    # Every range of numbers is a slice of this one. Depth -1 is that of no token.
    numbers = torch.arange(-1, max(mask.numel(), depths), device=mask.device)
    depth, position = numbers[: depths + 1, None], numbers[1 : mask.numel() + 1]

    # Compact: number[b, l] is 1 + the depth of a real token, 0 where there is none; place[d, b] is
    # the position b * L + l at which row b holds its token of depth d.
    count = mask.cumsum(1)
    number, size = count * mask, count[:, -1]
    place = numbers.new_zeros(depths + 1, rows)
    place = place.scatter_(0, number.T, position.view(rows, columns).T)[1:]

    def chains() -> _Forest:
        return _Forest(torch.arange(rows, device=mask.device), size, place, numbers)

    if keys:
        codes = _codes(keys, place).masked_fill_(depth[1:] >= size, rows)
        forest = _Forest(_lexicographic(codes, group), size, place, numbers, codes)
    else:
        forest = chains()

    def ranks_of(slot: Tensor) -> list[Tensor]:
        return [_ranks(slot[:, low:high], mask.numel()) for low, high in reads]

    slot = forest.slots(number)
    ranks = ranks_of(slot)
    counts = [size, forest.starts[-1:], *(r[-2:-1] for r in ranks)]
    if layout == "auto":  # what would be read, were nothing shared
        counts += [mask[:, low:high].sum().view(1) for low, high in reads]
    values = iter(torch.cat([*counts, *(f.view(1) for f in flags)]).tolist())
    sizes, total = list(islice(values, rows)), next(values)
    tokens, real = list(islice(values, len(reads))), sum(sizes)
    if layout == "auto":
        apart = list(islice(values, len(reads)))
        layout = "prefix" if total < real and real >= min_sharing * total else "varlen"
        if layout == "varlen" and total < real:
            forest, total, tokens = chains(), real, apart
            slot = forest.slots(number)
            ranks = ranks_of(slot)
    length = max(-(-total // block), 2) * block
    source, at_depth, end = forest.tokens(total, length)

    return Plan(
        layout=layout,
        rows=rows,
        columns=columns,
        real_tokens=real,
        run_tokens=total,
        length=length,
        longest=max(sizes),
        source=source,
        depth=at_depth,
        end=end,
        slot=slot,
        starts=forest.starts,
        order=forest.order,
        added=forest.added,
        reads=tuple(
            _read(slot[:, low:high], ranked, position[:how_many])
            for (low, high), ranked, how_many in zip(reads, ranks, tokens, strict=True)
        ),
        flags=tuple(values),
    )


class _Forest:
    """Rows in an order, each storing what it does not share with the one before it.

    Two rows share the prefix in which their ``codes`` are equal; nothing if None. ``place`` and
    ``codes`` are ``[depths, B]``, in the order of the batch; ``numbers`` are -1, 0, 1, ...
    """

    def __init__(
        self, order: Tensor, size: Tensor, place: Tensor, numbers: Tensor, codes: Tensor | None = None
    ) -> None:
        self.order, self.numbers = order, numbers
        self.depth = numbers[: len(place) + 1, None]
        self.place = place.index_select(1, order)
        size = size.index_select(0, order)
        self.starts, shared = size.new_zeros(2, len(order) + 1).unbind()
        shared = shared[:-1]  # of each row, with the one before it
        if codes is not None:
            # The first depth that is not equal, or all of the row: counted on the tokens themselves,
            # so that no order can make a plan wrong.
            codes = codes.index_select(1, order)
            equal = codes[:, 1:] == codes[:, :-1]
            torch.amin(torch.where(equal, size[1:], self.depth[1:]), 0, out=shared[1:])
        self.added = size - shared
        torch.cumsum(self.added, 0, out=self.starts[1:])
        self.base = self.starts[1:] - size  # where a row's depth 0 would be, were it all there
        # tree[1 + d, r] is the token that stores depth d of row r. Of the rows up to r, the last that
        # starts no deeper has it. Bases never fall from row to row, so it is the largest so far; at
        # depth -1 that is -1, which says that there is none.
        self.tree = torch.addcmul(self.depth, self.base, self.depth >= shared).cummax(1).values

    def slots(self, number: Tensor) -> Tensor:
        """``[B, L]``: the stored token of each real position, -1 where there is none."""
        inverse = torch.empty_like(self.order)
        inverse.scatter_(0, self.order, self.numbers[1 : len(self.order) + 1])
        return self.tree[number, inverse[:, None]]

    def tokens(self, total: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """``source, depth, end`` of each stored token, and of the pads behind them."""
        # Tensors of their own: Dynamo would trace a view together with its base.
        end = torch.arange(1, length + 1, device=self.numbers.device)
        source, depth = torch.zeros_like(end), torch.zeros_like(end)
        token = self.numbers[1 : total + 1]
        row = torch.searchsorted(self.starts[1:], token, right=True)
        torch.sub(token, self.base.take(row), out=depth[:total])
        at = torch.add(row, depth[:total], alpha=len(self.order))
        torch.take(self.place, at, out=source[:total])
        # A subtree ends where the next row starts that has another token at that depth.
        tree = self.tree[1:]
        next_row = torch.searchsorted(tree, tree, right=True)
        torch.take(self.starts, next_row.take(at), out=end[:total])
        return source, depth, end


def _ranks(slot: Tensor, most: int) -> Tensor:
    """``[most + 2]``: how many stored tokens before each occur in ``slot``; the last is for -1."""
    occurs = slot.new_zeros(most + 2)
    occurs[1:].index_fill_(0, slot.flatten(), 1)
    return occurs.cumsum(0)


def _read(slot: Tensor, ranks: Tensor, tokens: Tensor) -> Read:
    # Whole sixteens, at least two of them: sizes that vary little, and none that is specialised.
    index = slot.new_zeros(max(-(-len(tokens) // 16), 2) * 16)
    torch.searchsorted(ranks[1:-1], tokens, right=True, out=index[: len(tokens)])
    ranks[-1:].fill_(-1)  # assigned to one element, a number would be copied from the host
    return Read(index, ranks.take(slot), len(tokens))


def _codes(keys: Sequence[Tensor], place: Tensor) -> Tensor:
    """``[depths, B]`` int64 in ``0..B-1``: at each depth, equal only where all keys are."""
    rows, codes = place.shape[1], None
    for key in keys:
        if key.dim() == 3 or key.is_floating_point():
            key = _vector_codes(key.reshape(*key.shape[:2], -1))
        values = _rank(key.take(place))
        codes = values if codes is None else _rank(torch.add(values, codes, alpha=rows))
    return codes


def _packing(rows: int, columns: int) -> tuple[int, int]:
    """``group, depths`` for `_lexicographic`: how many columns each of its rounds packs, the fewest
    that need no more rounds than the most would, and how many columns make every round come out even.
    """
    most = int(63 // math.log2(rows + 1))  # codes that fit into an int64, 10 for 64 rows
    rounds, group = 1, 1
    while most**rounds < columns:
        rounds += 1
    while group**rounds < columns:
        group += 1
    whole = group ** (rounds - 1)
    return group, -(-columns // whole) * whole


def _lexicographic(codes: Tensor, group: int) -> Tensor:
    """The stable order ``[B]`` of the rows by their columns of ``codes`` (``[depths, B]`` in 0..B).

    Each round packs ``group`` neighbouring columns into an int64 and ranks the results again:
    exact, and done after log(L) rounds.
    """
    rows, most = codes.shape[1], codes.numel()
    exponents = torch.arange(group - 1, -1, -1, device=codes.device)
    weights = torch.pow(rows + 1, exponents)[:, None]
    while len(codes) > group:
        codes = _rank((codes.view(-1, group, rows) * weights).sum(1), most)
    return (codes * weights[-len(codes) :]).sum(0).argsort(stable=True)


def _rank(values: Tensor, most: int = 0) -> Tensor:
    """``[C, B]``: how many values of the same row are smaller, so equal only where they are.

    Where there are no more than ``most`` pairs, all are compared, which is fewer launches.
    """
    if values.numel() * values.shape[1] <= most:
        return (values[:, :, None] > values[:, None]).sum(2)
    return torch.searchsorted(values.sort(1).values, values)


def _vector_codes(vectors: Tensor) -> Tensor:
    """``[B, L]`` int64, equal only where the vectors of ``[B, L, H]`` are equal bit for bit.

    A linear hash brings equal vectors together; the comparison of neighbours decides. A collision
    could at worst give one vector two codes, which stores a token twice and is still exact.
    """
    vectors = vectors.contiguous()
    width, offset = vectors.shape[-1], vectors.storage_offset()
    # View the bits as the widest integers that fit the vectors and their place in memory.
    unit = math.gcd(8, width * vectors.element_size(), offset * vectors.element_size())
    bits = vectors.flatten(0, 1).view(INTEGERS[unit])
    generator = torch.Generator(vectors.device).manual_seed(0)  # the global one stays untouched
    factors = torch.randint(2**62, bits.shape[1:], generator=generator, device=vectors.device)
    order = (bits * (2 * factors + 1)).sum(1).argsort()
    ordered = bits[order]
    steps = F.pad((ordered[1:] != ordered[:-1]).any(1), (1, 0))
    codes = torch.empty_like(order).scatter_(0, order, steps.cumsum(0))
    return codes.unflatten(0, vectors.shape[:2])
