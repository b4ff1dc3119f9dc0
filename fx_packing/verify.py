"""The check of a rewritten graph at its first execution, against the captured graph.

The reference is the captured graph itself with its own attention and masks, run operation by operation
on each row's real tokens with positions from 0 (``positions="row"``), or on the captured rows as they
are (``"captured"``). It is evaluated twice, in ways that have to agree:

    all rows        in batches, padded on the right      values, in training all gradients
    a few rows      each alone                           the same

In half precision the longest of these is evaluated in float32 as well.

How much the packed result may differ is measured, not assumed: by the noise between these, and by a
negative control, the same flat graph with the boundaries between rows removed, which has to fail
clearly before a pass counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import dotted
from .forest import Plan
from .gradients import Leaves, Sketches, own_autocast_cache, size
from .passes.evaluate import Step, evaluate, schedule
from .passes.flatten import FlatGraph, output_nodes
from .passes.widen import HALF, Widened
from .report import Verification

if TYPE_CHECKING:
    from .runtime import Batch, Packed

_ALONE = 3  # rows that are evaluated alone
_NOISE = 8.0  # how many times the noise between two ways to evaluate the reference is allowed
_ROUNDING = 4.0  # how many times the distance of the reference's values from float32; of its gradients,
_BACKWARD = 8.0  # whose roundings are sketched, and differ more between ways to fuse a backward
_MEAN = 3.0  # how many times the root mean square of rounding, of which two right ways have 1.4
_CONTROL = 4.0  # how many times the tolerance the negative control has to miss by
_CHUNK = 1 << 24  # elements compared at a time


@dataclass
class Outcome:
    """What one check found: a record for the values, in training one for the gradients. `small`:
    whether a mismatch is far smaller than that of wrong boundaries. `note`: a difference between the
    captured batch and its rows that the user should know of. `outputs`: what was compared, if a run
    that follows has to give the same."""

    records: list[Verification] = field(default_factory=list)
    small: bool = False
    note: str | None = None
    outputs: tuple[Any, ...] | None = None

    @property
    def passed(self) -> bool:
        """Everything compared was right, and the batch would have shown it if it were not."""
        return all(r.passed for r in self.records)

    @property
    def wrong(self) -> Verification | None:
        """The record of a mismatch, if any."""
        return next((r for r in self.records if not r.passed and r.max_error is not None), None)


def check(
    packed: Packed,
    batch: Batch,
    plan: Plan,
    flat: FlatGraph,
    *,
    parts: list[Plan] | None = None,
    outputs: tuple[Any, ...] | None = None,
    training: bool,
) -> Outcome:
    """Compare one batch. `outputs` are those of its run; without them it is run here, in the `parts`
    that the token cap allows, on leaves of its own: the way in `training`, where gradients are
    compared too. Dropout is off in all of it.

    Changes nothing of the caller's: no ``.grad``, no random state, no autocast cache. Raises what
    the captured or the flat graph raise.
    """
    with torch.set_grad_enabled(training):
        return _Check(packed, batch, plan, flat, training).run(parts, outputs)


def confirm(outcome: Outcome, outputs: Sequence[Any]) -> Verification | None:
    """What is wrong with the outputs of a run that repeats one that passed; None if nothing is.

    In training the check runs before the call, on leaves of its own. The same kernels on the same plan
    give the same bits, so only what one run leaves behind for the next can tell them apart.
    """
    if outcome.outputs is None:
        return None
    pairs = [(a, b) for a, b in zip(outputs, outcome.outputs, strict=True) if isinstance(a, Tensor)]
    pairs = [(a.detach(), b) for a, b in pairs if a.is_floating_point()]
    errors = [_distance(a, b) for a, b in pairs]
    error = max((e if isfinite(e) else inf for e in errors), default=0.0)
    first = outcome.records[0]
    if error <= (first.tolerance or 0.0):
        return None
    why = "the run after the check, compared with the one that was checked"
    return dataclasses.replace(first, max_error=error, passed=False, why=why)


class _Check:
    def __init__(self, packed: Packed, batch: Batch, plan: Plan, flat: FlatGraph, training: bool) -> None:
        self.packed, self.plan, self.training = packed, plan, training
        self.dropout = _has_dropout(packed)
        self.flat = packed.analysis.flat(flat.kernel, dropout=False) if self.dropout else flat
        self.leaves = Leaves(batch.args if training else [])
        self.batch = dataclasses.replace(batch, args=self.leaves.args) if training else batch
        self.reference = _Reference(packed, self.batch)
        self.rows = [r for r in plan.order.tolist() if self.reference.lengths[r]]
        self.few = _few(self.rows, self.reference.lengths, plan)
        self.wanted: list[int] = []
        self.error = self.noise = self.rounding = self.scale = self.control = self.allowed = 0.0
        self.spread: tuple[float, float] | None = None  # root mean squares: packed, and of rounding
        self.compared: set[int] = set()

    def run(self, parts: list[Plan] | None, outputs: tuple[Any, ...] | None) -> Outcome:
        if outputs is None or self.dropout:
            outputs = self.packed.execute(self.batch, self.plan, self.flat, parts)
        self.wanted = [
            j
            for j, o in enumerate(self.flat.outputs)
            if o.kind in ("padded", "merged") and outputs[j].is_floating_point()
        ]
        if not self.rows or not self.wanted:
            return self._open("no row with real tokens, or no output to compare")
        self.reference.outputs = [(self.flat.outputs[j], j) for j in self.wanted]
        probe = _Probe(self.reference, [outputs[j] for j in self.wanted]) if self.leaves.places else None
        names = ("packed", "rest", "few", "alone", "narrow", "wide")
        sketches = {n: Sketches() for n in names}
        if probe is not None:
            sketches["packed"] = self._backward(probe.packed(outputs))
        outputs = tuple(o.detach() if isinstance(o, Tensor) else o for o in outputs)

        alone: dict[int, list[Tensor]] = {}
        owns: dict[int, Sketches] = {}
        for row in self.few:
            entries, owns[row] = self._evaluated([row], probe)
            sketches["alone"] += owns[row]
            if _finite(entries):
                alone[row] = entries
        if alone and _computes_in_half(self):
            row = max(alone, key=lambda r: self.reference.lengths[r])
            wide, sketches["wide"] = self._evaluated([row], probe, Widened())
            sketches["narrow"] = owns[row]
            self._measure_rounding(row, alone[row], wide, outputs)
        if not alone:
            return self._open("the captured graph itself is not finite on the real tokens of its rows")
        for rows in _chunks(self.rows, self.few, self.reference.lengths, self.plan):
            entries, own = self._evaluated(rows, probe)
            sketches["few" if rows == self.few else "rest"] += own
            self._compare(rows, entries, outputs, alone)
        for row, entries in alone.items():
            self._compare([row], entries, outputs, {})
        if self.scale == 0.0 and self.error == 0.0:
            return self._open("no token whose result is read")
        # Results of a few units in the last place of the largest one are always allowed: the measured
        # noise can be zero where both evaluations of the reference happen to run the same kernels.
        dtype = outputs[self.wanted[0]].dtype
        self.allowed = max(_NOISE * self.noise, _ROUNDING * self.rounding, _units(dtype) * self.scale)
        outcome = Outcome([self._values(alone)], note=self._note(alone))
        if probe is not None and not outcome.wrong:
            record = _compare_gradients(self.packed, self.leaves.places, sketches, dtype)
            outcome.records.append(dataclasses.replace(record, layout=self.plan.layout))
        outcome.small = bool(outcome.wrong) and self.error * _CONTROL < self.control
        if outcome.passed and not self.dropout:
            outcome.outputs = outputs
        return outcome

    def _evaluated(
        self, rows: list[int], probe: _Probe | None, widened: Widened | None = None
    ) -> tuple[list[Tensor], Sketches]:
        """The read real entries of `rows` in each wanted output of the reference, and the sketches of
        the gradients of these rows."""
        if len(rows) == 1 or not self.reference.by_row:
            with own_autocast_cache():
                values = self.reference.values(rows, widened)
                entries = [self.reference.entries(rows, i, v.detach()) for i, v in enumerate(values)]
                # Padding can break the numbers of rows that are not broken by themselves.
                if len(rows) == 1 or _finite(entries):
                    loss = probe.reference(rows, values) if probe is not None else None
                    return entries, self._backward(loss)
        parts, own = zip(*(self._evaluated([row], probe) for row in rows), strict=True)
        return [torch.cat(p) for p in zip(*parts, strict=True)], sum(own, start=Sketches())

    def _measure_rounding(
        self, row: int, narrow: list[Tensor], wide: list[Tensor], outputs: tuple[Any, ...]
    ) -> None:
        """How far rounding takes the reference from float32, and how far the packed result is."""
        squares, count = [0.0, 0.0], 0
        for i, (rounded, exact) in enumerate(zip(narrow, wide, strict=True)):
            self.rounding = max(self.rounding, _distance(rounded, exact))
            got = self.reference.picked(outputs, [row], i)
            squares[0] += _squares(got, rounded)
            squares[1] += _squares(rounded, exact)
            count += rounded.numel()
        packed, of_rounding = ((s / max(count, 1)) ** 0.5 for s in squares)
        self.spread = packed, of_rounding

    def _backward(self, loss: Tensor | None) -> Sketches:
        return self.leaves.backward(loss) if loss is not None and loss.requires_grad else Sketches()

    def _compare(
        self,
        rows: list[int],
        entries: list[Tensor],
        outputs: tuple[Any, ...],
        alone: dict[int, list[Tensor]],
    ) -> None:
        """Error of the packed `outputs` at `rows`; noise where a row was also evaluated alone."""
        counts = [self.reference.counts(rows, i) for i in range(len(self.wanted))]
        split = [e.split(n) for e, n in zip(entries, counts, strict=True)]
        for at, row in enumerate(rows):
            clean = [s[at] for s in split]
            if not _finite(clean):
                continue
            self.compared.add(row)
            for i, want in enumerate(clean):
                got = self.reference.picked(outputs, [row], i)
                distance = _distance(got, want)
                self.error = max(self.error, distance if isfinite(distance) else inf)
                self.scale = max(self.scale, float(want.abs().max()) if want.numel() else 0.0)
                if row in alone:
                    self.noise = max(self.noise, _distance(want, alone[row][i]))

    # -- verdicts ----------------------------------------------------------------------------------

    def _record(
        self, passed: bool, why: str, error: float | None = None, allowed: float | None = None
    ) -> Verification:
        return Verification(self.plan.layout, error, allowed, False, passed, why)

    def _open(self, why: str) -> Outcome:
        return Outcome([self._record(False, why)])

    def _values(self, alone: dict[int, list[Tensor]]) -> Verification:
        if len(alone) > 1:
            self._run_controls(alone)
        text = f"{len(self.compared)} of {len(self.rows)} rows"
        if not self.error <= self.allowed:
            return self._record(False, f"compared {text}", self.error, self.allowed)
        floor = _units(torch.float32) * self.scale
        if self.spread and self.spread[0] > max(_MEAN * self.spread[1], floor):
            why = "root mean square {:.3g}, that of rounding is {:.3g}".format(*self.spread)
            return self._record(False, why, self.error, self.allowed)
        if len(self.rows) < 2:
            return self._record(True, "a single row", self.error, self.allowed)
        if self.control > _CONTROL * self.allowed:
            why = f"{text}; wrong boundaries: {self.control:.3g}"
            return self._record(True, why, self.error, self.allowed)
        return self._record(
            False, f"wrong row boundaries change no more than {self.control:.3g}: proves nothing"
        )

    def _run_controls(self, alone: dict[int, list[Tensor]]) -> None:
        """Negative controls on the rows evaluated alone, until one misses clearly."""
        rows = list(alone)
        part = self.packed.part(self.batch, torch.tensor(rows, device=self.batch.mask.device))
        plan = self.packed.make_plan(part, self.plan.layout)
        for tampered in _controls(plan, self.packed):
            wrong = self.packed.execute(part, tampered, self.flat, None)
            for at, row in enumerate(rows):
                for i, want in enumerate(alone[row]):
                    got = self.reference.picked(wrong, [row], i, at=at)
                    distance = _distance(got.detach(), want)
                    self.control = max(self.control, distance if isfinite(distance) else inf)
            if self.control > _CONTROL * self.allowed:
                return

    def _note(self, alone: dict[int, list[Tensor]]) -> str | None:
        """Whether the captured batch gives other numbers than its rows do, and by how much."""
        if self.reference.captured or self.packed.analysis.padding is None or self.packed.noted:
            return None
        self.packed.noted = True
        rows = list(alone)[:2]
        padded = _Reference(self.packed, self.batch, captured=True)
        padded.outputs = self.reference.outputs
        with torch.no_grad(), own_autocast_cache():
            values = padded.values(rows)
        worst = 0.0
        for i, value in enumerate(values):
            distance = _distance(padded.entries(rows, i, value), torch.cat([alone[r][i] for r in rows]))
            worst = max(worst, distance if isfinite(distance) else inf)
        # In a float64 model too, parts computed in float32 (rotary tables) round.
        if worst <= max(self.allowed, _units(torch.float32) * self.scale):
            return None
        return (
            f"on this padded batch the captured graph differs from its rows alone by {worst:.3g} (rounding "
            f"explains {self.allowed:.3g}): padding moves its numbers. Packed runs follow the rows alone "
            '(positions="row"), fallbacks the padded batch; options={"positions": "captured"} follows the '
            "padded batch throughout"
        )


class _Reference:
    """The captured graph on some rows of a batch: compacted, padded on the right to the longest of
    them, or (`captured`) as they are."""

    def __init__(self, packed: Packed, batch: Batch, captured: bool | None = None) -> None:
        self.packed, self.batch = packed, batch
        self.captured = packed.options.positions == "captured" if captured is None else captured
        self.lengths: list[int] = batch.mask.sum(1).tolist()
        self.place = (batch.mask.cumsum(1) - 1).clamp_min(0)
        self.outputs: list[tuple[Any, int]] = []  # (how it is laid out, its index)
        self._counts: dict[int, list[int]] = {}
        self._steps: list[Step] | None = None
        # Slices along the sequence: each row's read columns are where its own real tokens lie, which
        # a gather can take from the compacted rows if the slice is of [B, L, ...].
        roles = packed.analysis.roles
        cuts = packed.analysis.proof.cuts
        bases = [(packed.capture.resolve(n.args[0]), roles.slices[n][0]) for n in cuts]
        rows = ("B",) if "B" in roles.primes else ()
        self.gathers = not self.captured and all(
            dim == 1 and roles.shape(base)[0].symbols == rows for base, dim in bases
        )
        # An input with a number a column, the same for all rows: compacted, each row has its own.
        inputs = [i for i in packed.capture.inputs if i.kind == "user" and i.shape]
        shapes = [{s for d in roles.shape(i.node) for s in d.symbols} for i in inputs]
        self.by_row = not self.captured and any("L" in s and "B" not in s for s in shapes)

    def real(self, i: int) -> Tensor:
        """``[B, n]`` bool: at which of the columns of wanted output i there are tokens."""
        return self.batch.real(self.outputs[i][0].columns)

    def counts(self, rows: list[int], i: int) -> list[int]:
        """How many of its columns are real in each of `rows`."""
        if i not in self._counts:
            self._counts[i] = self.real(i).sum(1).tolist()
        return [self._counts[i][r] for r in rows]

    def values(self, rows: list[int], widened: Widened | None = None) -> list[Tensor]:
        """``[n, columns, ...]`` of each wanted output."""
        packed, batch = self.packed, self.batch
        capture, roles, padding = packed.capture, packed.analysis.roles, packed.analysis.padding
        index = torch.tensor(rows, device=batch.mask.device)
        longest = batch.columns if self.captured else max(self.lengths[r] for r in rows)
        columns = None if self.captured else _compacted(batch.mask[index], longest)
        feeds: dict[Any, Any] = {}
        for item in capture.inputs:
            if item.kind == "size":
                continue
            value = batch.args[item.index]
            if item.kind == "user" and item.shape:
                symbols = {s for d in roles.shape(item.node) for s in d.symbols}
                if "B" in symbols and value.shape[0] == batch.rows:
                    value = value[index]
                if "L" in symbols and columns is not None:
                    value = _take_columns(value, columns)
            if padding is not None and item.index == padding.index and columns is not None:
                sizes = batch.mask[index].sum(1, keepdim=True)
                value = (torch.arange(longest, device=index.device) < sizes).to(value.dtype)
            feeds[item.node] = value
        sizes = packed.sizes(batch) | {"B": len(rows), "L": longest}
        leaves = output_nodes(capture)
        nodes = [leaves[j] for _, j in self.outputs]
        if self._steps is None:
            self._steps = schedule(capture, roles, nodes, feeds, whole=not self.captured, state=True)
        with widened.active(batch.mask.device.type) if widened else nullcontext():
            found = evaluate(
                capture, roles, nodes, sizes, feeds, whole=not self.captured,
                take=self._taker(index) if self.gathers else None, literal=_no_dropout, state=True,
                widened=widened, steps=self._steps,
            )  # fmt: skip
        values = [found[n] for n in nodes]
        return [
            v.unflatten(0, (len(rows), -1)) if o.kind == "merged" else v
            for v, (o, _) in zip(values, self.outputs, strict=True)
        ]

    def _taker(self, index: Tensor) -> Any:
        reads = self.batch.reads

        def take(value: Tensor, dim: int, node: Any) -> Tensor:
            proof = self.packed.analysis.proof
            if node not in proof.cuts:  # the flat graph has no use for it
                return value
            line = proof.columns[proof.cuts[node]]
            line = proof.columns[line.parts[0]] if line.parts else line
            low, high = reads[line.name]
            if line.parent == "L":
                return _take_columns(value, self.place[index, low:high])
            return value.narrow(dim, low - reads[line.parent][0], high - low)

        return take

    def entries(self, rows: list[int], i: int, value: Tensor) -> Tensor:
        """Of `value`, output i of `rows`, the entries at real columns, ``[N, ...]``, row by row."""
        index = torch.tensor(rows, device=self.batch.mask.device)
        real = self.real(i)[index]
        if self._in_place(i):
            return value[real]
        which = torch.arange(len(rows), device=index.device)[:, None].expand_as(real)[real]
        return value[which, self._places(index, i)[real]]

    def _places(self, index: Tensor, i: int) -> Tensor:
        """Where the columns of an output lie in compacted rows."""
        low, high = self.batch.reads[self.outputs[i][0].columns]
        return self.place[index, low:high]

    def weights(self, rows: list[int], i: int, value: Tensor, tokens: Tensor) -> Tensor:
        """``[B, n]`` weights of columns, 0 where there is no token, as those of the entries of
        `value`."""
        index = torch.tensor(rows, device=self.batch.mask.device)
        found = tokens[index]
        if self._in_place(i):
            return found
        moved = found.new_zeros(value.shape[:2])
        return moved.scatter_add_(1, self._places(index, i), found)

    def picked(self, outputs: tuple[Any, ...], rows: list[int], i: int, at: int | None = None) -> Tensor:
        """The same entries of the packed outputs, in which one row is number `at` if that is given."""
        output, j = self.outputs[i]
        real, value = self.real(i), outputs[j]
        value = value.unflatten(0, (-1, real.shape[1])) if output.kind == "merged" else value
        index = torch.tensor(rows, device=real.device)
        return value[index if at is None else slice(at, at + 1)][real[index]]

    def _in_place(self, i: int) -> bool:
        return self.captured or (self.gathers and self.outputs[i][0].columns != "L")


class _Probe:
    """A scalar made of the outputs at their real columns with random signs, the same for the packed
    outputs and for the reference, whichever rows it is of: ``sum(a[b, l] * (out[b, l] @ s))``."""

    def __init__(self, reference: _Reference, outputs: list[Tensor]) -> None:
        self._reference, mask = reference, reference.batch.mask
        generator = torch.Generator(mask.device).manual_seed(0)

        def signs(*shape: int) -> Tensor:
            drawn = torch.randint(0, 2, shape, device=mask.device, generator=generator)
            return drawn.float().mul_(2).sub_(1)

        tokens = signs(*mask.shape) * float(mask.sum().clamp_min(1)) ** -0.5
        self.tokens, self.signs = [], []
        for i, (value, (output, _)) in enumerate(zip(outputs, reference.outputs, strict=True)):
            real = reference.real(i)
            self.tokens.append(tokens[:, : real.shape[1]] * real)
            tail = value.shape[2 if output.kind == "padded" else 1 :]
            self.signs.append(signs(tail.numel()).to(value.dtype))

    def packed(self, outputs: tuple[Any, ...]) -> Tensor:
        """The scalar of the packed outputs."""
        total = []
        for i, (_, j) in enumerate(self._reference.outputs):
            weights = self.tokens[i]
            total.append(self._of(i, outputs[j].reshape(*weights.shape, -1), weights))
        return torch.stack(total).sum()

    def reference(self, rows: list[int], values: Sequence[Tensor]) -> Tensor:
        """The same scalar of some rows of the reference; over all rows it adds up to the batch's."""
        total = []
        for i, value in enumerate(values):
            weights = self._reference.weights(rows, i, value, self.tokens[i])
            total.append(self._of(i, value.reshape(*value.shape[:2], -1), weights))
        return torch.stack(total).sum()

    def _of(self, i: int, value: Tensor, weights: Tensor) -> Tensor:
        wide = torch.promote_types(value.dtype, torch.float32)
        signs = self.signs[i].to(value.dtype)
        return ((value @ signs).to(wide) * weights.to(wide)).sum().double()


def _compare_gradients(
    packed: Packed, places: list[int], taken: dict[str, Sketches], dtype: torch.dtype
) -> Verification:
    """Each tensor's gradient by itself: its error against its own noise, or the middle one's of all
    (relative to its size), whichever is larger."""
    sketches = {name: found.on_host() for name, found in taken.items()}
    total = {p: _sum(sketches["few"].get(p), sketches["rest"].get(p)) for p in places}
    norms = {p: size(t) for p, t in total.items()}
    noises = {}
    for p in places:
        few, alone = sketches["few"].get(p), sketches["alone"].get(p)
        spread = size(_minus(few, alone))
        noises[p] = spread * max(1.0, norms[p] / size(few)) if size(few) else spread
    rounding = {p: _relative(sketches["narrow"].get(p), sketches["wide"].get(p)) for p in places}
    rounding_middle = sorted(rounding.values())[len(places) // 2]
    relative = sorted(noises[p] / norms[p] for p in places if norms[p] > 0)
    if not relative or not all(map(isfinite, relative)):
        why = "the captured graph's own gradients are zero or not finite: proves nothing"
        return Verification("", None, None, True, False, why)
    middle, top = relative[len(relative) // 2], max(norms.values())
    worst = (-1.0, places[0], 0.0, 0.0)
    for p in places:
        error = size(_minus(sketches["packed"].get(p), total[p]))
        error = error if isfinite(error) else inf
        # A gradient that is zero but for rounding (a bias of keys, say) is as exact as the largest is.
        floor = _units(dtype) * norms[p] + _units(torch.float32) * top
        rounds = _BACKWARD * max(rounding[p], rounding_middle) * norms[p]
        allowed = max(_NOISE * noises[p], _NOISE * middle * norms[p], rounds, floor)
        base = norms[p] or top
        worst = max(worst, (error / allowed, p, error / base, allowed / base))
    ratio, place, error, allowed = worst
    why = f"{len(places)} tensors, nearest its tolerance: {dotted(packed.capture.inputs[place].source)}"
    return Verification("", error, allowed, True, ratio <= 1, why)


def _relative(narrow: Tensor | None, wide: Tensor | None) -> float:
    """How far rounding takes a gradient, relative to its size; 0 where that was not measured."""
    found = size(_minus(narrow, wide)) / size(wide) if size(wide) else 0.0
    return found if isfinite(found) else 0.0


def _controls(plan: Plan, packed: Packed) -> Iterator[Plan]:
    """Negative controls: the plan with no boundaries between rows, then with too many.

    Where a window hides the other rows from what is read, cutting the rows into pieces of half a
    window does not stay hidden.
    """
    every = torch.arange(plan.length + 1, device=plan.end.device)
    real = every[:-1] < plan.run_tokens
    none = torch.where(real, plan.run_tokens, plan.end)
    starts = torch.cat([torch.zeros_like(plan.starts[1:]), plan.starts[-1:]])
    yield dataclasses.replace(plan, end=none, starts=starts, longest=plan.run_tokens, _memo={})
    piece = max(1, min(a.window or plan.longest for a in packed.analysis.attention) // 2)
    cut = torch.where(real, ((every[:-1] // piece + 1) * piece).clamp_max(plan.run_tokens), plan.end)
    starts = torch.cat([every[: plan.run_tokens : piece], plan.starts[-1:]])
    yield dataclasses.replace(plan, end=cut, starts=starts, longest=piece, _memo={})


def _few(rows: list[int], lengths: list[int], plan: Plan) -> list[int]:
    """At most `_ALONE` of `rows` (as stored, siblings side by side): the two neighbours that share
    most (where nothing is shared, the first two), the longest, and the last if that is one of them."""
    if len(rows) <= 2:
        return list(rows)
    added = dict(zip(plan.order.tolist(), plan.added.tolist(), strict=True))
    best = max(range(1, len(rows)), key=lambda i: (lengths[rows[i]] - added[rows[i]], -i))
    chosen = [rows[best - 1], rows[best], max(rows, key=lambda r: lengths[r]), rows[-1]]
    return list(dict.fromkeys(chosen))[:_ALONE]


def _chunks(rows: list[int], few: list[int], lengths: list[int], plan: Plan) -> Iterator[list[int]]:
    """All rows, in batches of about half the stored tokens; first those run alone."""
    yield few
    most = max(plan.longest, plan.run_tokens // 2)
    chunk: list[int] = []
    # Rows of like length need little padding.
    for row in sorted(set(rows) - set(few), key=lambda r: lengths[r]):
        if chunk and (len(chunk) + 1) * lengths[row] > most:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


def _compacted(mask: Tensor, longest: int) -> Tensor:
    """``[n, longest]`` columns of the real tokens of each row, column 0 where it has no more."""
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
    return order * (torch.arange(longest, device=mask.device) < mask.sum(1, keepdim=True))


def _take_columns(value: Tensor, columns: Tensor) -> Tensor:
    """``[n, m, ...]`` from ``[n, L, ...]`` or ``[1, L, ...]`` at ``[n, m]`` columns; one row's
    ``[m]`` from ``[L]``."""
    if value.dim() == 1:
        return value[columns[0]]
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    return value[rows if value.shape[0] == len(columns) else torch.zeros_like(rows), columns]


def _no_dropout(node: Any, args: Any) -> Any:
    if node.target is torch.nn.functional.dropout:
        return (args[0][:1], {"p": 0.0, "training": False})
    return args


def _has_dropout(packed: Packed) -> bool:
    from .passes.attention import active_dropout

    return any(
        n.target is torch.nn.functional.dropout and active_dropout(packed.analysis.roles, n)
        for n in packed.analysis.live
    )


def _computes_in_half(check: _Check) -> bool:
    """Whether half precision occurs in the graph as it runs."""
    values = [*check.batch.args, *(n.meta.get("example_value") for n in check.packed.capture.nodes)]
    return any(isinstance(v, Tensor) and v.dtype in HALF for v in values)


def _units(dtype: torch.dtype) -> float:
    """A few units in the last place of 1."""
    few = 4 if dtype in (torch.float16, torch.bfloat16) else 64
    return few * torch.finfo(dtype).eps


def _finite(values: list[Tensor]) -> bool:
    return all(bool(v.isfinite().all()) for v in values)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return _sum(a, None if b is None else -b)


def _squares(a: Tensor, b: Tensor) -> float:
    """The sum of the squared differences, a piece at a time."""
    parts = zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True)
    return sum(float((x.float() - y.float()).square().sum()) for x, y in parts)


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, in at least float32, a piece at a time; NaN if there is one."""
    if not a.numel():
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float32)
    parts = zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True)
    return float(torch.stack([(x.to(wide) - y.to(wide)).abs().max() for x, y in parts]).max())
