"""The check of a rewritten graph at its first execution, against the captured graph.

The reference is the captured graph itself with its own attention and masks: each row alone, its real
tokens only, positions from 0 (``positions="row"``), or the captured batch (``"captured"``). How much
the two may differ is measured, not assumed: by the noise between two evaluations of the reference that
differ only in padding, and by a negative control, the same flat graph with the boundaries between rows
removed, which has to fail clearly before a pass counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .forest import Plan
from .passes.evaluate import evaluate
from .passes.flatten import FlatGraph
from .report import Verification

if TYPE_CHECKING:
    from .runtime import Batch, Packed

_ROWS = 8  # rows that one check looks at
_NOISE = 8.0  # how many times the measured noise is allowed
_CONTROL = 4.0  # how many times the tolerance the negative control has to miss by


class Verdicts:
    """Per parameters and mode (layout, gradient mode): passed, failed, or nothing yet."""

    def __init__(self) -> None:
        self._known: dict[tuple, bool] = {}

    def set(self, parameters: int, mode: tuple, passed: bool) -> None:
        """Record a verdict."""
        self._known[parameters, mode] = passed

    def passed(self, parameters: int, mode: tuple) -> bool:
        """Whether these parameters were checked and found right."""
        return self._known.get((parameters, mode)) is True

    def failed(self, parameters: int, mode: tuple) -> bool:
        """Whether these parameters were checked and found wrong."""
        return self._known.get((parameters, mode)) is False

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


@torch.no_grad()
def check(
    packed: Packed,
    batch: Batch,
    plan: Plan,
    flat: FlatGraph,
    outputs: tuple[Any, ...],
    training: bool,
) -> Verification:
    """Compare the outputs of one execution. `max_error` is None where the batch proves nothing.

    `training` is the gradient mode of that execution: the flat graph is run again in it, since in
    the other one it would have to be compiled once more.
    """

    def result(passed: bool, why: str, error: float | None = None, allowed: float | None = None):
        return Verification(plan.layout, error, allowed, False, passed, why)

    if _has_dropout(packed):
        flat = packed.analysis.flat(flat.kernel, dropout=False)
        outputs = packed._outputs(batch, plan, flat, _run(packed, batch, plan, flat, training))
    wanted = [
        j
        for j, o in enumerate(flat.outputs)
        if o.kind in ("padded", "merged") and outputs[j].is_floating_point()
    ]
    lengths = batch.mask.sum(1).tolist()
    filled = [r for r in plan.order.tolist() if lengths[r]]
    if not filled or not wanted:
        return result(False, "no row with real tokens, or no output to compare")
    rows = _spread(filled, lengths)
    error, noise, scale, finite = 0.0, 0.0, 0.0, True
    references: dict[int, list[Tensor]] = {}
    whole = _captured_batch(packed, batch, wanted) if packed.options.positions == "captured" else None
    for row in rows:
        reference = [v[row] for v in whole] if whole else _row(packed, batch, row, wanted, 0)
        again = reference if whole else _row(packed, batch, row, wanted, 7 + lengths[row] // 3)
        references[row] = reference
        for j, clean, padded in zip(wanted, reference, again, strict=True):
            clean, padded = (_read_columns(packed, batch, row, flat, j, v, whole) for v in (clean, padded))
            got = _packed_row(batch, row, flat, j, outputs)
            if not got.numel() or not bool(clean.isfinite().all()):
                continue
            finite = finite and bool(got.isfinite().all())
            error = max(error, _distance(got, clean))
            if bool(padded.isfinite().all()):
                noise = max(noise, _distance(padded, clean))
            scale = max(scale, float(clean.abs().max()))
    if scale == 0.0:
        return result(False, "no token whose result is read")
    dtype = outputs[wanted[0]].dtype
    # Results of a few units in the last place of the largest one are always allowed: the measured
    # noise can be zero where both evaluations of the reference happen to run the same kernels.
    units = 4 if dtype in (torch.float16, torch.bfloat16) else 64
    floor = units * torch.finfo(dtype).eps * scale
    allowed = max(_NOISE * noise, floor)
    if not finite or error > allowed:
        return result(False, f"compared {len(rows)} rows", error if finite else float("inf"), allowed)
    if len(filled) < 2:
        return result(True, "a single row, compared alone", error, allowed)
    control = 0.0
    for tampered in _controls(plan, packed):
        wrong = packed._outputs(batch, tampered, flat, _run(packed, batch, tampered, flat, training))
        for row in rows:
            for j, clean in zip(wanted, references[row], strict=True):
                clean = _read_columns(packed, batch, row, flat, j, clean, whole)
                got = _packed_row(batch, row, flat, j, wrong)
                distance = _distance(got, clean)
                control = max(control, distance if distance == distance else float("inf"))
        if control > _CONTROL * allowed:
            return result(True, f"{len(rows)} rows; wrong boundaries: {control:.3g}", error, allowed)
    return result(False, f"wrong row boundaries change no more than {control:.3g}: proves nothing")


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


def _run(
    packed: Packed, batch: Batch, plan: Plan, flat: FlatGraph, training: bool
) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(training):
        results = packed.call(batch, plan, flat)
    return tuple(r.detach() for r in results)


def _row(packed: Packed, batch: Batch, row: int, wanted: list[int], extra: int) -> list[Tensor]:
    """The captured graph on one row's real tokens, with `extra` padding columns after them."""
    capture, roles = packed.capture, packed.analysis.roles
    columns = batch.mask[row].nonzero().squeeze(1)
    length = len(columns)
    columns = torch.cat([columns, columns.new_zeros(extra)])
    padding = packed.analysis.padding
    feeds: dict[Any, Any] = {}
    for item in capture.inputs:
        value = batch.args[item.index]
        if item.kind == "user" and "L" in str(item.shape and roles.shape(item.node)):
            value = value[:1] if value.shape[0] != batch.rows else value[row : row + 1]
            value = value[:, columns]
        if padding is not None and item.index == padding.index:
            value = torch.zeros_like(value)
            value[:, :length] = 1
        if item.kind != "size":
            feeds[item.node] = value
    sizes = {"B": 1, "L": length + extra}
    return _values(packed, wanted, sizes, feeds, whole=True)


def _captured_batch(packed: Packed, batch: Batch, wanted: list[int]) -> list[Tensor]:
    sizes = {"B": batch.rows} | {s: high - low for s, (low, high) in batch.reads.items()}
    feeds = {i.node: batch.args[i.index] for i in packed.capture.inputs}
    values = _values(packed, wanted, sizes, feeds, whole=False)
    return [v if v.shape[0] == batch.rows else v.unflatten(0, (batch.rows, -1)) for v in values]


def _values(
    packed: Packed, wanted: list[int], sizes: dict[str, int], feeds: dict[Any, Any], whole: bool
) -> list[Tensor]:
    from .passes.flatten import _leaves

    leaves = _leaves(packed.capture.output.args[0])
    nodes = [packed.capture.resolve(leaves[j]) for j in wanted]
    values = evaluate(
        packed.capture, packed.analysis.roles, nodes, sizes, feeds, whole=whole, literal=_no_dropout
    )
    found = [values[n] for n in nodes]
    return [v[0] if whole and v.dim() > 1 and v.shape[0] == 1 else v for v in found] if whole else found


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


def _read_columns(
    packed: Packed, batch: Batch, row: int, flat: FlatGraph, j: int, value: Tensor, whole: Any
) -> Tensor:
    """Of one row's reference, the entries of the real tokens that the output has."""
    low, high = batch.reads[flat.outputs[j].symbol]
    real = batch.mask[row, low:high]
    if whole is not None:
        return value[real]
    place = batch.mask[row].cumsum(0) - 1
    return value[place[low:high][real]]


def _packed_row(batch: Batch, row: int, flat: FlatGraph, j: int, outputs: tuple[Any, ...]) -> Tensor:
    low, high = batch.reads[flat.outputs[j].symbol]
    value = outputs[j]
    if flat.outputs[j].kind == "merged":
        value = value.unflatten(0, (batch.rows, high - low))
    return value[row][batch.mask[row, low:high]]


def _spread(filled: list[int], lengths: list[int]) -> list[int]:
    """At most `_ROWS` rows, evenly spaced as stored, the longest among them."""
    step = max(1, -(-len(filled) // _ROWS))
    chosen = filled[::step]
    longest = max(filled, key=lambda r: lengths[r])
    return chosen if longest in chosen else [*chosen[: _ROWS - 1], longest]


def _distance(a: Tensor, b: Tensor) -> float:
    wide = torch.promote_types(a.dtype, torch.float32)
    return float((a.detach().to(wide) - b.to(wide)).abs().max()) if a.numel() else 0.0
