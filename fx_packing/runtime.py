"""One captured graph at run time: flag, plan, cap, choice, run, scatter; the first time, verify."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from . import attention as kernels
from . import compat, report, switch, verify
from .cap import token_cap
from .forest import Plan, make_plan
from .inner import Compiled, compile_flat
from .options import Options
from .passes import Analysis
from .passes.flatten import FlatGraph
from .verdicts import Extent, Verdict, Verdicts


class Fallback(Exception):
    """This batch runs as captured; ``str()`` is the reason."""


@dataclass
class Batch:
    """The inputs of one call, read: sizes, which positions are real, and the columns that are read."""

    args: Sequence[Any]
    rows: int
    columns: int
    mask: Tensor  # [B, L] bool
    flags: list[Tensor]  # scalars to look at with the plan's synchronisation
    reads: dict[str, tuple[int, int]]  # sequence symbol -> columns [low, high)


class Packed:
    """What Dynamo calls instead of the captured graph."""

    def __init__(self, analysis: Analysis, options: Options, record: report.GraphReport) -> None:
        self.analysis, self.options, self.record = analysis, options, record
        self.capture = analysis.capture
        self.verdicts = Verdicts()
        self.noted = False  # whether padded and per-row numbers were compared
        self._padded: Compiled | None = None
        self._off: dict[tuple, tuple[int, str]] = {}  # (layout, training) -> from T on, why
        self._lock = threading.RLock()
        user = [i for i in self.capture.inputs if i.kind == "user" and i.shape]
        shape = (self.capture.rows, self.capture.columns)
        self._tokens = [i for i in user if i.shape[:2] == shape]
        self._flat_tokens: list[int] | None = None
        self._modules = [i.index for i in self.capture.inputs if i.kind == "module"]
        _alive.add(self)

    def forget(self) -> None:
        """As if nothing had run yet."""
        self.verdicts.clear()
        self._off.clear()
        self.noted = False
        self.record = report.fresh(self.record)

    # -- the way through ---------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        if not switch.ENABLED:
            return self._run_padded(args, "switched off (fx_packing.disabled or FX_PACKING=0)")
        if self.options.layout == "padded":
            return self._run_padded(args, 'layout="padded" was asked for')
        try:
            batch = self._read(args)
            with self._lock:
                return self._run(batch)
        except Fallback as reason:
            return self._run_padded(args, str(reason))

    def _run(self, batch: Batch) -> Any:
        training, plan = torch.is_grad_enabled(), None
        try:
            plan, verdict, skipped = self._choose(batch, training)
            return self._run_packed(batch, plan, verdict, skipped, training)
        except Fallback:
            raise
        except Exception as error:
            return self._failed(batch, plan, training, error)

    def _choose(self, batch: Batch, training: bool) -> tuple[Plan, Verdict, str | None]:
        """The plan to run, and why not the one that would come first. Raises `Fallback` if no layout
        is fit to be tried: what is known to be wrong or to fail is not run again."""
        skipped = self._off.get((None, training), (0, None))[1]
        if skipped is not None:
            raise Fallback(skipped)
        for layout in dict.fromkeys((self.options.layout, "varlen")):
            plan = self._plan(batch, layout)
            mode = (plan.layout, training)
            verdict = self.verdicts.of([batch.args[i] for i in self._modules], mode)
            low, why = self._off.get(mode, (plan.length + 1, ""))
            why = why if plan.length >= low else verdict.blocks(_extent(plan))
            if why is None:
                return plan, verdict, skipped and f"not {self.options.layout}: {skipped}"
            skipped = skipped or why
            if self.options.layout != "auto":
                break
        raise Fallback(skipped)

    def _run_packed(
        self, batch: Batch, plan: Plan, verdict: Verdict, skipped: str | None, training: bool
    ) -> Any:
        flat = self._flat(plan, batch)
        parts = self._parts(batch, plan, flat)
        due = {"never": False, "always": True}.get(self.options.verify, verdict.due(_extent(plan)))
        if due and training:  # on leaves of its own, before anything of this call is kept for backward
            self._check(batch, plan, flat, parts, None, verdict)
        outputs = self.execute(batch, plan, flat, parts)
        if due and not training:
            self._check(batch, plan, flat, parts, outputs, verdict)
        sizes = [p.run_tokens for p in parts] if parts else [plan.run_tokens]
        self.record.ran(
            report.Run(
                plan.layout, batch.rows, batch.rows * batch.columns, plan.real_tokens, sum(sizes),
                skipped or self._not_shared(batch), flat.kernel, len(sizes),
            )
        )  # fmt: skip
        compat.count(f"ran_{plan.layout}")
        return outputs

    def _run_padded(self, args: Sequence[Any], reason: str | None) -> Any:
        if self._padded is None:
            self._padded = Compiled(self.capture.gm, self.options.inner, "padded")
        result = self._padded(*args)
        self.record.compiles["padded"] = self._padded.compiles
        rows, columns = self._shape(args)
        tokens = rows * columns
        self.record.ran(report.Run("padded", rows, tokens, None, tokens, reason))
        compat.count("ran_padded")
        return result

    def _failed(self, batch: Batch, plan: Plan | None, training: bool, error: Exception) -> Any:
        """Run as captured after an exception; remember it, unless the captured graph raises too."""
        report.log.debug("%s failed", self.record.title, exc_info=error)
        error.__traceback__ = None  # frees the tensors that its frames hold
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if out_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        what = f"layout {plan.layout}" if plan else "packing"
        often = f" for batches of {plan.length} tokens and more" if plan and out_of_memory else ""
        why = f"the packed graph failed ({text}); {what} is not tried again{often}"
        result = self._run_padded(batch.args, why)  # an error of the captured graph itself passes on
        mode = (plan.layout if plan else None, training)
        self._off[mode] = (plan.length if plan and out_of_memory else 0, why)
        report.warn_once(f"{id(self)} {mode}", f"{self.record.title}: {why}")
        return result

    # -- reading the call --------------------------------------------------------------------------

    def _shape(self, args: Sequence[Any]) -> tuple[int, int]:
        first = args[self._tokens[0].index]
        return first.shape[0], first.shape[1]

    def _read(self, args: Sequence[Any]) -> Batch:
        rows, columns = self._shape(args)
        for item in self._tokens:
            if tuple(args[item.index].shape[:2]) != (rows, columns):
                shape = list(args[item.index].shape)
                raise Fallback(f"{item.source} has shape {shape}, expected [{rows}, {columns}, ...]")
        for node, value in self.analysis.roles.pinned.items():
            source = self.capture.by_node[self.capture.resolve(node.args[0])]
            if args[source.index].item() != value:
                raise Fallback(f"{source.source} changed from {value} since the graph was captured")
        padding = self.analysis.padding
        device = args[self._tokens[0].index].device
        flags: list[Tensor] = []
        if padding is None:
            mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
        else:
            given = args[padding.index]
            mask = given if given.dtype == torch.bool else given != 0
            if given.dtype != torch.bool:
                flags.append(((given != 0) & (given != 1)).any())
        return Batch(args, rows, columns, mask, flags, self._reads(args, columns))

    def _reads(self, args: Sequence[Any], columns: int) -> dict[str, tuple[int, int]]:
        """The columns of each slice along the sequence, from the sizes and ints of this call."""
        numbers: dict[Node, Any] = {i.node: args[i.index] for i in self.capture.inputs}

        def number(value: Any) -> Any:
            if not isinstance(value, Node):
                return value
            node = self.capture.resolve(value)
            if node not in numbers:
                given = tuple(number(a) for a in node.args)
                method = node.op == "call_method"
                numbers[node] = getattr(given[0], node.target)(*given[1:]) if method else node.target(*given)
            return numbers[node]

        found: dict[str, tuple[int, int]] = {"L": (0, columns)}
        for symbol, cut in self.analysis.roles.domains.items():
            if cut.parent not in found:
                continue
            low, high = found[cut.parent]
            start, stop, _ = slice(number(cut.start), number(cut.stop)).indices(high - low)
            found[symbol] = (low + start, low + max(start, stop))
        return found

    # -- the plan ----------------------------------------------------------------------------------

    def _keys(self, batch: Batch) -> list[Tensor]:
        """What makes two tokens the same: every per-token input that the flat graph reads."""
        keys = []
        for index in self._key_inputs():
            value = batch.args[index].detach()
            if value.shape[0] != batch.rows:  # one row for all: a number a column
                value = value.expand(batch.rows, *value.shape[1:])
            keys.append(value if value.dim() <= 2 else value.flatten(2))
        if self.options.positions == "captured":
            columns = torch.arange(batch.columns, device=batch.mask.device)
            keys.append(columns.expand(batch.rows, -1))
        return keys

    def _key_inputs(self) -> list[int]:
        if self._flat_tokens is None:
            flat = self.analysis.flat("segments")
            self._flat_tokens = [k[1] for k in flat.inputs if k[0] == "token"]
        return self._flat_tokens

    def make_plan(self, batch: Batch, layout: str) -> Plan:
        """A plan of this batch that nobody else sees."""
        return make_plan(
            batch.mask, self._keys(batch) if layout != "varlen" else (), layout=layout,
            min_sharing=self.options.min_sharing, flags=batch.flags,
            reads=[r for s, r in batch.reads.items() if s != "L"],
        )  # fmt: skip

    def _plan(self, batch: Batch, layout: str) -> Plan:
        if self._embeddings_need_gradients(batch):
            layout = "varlen"  # a shared token would give all its gradient to one of its rows
        reads = [r for s, r in batch.reads.items() if s != "L"]
        # What the plan is made of, first of all; two graphs may read the same tensors differently.
        padding = self.analysis.padding
        keys = self._key_inputs() if layout != "varlen" else []
        read = [padding.index if padding else -1, *keys]
        sources = [batch.args[i] for i in read if i >= 0]
        sources += [batch.args[i.index] for i in self._tokens]
        plan = _plans.get(
            sources,
            (
                layout, self.options.positions, self.options.min_sharing, tuple(reads),
                padding is None, len(read),
            ),
            lambda: self.make_plan(batch, layout),
        )  # fmt: skip
        if any(plan.flags):
            raise Fallback("the padding mask has values other than 0 and 1")
        return plan

    def _not_shared(self, batch: Batch) -> str | None:
        if self.options.layout == "varlen" or not self._embeddings_need_gradients(batch):
            return None
        return "prefixes are not shared: the embeddings passed in need gradients, each row its own"

    def _embeddings_need_gradients(self, batch: Batch) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(batch.args[i.index].requires_grad for i in self._tokens)

    def _flat(self, plan: Plan, batch: Batch) -> FlatGraph:
        first = self.analysis.attention[0]
        dtype = first.value.meta["example_value"].dtype
        facts = dict(
            device=batch.mask.device, dtype=dtype, head_dim=first.head_dim,
            v_head_dim=first.v_head_dim, softcap=first.softcap, layout=plan.layout,
            window=first.window, training=torch.is_grad_enabled(),
        )  # fmt: skip
        kernel, _ = kernels.choose(self.options.attention, **facts)
        if kernel == "flex" and self.options.inner != "inductor":
            kernel = "segments"  # eager FlexAttention would build [T, T]
        return self.analysis.flat(kernel)

    # -- running -----------------------------------------------------------------------------------

    def execute(self, batch: Batch, plan: Plan, flat: FlatGraph, parts: list[Plan] | None) -> tuple[Any, ...]:
        """The captured graph's outputs in their padded shapes, by one flat forward or several."""
        if parts is None:
            return self._outputs(batch, plan, flat, self._call(batch, plan, flat))
        return self._run_parts(batch, parts, flat)

    def _call(self, batch: Batch, plan: Plan, flat: FlatGraph) -> tuple[Tensor, ...]:
        compiled = compile_flat(flat, self.options.inner)
        results = compiled(*self.arguments(batch, plan, flat))
        self.record.compiles[f"flat ({flat.kernel})"] = compiled.compiles
        return results

    def arguments(self, batch: Batch, plan: Plan, flat: FlatGraph) -> list[Any]:
        """What the flat graph takes, in order."""
        symbols = [s for s in batch.reads if s != "L"]
        values: list[Any] = []
        for key in flat.inputs:
            if key[0] == "input":
                values.append(batch.args[key[1]])
            elif key[0] == "token":
                values.append(_gather(batch, plan, batch.args[key[1]]))
            elif key[0] == "positions":
                values.append(compat.mark_dynamic(self._positions(plan), 0))
            elif key[0] == "read":
                read = plan.reads[symbols.index(key[1])]
                values.append(compat.mark_dynamic(read.index, 0))
            else:
                values.append(kernels.KERNELS[flat.kernel].inputs(plan, key[1])[key[2]])
        return values

    def _positions(self, plan: Plan) -> Tensor:
        if self.options.positions == "row":
            return plan.depth
        return plan.remember("columns", lambda: plan.source % plan.columns)

    def _outputs(
        self, batch: Batch, plan: Plan, flat: FlatGraph, results: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        symbols = [s for s in batch.reads if s != "L"]
        outputs: list[Any] = []
        for output in flat.outputs:
            if output.kind == "input":
                outputs.append(batch.args[output.value])
            elif output.kind == "plain":
                outputs.append(results[output.value])
            elif output.kind == "size":
                sizes = {"B": batch.rows} | {s: high - low for s, (low, high) in batch.reads.items()}
                outputs.append(self.analysis.roles.at(output.value, sizes))
            elif output.kind in ("padded", "merged"):
                whole = output.symbol == "L"
                slot = plan.slot if whole else plan.reads[symbols.index(output.symbol)].slot
                outputs.append(_scatter(results[output.value], slot, output.kind))
            else:
                outputs.append(output.value)
        return tuple(outputs)

    # -- the cap -----------------------------------------------------------------------------------

    def _parts(self, batch: Batch, plan: Plan, flat: FlatGraph) -> list[Plan] | None:
        """Plans of several flat forwards where one would exceed the token cap."""
        cap, what = token_cap(self.options, batch.columns)
        limit = kernels.most_tokens(flat.kernel, self.analysis.attention)
        if limit is not None and (cap is None or limit < cap):
            cap, what = limit, f"what the {flat.kernel} kernel can index"
        if cap is None or plan.run_tokens <= cap:
            return None
        if plan.longest > cap:
            raise Fallback(f"a row of {plan.longest} tokens exceeds the cap of {cap} tokens ({what})")
        sizes, added = torch.stack((batch.mask.sum(1)[plan.order], plan.added)).tolist()
        bins: list[list[int]] = []
        total = cap + 1
        for place, (size, more) in enumerate(zip(sizes, added, strict=True)):
            if total + more > cap:  # a new part repeats the prefix that this row shares
                bins.append([])
                total, more = 0, size
            bins[-1].append(place)
            total += more
        parts = []
        for places in bins:
            rows = plan.order[torch.tensor(places, device=plan.order.device)].sort().values
            part = self.part(batch, rows)
            parts.append(self._plan(part, plan.layout))
            parts[-1].remember("rows", lambda rows=rows: rows)
        return parts

    def part(self, batch: Batch, rows: Tensor) -> Batch:
        """Some rows of a batch, by their numbers."""
        args = list(batch.args)
        for item in self._tokens:
            args[item.index] = args[item.index][rows]
        return Batch(args, len(rows), batch.columns, batch.mask[rows], [], batch.reads)

    def _run_parts(self, batch: Batch, parts: list[Plan], flat: FlatGraph) -> tuple[Any, ...]:
        pieces, orders = [], []
        for plan in parts:
            rows = plan.remember("rows", lambda: None)
            part = self.part(batch, rows)
            pieces.append(self._outputs(part, plan, flat, self._call(part, plan, flat)))
            orders.append(rows)
        inverse = torch.cat(orders).argsort()
        joined = []
        for output, values in zip(flat.outputs, zip(*pieces, strict=True), strict=True):
            if output.kind == "padded":
                joined.append(torch.cat(values)[inverse])
            elif output.kind == "merged":
                low, high = batch.reads[output.symbol]
                whole = torch.cat([v.unflatten(0, (-1, high - low)) for v in values])
                joined.append(whole[inverse].flatten(0, 1))
            else:
                joined.append(batch.args[output.value] if output.kind == "input" else values[0])
        return tuple(joined)

    # -- the first time ----------------------------------------------------------------------------

    def _check(
        self,
        batch: Batch,
        plan: Plan,
        flat: FlatGraph,
        parts: list[Plan] | None,
        outputs: tuple[Any, ...] | None,
        verdict: Verdict,
    ) -> None:
        """Raises `Fallback` where the packed result is wrong, now and from now on."""
        name, extent = self.record.title, _extent(plan)
        try:
            outcome = verify.check(
                self, batch, plan, flat, parts=parts, outputs=outputs, training=outputs is None
            )
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None
            verdict.left_open()
            why = "out of memory during the check"
            self.record.verifications.append(
                report.Verification(plan.layout, None, None, outputs is None, False, why)
            )
            report.warn_once(f"{id(self)} memory", f"{name}: {why}, which is left for a later batch")
            return
        self.record.verifications += outcome.records
        if outcome.note is not None:
            report.warn_once(f"{self.record.model} padding", f"{name}: {outcome.note}.")
        wrong = outcome.wrong
        if wrong is None:
            verdict.passed(extent) if outcome.passed else verdict.left_open()
            return
        what = "gradients" if wrong.gradients else "results"
        why = (
            f"the {what} of layout {plan.layout} differ from those of the captured graph by "
            f"{wrong.max_error:.3g}, allowed {wrong.tolerance:.3g} ({wrong.why})"
        )
        verdict.failed(extent, why, small=outcome.small)
        end = "for good" if verdict.off else "from these lengths on"
        report.warn_once(
            f"{id(self)} {plan.layout} {what} wrong",
            f"{name}: {why}. For these parameters it runs as captured {end}, this batch included. Please "
            'report it with fx_packing.report(); options={"layout": "padded"} or enabled=False switches '
            "packing off.",
        )
        raise Fallback(f"a check failed: {why}")


def _extent(plan: Plan) -> Extent:
    return Extent(plan.run_tokens, plan.longest, plan.rows)


def _gather(batch: Batch, plan: Plan, value: Tensor) -> Tensor:
    """[1, T_pad, ...] from [B, L, ...], or from [1, L, ...]; no view, which Dynamo traces with its base."""
    if value.dim() < 2 or value.shape[0] != batch.rows:
        columns = plan.source % plan.columns
        if value.dim() < 2:
            return compat.mark_dynamic(value.index_select(0, columns), 0)
        return compat.mark_dynamic(value.index_select(1, columns), 1)
    flat = value.flatten(0, 1)
    if value.is_floating_point():  # embeddings: their backward is one addition of rows
        flat = flat.index_select(0, plan.source).unsqueeze(0)
    else:
        flat = flat[plan.source.unsqueeze(0)]
    return compat.mark_dynamic(flat, 1)


def _scatter(result: Tensor, slot: Tensor, kind: str) -> Tensor:
    """[B, n, ...] (or [B * n, ...]) from [1, S, ...]: zeros where there is no token."""
    flat = result.flatten(0, 1) if kind == "padded" else result
    out = _Scatter.apply(flat, slot.flatten())
    return out.unflatten(0, slot.shape) if kind == "padded" else out


class _Scatter(torch.autograd.Function):
    """Rows of `flat` by index, zeros at -1; the gradients of a row read several times (the last
    token of a shared prompt, by each completion) are summed in at least float32 and rounded once.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = flat.shape[0]
        missing = (index < 0).view(-1, *[1] * (flat.dim() - 1))
        return flat.index_select(0, index.clamp_min(0)).masked_fill_(missing, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        # One more row takes what belongs to no token.
        total = grad.new_zeros(ctx.rows + 1, *grad.shape[1:], dtype=wide)
        total.index_add_(0, torch.where(index < 0, ctx.rows, index), grad.to(wide))
        return total[: ctx.rows].to(grad.dtype), None


class _PlanCache:
    """The plans of the last few batches: old, reference and new passes of one step share them."""

    def __init__(self, most: int = 8) -> None:
        self._plans: OrderedDict[tuple, tuple[list[weakref.ref], Plan]] = OrderedDict()
        self._most, self._lock = most, threading.Lock()

    def get(self, sources: list[Tensor], facts: tuple, make: Any) -> Plan:
        if any(t.is_inference() for t in sources):
            return make()  # they carry no version, so a change in place would go unseen
        key = (facts, tuple((id(t), t._version, tuple(t.shape)) for t in sources))
        with self._lock:
            found = self._plans.get(key)
            if found and all(r() is t for r, t in zip(found[0], sources, strict=True)):
                self._plans.move_to_end(key)
                return found[1]
        plan = make()
        with self._lock:
            self._plans[key] = ([weakref.ref(t) for t in sources], plan)
            while len(self._plans) > self._most:
                self._plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()


_plans = _PlanCache()


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def forget() -> None:
    """Drop cached plans, and what the callables that Dynamo may still hold have seen so far."""
    _plans.clear()
    for compiled in list(_alive):
        compiled.forget()


class AsCaptured:
    """What Dynamo calls for a refused graph: the captured graph, compiled by the inner backend."""

    def __init__(self, compiled: Any, record: report.GraphReport, reason: str) -> None:
        self.compiled, self.record, self.reason = compiled, record, reason
        _alive.add(self)

    def forget(self) -> None:
        """As if nothing had run yet."""
        self.record = report.fresh(self.record)

    def __call__(self, *args: Any) -> Any:
        result = self.compiled(*args)
        shape = next((a.shape for a in args if isinstance(a, Tensor) and a.dim() >= 2), (0, 0))
        tokens = shape[0] * shape[1]
        self.record.ran(report.Run("padded", shape[0], tokens, None, tokens, self.reason))
        compat.count("ran_padded")
        return result
