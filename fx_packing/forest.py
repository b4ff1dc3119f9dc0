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
    row = torch.arange(rows, device=mask.device)
    depth = torch.arange(-1, columns, device=mask.device)[:, None]  # -1 is that of no token

    # Compact: number[b, l] is 1 + the depth of a real token, 0 where there is none; column[d, b] is
    # where row b holds its token of depth d.
    count = mask.cumsum(1)
    number, size = count * mask, count[:, -1]
    column = depth.new_zeros(columns + 1, rows)
    column = column.scatter_(0, number.T, depth[1:].expand(-1, rows))[1:]

    # Sort the rows; `shared` is the length of the prefix that each has in common with the one
    # before it. It is counted on the tokens themselves, so that no order can make a plan wrong.
    if keys:
        codes = _codes(keys, column, size)
        order = _lexicographic(codes)
        codes = codes.index_select(1, order)
        equal = codes[:, 1:] == codes[:, :-1]
        common = torch.add(depth[1:], equal, alpha=columns).amin(0)  # the first depth not equal
        forest = _Forest(order, size, row, depth, common)
    else:
        forest = _Forest(row, size, row, depth)

    def ranks_of(slot: Tensor) -> list[Tensor]:
        return [_ranks(slot[:, low:high], mask.numel()) for low, high in reads]

    slot = forest.slots(number)
    ranks = ranks_of(slot)
    counts = [size, forest.starts[-1:], *(r[-2:-1] for r in ranks)]
    counts += [mask[:, low:high].sum().view(1) for low, high in reads]
    numbers = iter(torch.cat([*counts, *(f.view(1) for f in flags)]).tolist())
    sizes, total = list(islice(numbers, rows)), next(numbers)
    tokens, apart = (list(islice(numbers, len(reads))) for _ in range(2))
    real = sum(sizes)
    if layout == "auto":
        layout = "prefix" if total < real and real >= min_sharing * total else "varlen"
        if layout == "varlen" and total < real:
            forest, total, tokens = _Forest(row, size, row, depth), real, apart
            slot = forest.slots(number)
            ranks = ranks_of(slot)
    length = max(-(-total // block), 2) * block
    source, at_depth, end = forest.tokens(total, length, column)

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
            _read(slot[:, low:high], ranked, how_many)
            for (low, high), ranked, how_many in zip(reads, ranks, tokens, strict=True)
        ),
        flags=tuple(numbers),
    )


class _Forest:
    """Rows in an order, each storing what it does not share with the one before it.

    ``common`` says how many tokens neighbours have in common (``[B - 1]``; nothing if None).
    """

    def __init__(
        self, order: Tensor, size: Tensor, row: Tensor, depth: Tensor, common: Tensor | None = None
    ) -> None:
        self.order, self.row, self.depth = order, row, depth
        size, shared = size[order], torch.zeros_like(size)
        if common is not None:
            torch.minimum(common, size[1:], out=shared[1:])
        self.added = size - shared
        self.starts = size.new_zeros(len(row) + 1)
        torch.cumsum(self.added, 0, out=self.starts[1:])
        self.base = self.starts[:-1] - shared  # where a row's depth 0 would be, were it all there
        # owner[1 + d, r]: of the rows up to r, the last that starts no deeper than d stores depth d
        # of row r. At depth -1 that is row 0, whose slot -1 says that there is none.
        self.owner = (row * (depth >= shared)).cummax(1).values

    def slots(self, number: Tensor) -> Tensor:
        """``[B, L]``: the stored token of each real position, -1 where there is none."""
        slots = self.base.take(self.owner) + self.depth
        inverse = torch.empty_like(self.order).scatter_(0, self.order, self.row)
        return slots[number, inverse[:, None]]

    def tokens(self, total: int, length: int, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``source, depth, end`` of each stored token, and of the pads behind them."""
        columns, rows = column.shape
        # Tensors of their own: Dynamo would trace a view together with its base.
        token = torch.arange(length, device=column.device)
        source, depth, end = torch.zeros_like(token), torch.zeros_like(token), token + 1
        # A subtree ends where the next row starts that has another owner at that depth.
        next_row = torch.searchsorted(self.owner[1:], self.row.repeat(columns, 1), right=True)
        row = torch.searchsorted(self.starts[1:], token[:total], right=True)
        captured = self.order.take(row)
        at = torch.sub(token[:total], self.base.take(row), out=depth[:total])
        torch.take(self.starts, next_row.take(torch.add(row, at, alpha=rows)), out=end[:total])
        place = column.take(torch.add(captured, at, alpha=rows))
        torch.add(place, captured, alpha=columns, out=source[:total])
        return source, depth, end


def _ranks(slot: Tensor, most: int) -> Tensor:
    """``[most + 1]``: how many stored tokens up to each occur in ``slot``; the last is for -1."""
    occurs = slot.new_zeros(most + 1).index_fill_(0, slot.flatten(), 1)
    return occurs.cumsum(0)


def _read(slot: Tensor, ranks: Tensor, tokens: int) -> Read:
    # Whole sixteens, at least two of them: sizes that vary little, and none that is specialised.
    index = slot.new_zeros(max(-(-tokens // 16), 2) * 16)
    wanted = torch.arange(1, tokens + 1, device=slot.device)
    torch.searchsorted(ranks[:-1], wanted, out=index[:tokens])
    ranks[-1] = 0
    return Read(index, ranks.take(slot) - 1, tokens)


def _codes(keys: Sequence[Tensor], column: Tensor, size: Tensor) -> Tensor:
    """``[L, B]`` int64 in ``0..B``: at each depth, equal where all keys are; B past a row's end."""
    columns, rows = column.shape
    codes = None
    for key in keys:
        if key.dim() == 3 or key.is_floating_point():
            key = _vector_codes(key.reshape(rows, columns, -1))
        values = _rank(key.T.gather(0, column))
        codes = values if codes is None else _rank(codes * rows + values)
    depth = torch.arange(columns, device=column.device)[:, None]
    return codes.masked_fill_(depth >= size, rows)


def _lexicographic(codes: Tensor) -> Tensor:
    """The stable order ``[B]`` of the rows by their columns of ``codes`` (``[L, B]`` in 0..B).

    Each round packs as many neighbouring columns as fit into an int64 and ranks the results
    again: exact, and done after log(L) rounds to the base ``group`` (10 for 64 rows).
    """
    base, group = codes.shape[1] + 1, 2
    while base ** (group + 1) <= 2**63:
        group += 1
    weights = torch.pow(base, torch.arange(group - 1, -1, -1, device=codes.device))[:, None]
    while True:
        if missing := -len(codes) % group:
            codes = torch.cat((codes, codes.new_zeros(missing, codes.shape[1])))
        packed = (codes.unflatten(0, (-1, group)) * weights).sum(1)
        if len(packed) == 1:
            return packed[0].argsort(stable=True)
        codes = _rank(packed)


def _rank(values: Tensor) -> Tensor:
    """``[C, B]``: how many values of the same row are smaller, so equal only where they are."""
    return torch.searchsorted(values.sort(1).values, values)


def _vector_codes(vectors: Tensor) -> Tensor:
    """``[B, L]`` int64, equal only where the vectors of ``[B, L, H]`` are equal bit for bit.

    A linear hash brings equal vectors together; the comparison of neighbours decides. A collision
    could at worst give one vector two codes, which stores a token twice and is still exact.
    """
    vectors = vectors.contiguous()
    width, offset = vectors.shape[-1], vectors.storage_offset()
    # View the bits as the widest integers that fit the vectors and their place in memory.
    views = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    unit = math.gcd(8, width * vectors.element_size(), offset * vectors.element_size())
    bits = vectors.flatten(0, 1).view(views[unit])
    generator = torch.Generator(vectors.device).manual_seed(0)  # the global one stays untouched
    factors = torch.randint(2**62, bits.shape[1:], generator=generator, device=vectors.device)
    order = (bits * (2 * factors + 1)).sum(1).argsort()
    ordered = bits[order]
    steps = F.pad((ordered[1:] != ordered[:-1]).any(1), (1, 0))
    codes = torch.empty_like(order).scatter_(0, order, steps.cumsum(0))
    return codes.unflatten(0, vectors.shape[:2])
