"""``torch.compile(model, backend="grpo_pack")``: the whole way through, on one screen.

capture - roles - attention - live - proof - (a refusal, with its reason)     once a captured graph
flag - plan - cap - layout - gather - flat graph - scatter - (first: verify)  each call, `runtime.py`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from . import cap, capture, compat, inner, passes, report, runtime, switch, watch
from .errors import PackingError, Refused
from .options import Options

_GENERATION = (
    "a KV cache is passed in (generation): this call runs uncompiled, later ones run eagerly, past Dynamo"
)
_FSDP = (
    "FSDP has hooks on modules inside what is compiled, and Dynamo breaks the graph at each; call "
    "fully_shard on the compiled module or on what holds it, not on its layers"
)


class GrpoPack:
    """The backend object, found through the entry-point group ``torch_dynamo_backends``."""

    __name__ = "grpo_pack"

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """Compile a captured graph. Raises ValueError for bad options, PackingError if asked to."""
        parsed = Options.parse(options)
        compat.reset_with_dynamo(grpo_pack)
        record = report.new_graph(compat.model_being_captured())
        compat.guard_on_switch()
        compat.dump_graph("grpo_pack.captured", lambda: gm)
        if watch.install(bypass=parsed.enabled and parsed.on_refuse == "fallback"):
            return self._refuse(gm, example_inputs, replace(parsed, inner="eager"), record, _GENERATION)
        try:
            analysis = self._analyse(gm, example_inputs, parsed)
        except Refused as refusal:
            reason = f"{_FSDP} ({refusal})" if compat.fsdp_is_splitting() else str(refusal)
            return self._refuse(gm, example_inputs, parsed, record, reason, warn=True)
        record.rewritten = True
        record.attention = report.describe_attention(analysis.attention)
        record.guards = cap.guard(analysis, parsed)
        report.log.info("%s is packed: %d attentions", record.title, len(record.attention))
        compat.count("rewritten")
        return watch.entered(runtime.Packed(analysis, parsed, record))

    def _analyse(self, gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> passes.Analysis:
        if not (switch.ENABLED and options.enabled):
            raise Refused("switched off (enabled=False, fx_packing.disabled or FX_PACKING=0)")
        if compat.ddp_is_splitting():
            raise Refused(
                "DDPOptimizer splits the graph between its inputs and its outputs; set "
                "torch._dynamo.config.optimize_ddp = False"
            )
        captured = capture.read(gm, example_inputs)
        try:
            analysis = passes.analyse(captured)
        except Refused as refusal:
            if captured.rows != captured.columns or captured.rows == 1:
                raise
            raise Refused(
                f"B and L are the same size ({captured.rows}) at capture, and could not be told apart; a "
                f"batch of another shape is captured anew. As far as it was understood, {refusal}"
            ) from None
        flat = analysis.flat("segments")
        compat.dump_graph("grpo_pack.flat", lambda: flat.gm)
        if options.layout in ("auto", "prefix"):  # what prefixes run on CUDA; elsewhere they run `flat`
            compat.dump_graph("grpo_pack.prefix", lambda: analysis.flat("flex").gm)
        return analysis

    def _refuse(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        record: report.GraphReport,
        reason: str,
        warn: bool = False,
    ) -> Callable[..., Any]:
        record.reason = reason
        report.log.info("%s runs as captured: %s", record.title, reason)
        compat.count("refused")
        active = switch.ENABLED and options.enabled
        if active and options.on_refuse == "raise":
            raise PackingError(f"grpo_pack: {reason}")
        warn = warn and active and passes.attention.has_attention(gm)  # no piece that nobody meant to pack
        compiled = inner.compile_captured(gm, example_inputs, options.inner)
        return watch.entered(runtime.AsCaptured(compiled, record, reason, warn))

    def reset(self) -> None:
        """Forget verdicts, counters, plans and compiled flat graphs; called by torch._dynamo.reset."""
        report.forget()
        watch.forget()
        inner.forget()
        runtime.forget()


grpo_pack = GrpoPack()


def reset() -> None:
    """Forget all verdicts, counters and compiled flat graphs; also called by ``torch._dynamo.reset``."""
    grpo_pack.reset()


def explain(fn_or_model: Callable[..., Any], *args: Any, **kwargs: Any) -> report.Report:
    """Capture and rewrite afresh, run once under ``no_grad``, and report; nothing is left behind.

    The options of an already compiled model are not used: pass the model, or a function that calls
    it. Raises whatever the function raises.
    """
    target = getattr(fn_or_model, "_orig_mod", fn_or_model)
    graphs: list[report.GraphReport] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = GrpoPack()(gm, example_inputs, options={"inner": "eager"})
        graphs.append(report.report().graphs[-1])
        return compiled

    # A code object of its own: Dynamo's cache entries go with it, the model's own stay as they are.
    explained = inner.own_function(target, "explained")
    try:
        with torch.no_grad(), inner.kept_as_it_was():
            torch.compile(explained, backend=backend)(*args, **kwargs)
    finally:
        report.drop(graphs)
    return report.Report(graphs)
