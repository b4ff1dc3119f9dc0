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
    rows, columns = mask.shape
    depth = torch.arange(columns, device=mask.device)
    row = torch.arange(rows, device=mask.device)

    # Compact: column[b, d] is where row b holds its d-th real token. (Launches are what a plan
    # costs on a GPU: arithmetic with a mask takes one where `where` with a number takes three.)
    unreal = ~mask
    place = mask.cumsum(1) - 1
    size = place[:, -1] + 1
    column = depth.new_zeros(rows, columns + 1)
    column.scatter_(1, place.masked_fill(unreal, columns), depth.expand(rows, -1))
    column = column[:, :columns]

    # Sort the rows; `shared` is the length of the prefix that each has in common with the one
    # before it. It is counted on the tokens themselves, so that no order can make a plan wrong.
    order, shared = row, torch.zeros_like(size)
    if keys:
        codes = _codes(keys, column, size)
        order = _lexicographic(codes)
        codes = codes[:, order]
        equal = codes[:, 1:] == codes[:, :-1]
        common = (equal * columns + depth[:, None]).amin(0)
        torch.minimum(common, size[order][1:], out=shared[1:])

    def slots_of(order: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
        # [depth, row] in sorted order. Row r stores its tokens from depth `shared` on; a token
        # above that is owned by the last row <= r that starts no deeper.
        starts = size.new_zeros(rows + 1)
        torch.cumsum(size[order] - shared, 0, out=starts[1:])
        fresh = depth[:, None] >= shared
        owner = (row * fresh).cummax(1).values
        slots = (starts[:-1] - shared)[owner] + depth[:, None]
        inverse = torch.empty_like(order).scatter_(0, order, row)
        slot = slots[place, inverse[:, None]].masked_fill_(unreal, -1)
        return starts, fresh, slots, slot

    starts, fresh, slots, slot = slots_of(order, shared)
    marks = [_marks(slot[:, low:high], mask.numel()) for low, high in reads]
    counts = [starts[-1], size.sum(), size.amax(), *(m.sum() for m in marks)]
    counts += [mask[:, low:high].sum() for low, high in reads] + [f.long() for f in flags]
    total, real, longest, *rest = torch.stack(counts).tolist()
    sizes, flag_values = rest[: len(reads)], rest[2 * len(reads) :]
    if layout == "auto":
        layout = "prefix" if total < real and real >= min_sharing * total else "varlen"
        if layout == "varlen" and total < real:
            order, shared, total, sizes = row, torch.zeros_like(size), real, rest[len(reads) :]
            starts, fresh, slots, slot = slots_of(order, shared)
            marks = [_marks(slot[:, low:high], mask.numel()) for low, high in reads]
    length = max(-(-total // block), 2) * block

    # A subtree ends where the next row starts that shares no more than its root's depth.
    later = (rows - (rows - row) * fresh).flip(1).cummin(1).values.flip(1)[:, 1:]
    end = torch.full_like(slots, total)
    end[:, :-1] = starts[later]
    source = order * columns + column[order].T
    values = torch.stack((source, depth[:, None].expand_as(source), end)).flatten(1)
    # What nobody stores lands in one extra cell past the end.
    unstored = ~fresh | (depth[:, None] >= size[order])
    index = slots.masked_fill(unstored, length).flatten()
    stored = depth.new_zeros(3, length + 1)
    torch.arange(1, length + 2, device=mask.device, out=stored[2])
    stored.scatter_(1, index.expand(3, -1), values)

    return Plan(
        layout=layout,
        rows=rows,
        columns=columns,
        real_tokens=real,
        run_tokens=total,
        length=length,
        longest=longest,
        # Copies: Dynamo traces a view together with its base, whose size it would specialise on.
        source=stored[0, :length].clone(),
        depth=stored[1, :length].clone(),
        end=stored[2, :length].clone(),
        slot=slot,
        starts=starts,
        order=order,
        added=size[order] - shared,
        reads=tuple(
            _read(slot[:, low:high], mark, count)
            for (low, high), mark, count in zip(reads, marks, sizes[: len(reads)], strict=True)
        ),
        flags=tuple(flag_values),
    )


def _marks(slot: Tensor, most: int) -> Tensor:
    """``[most]`` int64, 1 at the stored tokens that occur in ``slot``."""
    marks = slot.new_zeros(most + 1)
    return marks.scatter_(0, torch.where(slot < 0, most, slot).flatten(), 1)[:most]


def _read(slot: Tensor, marks: Tensor, tokens: int) -> Read:
    rank = marks.cumsum(0) - 1
    # Whole sixteens, at least two of them: sizes that vary little, and none that is specialised.
    length = max(-(-tokens // 16), 2) * 16
    index = slot.new_zeros(length + 1)
    index.scatter_(0, torch.where(marks > 0, rank, length), torch.arange(len(marks), device=slot.device))
    return Read(index[:length].clone(), torch.where(slot < 0, -1, rank[slot.clamp_min(0)]), tokens)


def _codes(keys: Sequence[Tensor], column: Tensor, size: Tensor) -> Tensor:
    """``[L, B]`` int64 in ``0..B``: at each depth, equal where all keys are; 0 past a row's end."""
    rows, columns = column.shape
    real = torch.arange(columns, device=column.device)[:, None] < size
    codes = None
    for key in keys:
        if key.dim() == 3 or key.is_floating_point():
            key = _vector_codes(key.reshape(rows, columns, -1))
        values = _dense_rank(key.gather(1, column).T.long())
        codes = values if codes is None else _dense_rank(codes * rows + values)
    return (codes + 1) * real


def _lexicographic(codes: Tensor) -> Tensor:
    """The stable order ``[B]`` of the rows by their columns of ``codes`` (``[L, B]`` in 0..B).

    Each round packs as many neighbouring columns as fit into an int64 and ranks the results
    densely again: exact, and done after log(L) rounds to the base ``group`` (9 for 64 rows).
    """
    base, group = codes.shape[1] + 1, 2
    while base ** (group + 1) <= 2**63:
        group += 1
    weights = torch.pow(base, torch.arange(group - 1, -1, -1, device=codes.device))
    while len(codes) > 1:
        if missing := -len(codes) % group:
            codes = torch.cat((codes, codes.new_zeros(missing, codes.shape[1])))
        codes = (codes.unflatten(0, (-1, group)) * weights[:, None]).sum(1)
        codes = _dense_rank(codes)
    return codes[0].argsort(stable=True)


def _dense_rank(values: Tensor) -> Tensor:
    """Ranks 0, 1, 2, ... of the distinct values of each row of ``[C, B]``."""
    ordered, index = values.sort(dim=1)
    ranks = torch.zeros_like(index)
    torch.cumsum(ordered[:, 1:] != ordered[:, :-1], 1, out=ranks[:, 1:])
    return torch.empty_like(index).scatter_(1, index, ranks)


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
