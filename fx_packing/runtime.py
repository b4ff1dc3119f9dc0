"""One captured graph at run time: flag, plan, cap, choice, run, scatter; the first time, verify."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from . import attention as kernels
from . import compat, report, switch, tiles, verify
from .cap import token_cap
from .errors import PackingError
from .forest import INTEGERS, Plan, Read, make_plan
from .inner import Compiled, compile_flat
from .masks import BLOCK
from .options import Options
from .passes import Analysis
from .passes.flatten import Entering, FlatGraph, Output, Scalar, TailGraph
from .verdicts import Extent, Verdict, Verdicts


class Fallback(Exception):
    """This batch runs as captured; ``str()`` is the reason."""


class Unfit(Fallback):
    """It does so because of what it is, which its user should hear of once for each `cause`."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass
class Batch:
    """The inputs of one call, read: sizes, which positions are real, and the columns that are read."""

    args: Sequence[Any]
    rows: int
    columns: int
    mask: Tensor  # [B, L] bool
    flags: dict[str, Tensor]  # why not, where this scalar is not 0: read with the plan's synchronisation
    reads: dict[str, tuple[int, int]]  # name of a slice of the sequence -> columns [low, high)
    joined: dict[str, tuple[str, ...]]  # name of slices side by side -> their names
    anchors: dict[str, str]  # those that have an entry where this one of the slices has a token

    def width(self, columns: str) -> int:
        """How many columns a line has."""
        low, high = self.reads[self.joined.get(columns, (columns,))[0]]
        return high - low

    def real(self, columns: str) -> Tensor:
        """``[B, n]`` bool: which of its entries have a token (in all slices that are joined)."""
        names = self.joined.get(columns, (columns,))
        names = (self.anchors[columns],) if columns in self.anchors else names
        parts = [self.mask[:, slice(*self.reads[p])] for p in names]
        return torch.stack(parts).all(0) if len(parts) > 1 else parts[0]


class Packed:
    """What Dynamo calls instead of the captured graph."""

    def __init__(self, analysis: Analysis, options: Options, record: report.GraphReport) -> None:
        self.analysis, self.options, self.record = analysis, options, record
        self.capture = analysis.capture
        self.verdicts = Verdicts()
        self.noted = False  # whether padded and per-row numbers were compared
        self._tiles = 0  # of the latest run
        self._told: list[tuple[str, str]] = []  # warnings to give at the end of this call
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
                result = self._run(batch)
        except Fallback as reason:
            if isinstance(reason, Unfit):
                if self.options.on_refuse == "raise":
                    raise PackingError(f"grpo_pack: {reason}") from None
                self._tell(f"{self.record.model} {reason.cause}", f"a batch runs as captured: {reason}")
            result = self._run_padded(args, str(reason))
        told, self._told = self._told, []
        for key, text in told:
            report.warn_once(key, text)
        return result

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
            why = why if plan.length >= low else verdict.blocks(_extent(batch, plan))
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
        due = {"never": False, "always": True}.get(self.options.verify, verdict.due(_extent(batch, plan)))
        if due and training:  # on leaves of its own, before anything of this call is kept for backward
            checked = self._check(batch, plan, flat, parts, None, verdict)
            outputs = self.execute(batch, plan, flat, parts)
            wrong = verify.confirm(checked, outputs)
            if wrong is not None:
                self.record.verifications.append(wrong)
                self._found_wrong(wrong, _extent(batch, plan), verdict, small=False)
            del checked
        else:
            outputs = self.execute(batch, plan, flat, parts)
            if due:
                self._check(batch, plan, flat, parts, outputs, verdict)
        sizes = [p.run_tokens for p in parts] if parts else [plan.run_tokens]
        self.record.ran(
            report.Run(
                plan.layout, batch.rows, batch.rows * batch.columns, plan.real_tokens, sum(sizes),
                skipped or self._not_shared(batch), flat.kernel, len(sizes), self._tiles,
            )
        )  # fmt: skip
        compat.count(f"ran_{plan.layout}")
        return outputs

    def _run_padded(self, args: Sequence[Any], reason: str | None) -> Any:
        if self._padded is None:
            self._padded = Compiled(self.capture.captured, self.options.inner, "padded")
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
        error = getattr(error, "inner_exception", error)  # of the inner compiler: what it met
        error.__traceback__ = None
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
        self._tell(f"{id(self)} {mode}", why)
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
                why = f"{item.source} has shape {shape}, expected [{rows}, {columns}, ...]"
                raise Unfit(f"shape of {item.source}", why)
        for node, value in self.analysis.roles.pinned.items():
            source = self.capture.by_node[self.capture.resolve(node.args[0])]
            if args[source.index].item() != value:
                why = f"{source.source} changed from {value} since the graph was captured"
                raise Unfit(
                    f"{source.source} changed",
                    f"{why}, and became part of what is compiled: such calls run as captured. Compile with "
                    "dynamic=False, which captures each value anew, or keep it fixed",
                )
        padding = self.analysis.padding
        device = args[self._tokens[0].index].device
        flags: dict[str, Tensor] = {}
        if padding is None:
            mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
        else:
            given = args[padding.index]
            mask = given if given.dtype == torch.bool else given != 0
            if given.dtype != torch.bool:
                odd = (given != 0) & (given != 1)
                flags["the padding mask has values other than 0 and 1"] = odd.any()
        reads, joined = self._reads(args, columns)
        known = self.analysis.proof.columns.values()
        anchors = {c.name: c.anchor for c in known if c.anchor is not None}
        for parts in joined.values():
            torn = _torn(mask, [reads[p] for p in parts])
            flags[_TORN] = torn if _TORN not in flags else flags[_TORN] | torn
        return Batch(args, rows, columns, mask, flags, reads, joined, anchors)

    def _reads(self, args: Sequence[Any], columns: int) -> tuple[dict, dict]:
        """The columns of each slice along the sequence, from the sizes and ints of this call, and
        which slices are joined."""
        numbers: dict[Node, Any] = {i.node: args[i.index] for i in self.capture.inputs}

        def number(value: Any) -> Any:
            if not isinstance(value, Node):
                return value
            node = self.capture.resolve(value)
            if node not in numbers:
                given = map_arg(node.args, number)
                method = node.op == "call_method"
                numbers[node] = getattr(given[0], node.target)(*given[1:]) if method else node.target(*given)
            return numbers[node]

        found: dict[str, tuple[int, int]] = {"L": (0, columns)}
        joined: dict[str, tuple[str, ...]] = {}
        for name, line in self.analysis.proof.columns.items():
            if line.parts:
                joined[name] = line.parts
                if len({found[p][1] - found[p][0] for p in line.parts}) > 1:
                    raise Unfit("lengths", f"the slices {' and '.join(line.parts)} differ in length")
                continue
            low, high = found[line.parent]
            start, stop, _ = slice(number(line.cut.start), number(line.cut.stop)).indices(high - low)
            found[name] = (low + start, low + max(start, stop))
        return found, joined

    # -- the plan ----------------------------------------------------------------------------------

    def _keys(self, batch: Batch) -> list[Tensor]:
        """What makes two tokens the same: every per-token input that the flat graph reads."""
        keys = []
        for index in self._key_inputs():
            value = batch.args[index].detach()
            value = value.to(torch.uint8) if value.dtype == torch.bool else value
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
            min_sharing=self.options.min_sharing,
            flags=[*batch.flags.values(), *(batch.real(name).sum() for name in batch.joined)],
            reads=[r for s, r in batch.reads.items() if s != "L"],
        )  # fmt: skip

    def _plan(self, batch: Batch, layout: str) -> Plan:
        if self._embeddings_need_gradients(batch):
            layout = "varlen"  # a shared token would give all its gradient to one of its rows
        # What the plan is made of, first of all; two graphs may read the same tensors differently.
        padding = self.analysis.padding
        keys = self._key_inputs() if layout != "varlen" else []
        plan = _plans.get(
            [batch.args[i] for i in ([padding.index] if padding else []) + keys],
            (
                layout, self.options.positions, self.options.min_sharing,
                padding is None, len(keys), tuple(batch.flags), tuple(batch.joined.items()),
                # With their names, by which the plan remembers what was made of them.
                tuple(batch.reads.items()), tuple(batch.anchors.items()),
                batch.rows, batch.columns, batch.mask.device,
            ),
            lambda: self.make_plan(batch, layout),
        )  # fmt: skip
        for why, value in zip(batch.flags, plan.flags, strict=False):
            if value:
                raise Unfit(why, why)
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
        self._tiles = 0
        if parts is None:
            return self._outputs(batch, plan, flat, self._call(batch, plan, flat))
        return self._run_parts(batch, parts, flat)

    def _call(self, batch: Batch, plan: Plan, flat: FlatGraph) -> tuple[Tensor, ...]:
        compiled = compile_flat(flat, self.options.inner)
        results = compiled(*self.arguments(batch, plan, flat))
        self.record.compiles[f"flat ({flat.kernel})"] = compiled.compiles
        if flat.tail is not None:
            late = self._run_tail(batch, plan, flat.tail, results)
            return (*results[: flat.tail.after], *late)
        return results

    def _run_tail(
        self, batch: Batch, plan: Plan, tail: TailGraph, results: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The results of the tail, from what the flat graph leaves to it, in tiles of tokens."""
        compiled = compile_flat(tail, self.options.inner)

        def rest(logits: Tensor, *others: Tensor) -> Any:
            given = iter(others)
            values = [
                logits if i is None else numbers[i.index] if isinstance(i, Scalar) else next(given)
                for i in tail.inputs
            ]
            dims = [tail.dim if i is None else d for i, d in zip(tail.inputs, all_dims, strict=True)]
            for value, dim in zip(values, dims, strict=True):
                if dim is not None:
                    compat.mark_dynamic(value, dim)
            found = compiled(*values)
            self.record.compiles["tail"] = compiled.compiles
            return found

        # Python floats: when one changes, Dynamo compiles once more, for all.
        numbers = {i.index: batch.args[i.index].item() for i in tail.inputs if isinstance(i, Scalar)}
        all_dims = [
            i.dim if isinstance(i, Entering) and i.part is not None else None for i in tail.inputs
        ]
        entering = [
            (batch.args[i] if isinstance(i, int) else self._enter(batch, plan, tail, i, results), dim)
            for i, dim in zip(tail.inputs, all_dims, strict=True)
            if i is not None and not isinstance(i, Scalar)
        ]
        hidden = self._enter(batch, plan, tail, tail.hidden, results)
        self._tiles += len(tiles.tile_bounds(hidden.shape[tail.hidden.dim], tail.width))
        return tiles.run(
            rest,
            hidden,
            batch.args[tail.weight],
            None if tail.bias is None else batch.args[tail.bias],
            [value for value, _ in entering],
            [dim for _, dim in entering],
            tail.hidden.dim,
            tail.dims,
        )

    def _enter(
        self, batch: Batch, plan: Plan, tail: TailGraph, item: Entering, results: Sequence[Tensor]
    ) -> Tensor:
        """What enters the tail, with an entry for each of its tokens."""
        value = results[item.result]
        if item.part is None:
            return value
        index = self._tail_index(batch, plan, tail.columns, item)
        if index is None:
            return value
        if not value.is_floating_point():
            return value.index_select(item.dim, index)
        # A token that several rows read, the last of a shared prompt, gets the sum of its gradients.
        return _Scatter.apply(value.movedim(item.dim, 0), index).movedim(0, item.dim)

    def _tail_index(
        self, batch: Batch, plan: Plan, columns: str, item: Entering
    ) -> Tensor | None:
        """Which token of the line that a value has, each of the tail's has; None for itself."""

        def build() -> Tensor | None:
            index = None
            if columns in batch.joined and item.part != columns:
                index = self._entries(batch, plan, columns).index[item.part]
            line = item.part
            while line != item.line:
                step = self._read_index(batch, plan, line)
                index = step if index is None else step[index]
                line = self.analysis.proof.columns[line].parent
            return index

        return plan.remember(("tail", columns, item.part, item.line), build)

    def arguments(self, batch: Batch, plan: Plan, flat: FlatGraph) -> list[Any]:
        """What the flat graph takes, in order."""
        values: list[Any] = []
        for key in flat.inputs:
            if key[0] == "input":
                values.append(batch.args[key[1]])
            elif key[0] == "token":
                values.append(_gather(batch, plan, batch.args[key[1]], key[2]))
            elif key[0] == "positions":
                values.append(compat.mark_dynamic(self._positions(plan), 0))
            elif key[0] == "read":
                values.append(compat.mark_dynamic(self._read_index(batch, plan, key[1]), 0))
            elif key[0] == "entry":
                entries = self._entries(batch, plan, key[1])
                values.append(compat.mark_dynamic(entries.index[key[2]], 0))
            else:
                values.append(kernels.KERNELS[flat.kernel].inputs(plan, key[1])[key[2]])
        return values

    def _read_of(self, batch: Batch, plan: Plan, columns: str) -> Read:
        return plan.reads[[s for s in batch.reads if s != "L"].index(columns)]

    def _read_index(self, batch: Batch, plan: Plan, columns: str) -> Tensor:
        """Which of its parent's tokens a slice reads: of those stored, or of those another one read."""
        parent = self.analysis.proof.columns[columns].parent
        if columns in batch.joined:
            return self._entries(batch, plan, columns).index[parent]
        read = self._read_of(batch, plan, columns)
        if parent == "L":
            return read.index
        return plan.remember(
            ("within", columns), lambda: _within(self._read_of(batch, plan, parent), read, plan.length)
        )

    def _entries(self, batch: Batch, plan: Plan, columns: str) -> Entries:
        parts, known = batch.joined[columns], self.analysis.proof.columns
        count = _entry_counts(batch, plan)[columns]

        def build() -> Entries:
            slots = {p: self._read_of(batch, plan, p).slot for p in parts}
            parent = known[columns].parent
            if parent:  # a slice of joined slices
                low, high = batch.reads[parts[0]]
                start = batch.reads[known[parts[0]].parent][0]
                whole = self._entries(batch, plan, parent)
                slots[parent] = whole.slot[:, low - start : high - start]
            return _pair(slots, batch.real(columns), count)

        return plan.remember(("entries", columns), build)

    def _positions(self, plan: Plan) -> Tensor:
        """[n, 128]"""
        if self.options.positions == "row":
            return plan.remember("positions", lambda: plan.depth.view(-1, BLOCK).clone())
        return plan.remember("columns", lambda: plan.source.view(-1, BLOCK) % plan.columns)

    def _outputs(
        self, batch: Batch, plan: Plan, flat: FlatGraph, results: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        outputs: list[Any] = []
        for output in flat.outputs:
            if output.kind == "input":
                outputs.append(batch.args[output.value])
            elif output.kind == "plain":
                outputs.append(_like_captured(results[output.value], output))
            elif output.kind == "size":
                outputs.append(self.analysis.roles.at(output.value, self.sizes(batch)))
            elif output.kind in ("padded", "merged"):
                slot = self._slot(batch, plan, output.columns)
                if output.late and output.columns != flat.tail.columns:
                    slot = self._slot(batch, plan, flat.tail.columns)
                    slot = torch.where(batch.real(output.columns), slot, -1)
                outputs.append(_scatter(_like_captured(results[output.value], output), slot, output.kind))
            else:
                outputs.append(output.value)
        return tuple(outputs)

    def _slot(self, batch: Batch, plan: Plan, columns: str) -> Tensor:
        if columns in batch.joined:
            return self._entries(batch, plan, columns).slot
        return plan.slot if columns == "L" else self._read_of(batch, plan, columns).slot

    def sizes(self, batch: Batch) -> dict[str, int]:
        """The symbols of sizes in this batch."""
        lines = {c.symbol: batch.width(c.name) for c in self.analysis.proof.columns.values()}
        return {"B": batch.rows, "L": batch.columns} | lines

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
            why = f"a row of {plan.longest} tokens exceeds the cap of {cap} tokens ({what})"
            raise Unfit("cap", why)
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
            parts.append(self.make_plan(part, plan.layout))  # its own: it is told its rows
            parts[-1].remember("rows", lambda rows=rows: rows)
        return parts

    def part(self, batch: Batch, rows: Tensor) -> Batch:
        """Some rows of a batch, by their numbers."""
        args = list(batch.args)
        for item in self._tokens:
            args[item.index] = args[item.index][rows]
        return Batch(
            args, len(rows), batch.columns, batch.mask[rows], {}, batch.reads, batch.joined,
            batch.anchors,
        )  # fmt: skip

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
                width = batch.width(output.columns)
                whole = torch.cat([v.unflatten(0, (-1, width)) for v in values])
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
    ) -> verify.Outcome:
        """Raises `Fallback` where the packed result is wrong, now and from now on."""
        extent = _extent(batch, plan)
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
            self._tell(f"{id(self)} memory", f"{why}, which is left for a later batch")
            return verify.Outcome()
        self.record.verifications += outcome.records
        if outcome.note is not None:
            self._tell(f"{self.record.model} padding", f"{outcome.note}.")
        if outcome.wrong is not None:
            self._found_wrong(outcome.wrong, extent, verdict, small=outcome.small)
        verdict.passed(extent) if outcome.passed else verdict.left_open()
        return outcome

    def _found_wrong(
        self, wrong: report.Verification, extent: Extent, verdict: Verdict, *, small: bool
    ) -> NoReturn:
        what = "gradients" if wrong.gradients else "results"
        why = (
            f"the {what} of layout {wrong.layout} differ from those of the captured graph by "
            f"{wrong.max_error:.3g}, allowed {wrong.tolerance:.3g} ({wrong.why})"
        )
        verdict.failed(extent, why, small=small)
        end = "for good" if verdict.off else "from these lengths on"
        self._tell(
            f"{id(self)} {wrong.layout} {what} wrong",
            f"{why}. For these parameters it runs as captured {end}, this batch included. Please "
            'report it with fx_packing.report(); options={"layout": "padded"} or enabled=False switches '
            "packing off.",
        )
        raise Fallback(f"a check failed: {why}")

    def _tell(self, key: str, text: str) -> None:
        """A warning for when the call has its result: where warnings are errors, one in its midst would
        pass for a packed graph that failed."""
        self._told.append((key, f"{self.record.title}: {text}"))


_TORN = (
    "slices side by side read a place without a token, where the other has a token that is not its row's "
    "first: such numbers belong to no token. Prompts padded on the right, before their completions, do so "
    "(pad them on the left), other holes in the mask, and shifts by more than one"
)


def _torn(mask: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """Whether, of slices side by side, the first has a hole where another has a token with a token
    before it in its row."""
    first, *others = sorted(ranges)
    hole, place = ~mask[:, slice(*first)], mask.cumsum(1)
    found = [(mask[:, slice(*r)] & (place[:, slice(*r)] > 1) & hole).any() for r in others]
    return torch.stack(found).any() if found else mask.new_zeros(())


@dataclass
class Entries:
    """Slices side by side: one entry for each position at which all of them have a token."""

    # slice, or the joined ones that these are a slice of -> [N] int64, which of its tokens each has
    index: dict[str, Tensor]
    slot: Tensor  # [B, n] int64, the entry of each position; -1 where there is none


def _pair(slots: dict[str, Tensor], real: Tensor, count: int) -> Entries:
    flat = real.flatten()
    place = flat.cumsum(0) - 1
    size = max(count, 2)  # compilers specialise on 1
    where = torch.zeros(size + 1, dtype=torch.int64, device=flat.device)
    numbers = torch.arange(len(flat), device=flat.device)
    where.scatter_(0, torch.where(flat, place, size), numbers)
    index = {p: s.flatten()[where[:size]].clamp_min(0) for p, s in slots.items()}
    return Entries(index, torch.where(flat, place, -1).view_as(real))


def _within(parent: Read, child: Read, stored: int) -> Tensor:
    """``[S]`` int64: where the tokens that a slice reads are among those that its parent read."""
    place = torch.zeros(stored, dtype=torch.int64, device=parent.index.device)
    numbers = torch.arange(len(parent.index), device=parent.index.device)
    # What fills up the parent's index repeats token 0: the first place of a token counts.
    place.scatter_reduce_(0, parent.index, numbers, "amin", include_self=False)
    return place[child.index]


def _entry_counts(batch: Batch, plan: Plan) -> dict[str, int]:
    """How many entries slices side by side have: behind the batch's own flags, as `make_plan` gives them."""
    return dict(zip(batch.joined, plan.flags[len(batch.flags) :], strict=True))


def _extent(batch: Batch, plan: Plan) -> Extent:
    read = max((*(r.tokens for r in plan.reads), *_entry_counts(batch, plan).values()), default=0)
    return Extent(plan.run_tokens, plan.longest, plan.rows, read)


def _gather(batch: Batch, plan: Plan, value: Tensor, dim: int) -> Tensor:
    """[1, n, 128, ...] from [B, L, ...] or [1, L, ...], or [n, 128] from [L] (`dim` is 0).

    No view where that can be, since Dynamo traces a view with its base.
    """
    source = plan.source.view(-1, BLOCK)
    if value.shape[0] != batch.rows or dim == 0:  # one row for all: a number a column
        columns = source % plan.columns
        return compat.mark_dynamic(value[:, columns] if dim else value[columns], dim)
    flat = value.flatten(0, 1)
    if value.is_floating_point():  # embeddings: their backward is one addition of rows
        flat = flat.index_select(0, plan.source).view(1, *source.shape, *flat.shape[1:])
    else:
        flat = flat[source.unsqueeze(0)]
    return compat.mark_dynamic(flat, 1)


def _like_captured(result: Tensor, output: Output) -> Tensor:
    """Without a gradient where the captured graph gives none: a flat graph may compute it with others."""
    return result.detach() if output.detached else result


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
    """The plans of the last few batches: old, reference and new passes of one step share them.

    A batch is known by its content, which costs a comparison and one host synchronisation: neither
    identity nor version tells that a buffer was written to through ``.data``, NumPy, a kernel or another
    process, and micro-batches cut anew for each pass are new tensors of old content.
    """

    def __init__(self, most: int = 8) -> None:
        self._plans: list[tuple[tuple, list[Tensor], Plan]] = []  # the latest last
        self._most, self._lock = most, threading.Lock()

    def get(self, sources: list[Tensor], facts: tuple, make: Callable[[], Plan]) -> Plan:
        """The plan made of these tensors, ``[B, L]``, and facts; `make` makes one that is not known."""
        if any(t.dim() > 2 for t in sources):
            return make()  # embeddings passed in: a copy would be as large as they are
        key = (facts, tuple((t.shape, t.dtype, t.device) for t in sources))
        with torch.inference_mode(False), torch.no_grad(), self._lock:
            sources = [_bits(t) for t in sources]
            alike = [entry for entry in reversed(self._plans) if entry[0] == key]
            found = next(compress(alike, _equal(sources, [copies for _, copies, _ in alike])), None)
            if found is not None:
                self._plans = [e for e in self._plans if e is not found] + [found]
                return found[2]
            copies = [t.clone() for t in sources]  # before the plan: it is made of what is copied
        plan = make()
        with self._lock:
            self._plans = [*self._plans, (key, copies, plan)][-self._most :]
        return plan

    def clear(self) -> None:
        with self._lock:
            self._plans = []


def _equal(sources: list[Tensor], known: list[list[Tensor]]) -> list[bool]:
    """Of each list of copies, whether it equals the sources."""
    if not sources or not known:
        return [True] * len(known)
    same = [torch.stack([(a == b).all() for a, b in zip(sources, copies, strict=True)]) for copies in known]
    return torch.stack(same).all(1).tolist()


def _bits(tensor: Tensor) -> Tensor:
    """Floats as the integers of their bits, as plans compare them: 0.0 and -0.0 are two."""
    return tensor.view(INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


_plans = _PlanCache()


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def forget() -> None:
    """Drop cached plans, and what the callables that Dynamo may still hold have seen so far."""
    _plans.clear()
    for compiled in list(_alive):
        compiled.forget()


class AsCaptured:
    """What Dynamo calls for a refused graph: the captured graph, compiled by the inner backend."""

    def __init__(self, compiled: Any, record: report.GraphReport, reason: str, warn: bool) -> None:
        self.compiled, self.record, self.reason, self.warn = compiled, record, reason, warn
        _alive.add(self)

    def forget(self) -> None:
        """As if nothing had run yet."""
        self.record = report.fresh(self.record)

    def __call__(self, *args: Any) -> Any:
        result = self.compiled(*args)
        given = (a for a in args if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter))
        shape = next((a.shape for a in given if a.dim() >= 2), (0, 0))
        tokens = shape[0] * shape[1]
        self.record.ran(report.Run("padded", shape[0], tokens, None, tokens, self.reason))
        compat.count("ran_padded")
        if self.warn:
            model, why = self.record.model, self.reason
            report.warn_once(f"{model} {why}", f"{self.record.title} runs as captured: {why}")
        return result
