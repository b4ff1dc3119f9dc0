"""What was captured, rewritten and run: always one call away."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import compat

log = logging.getLogger(__name__.rpartition(".")[0])


@dataclass
class AttentionRecord:
    """One attention of a captured graph, as it was understood."""

    kind: str  # "sdpa" or "eager"
    mask: str  # "causal" or "causal, window 4096", and whether a padding mask is read
    window: int | None
    softcap: float | None
    sinks: bool
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass
class Run:
    """One execution. Tokens: padded B * L, real (mask 1), run (those that the flat graph computed)."""

    layout: str
    rows: int
    padded_tokens: int
    real_tokens: int | None
    run_tokens: int
    reason: str | None = None
    kernel: str | None = None
    bins: int = 1
    tiles: int = 0  # in which the tail after the LM head ran; 0 where there is none


@dataclass
class Verification:
    """One comparison of a rewritten graph with the captured one."""

    layout: str
    max_error: float | None
    tolerance: float | None
    gradients: bool
    passed: bool
    why: str


@dataclass
class GraphReport:
    """One captured graph."""

    name: str
    model: str = ""  # class of the outermost module, if any
    rewritten: bool = False
    reason: str | None = None
    attention: list[AttentionRecord] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    last: Run | None = None
    verifications: list[Verification] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    compiles: dict[str, int] = field(default_factory=dict)  # of the inner compiler, per graph

    @property
    def title(self) -> str:
        """The name, and whose graph it is."""
        return f"{self.name} ({self.model})" if self.model else self.name

    def ran(self, run: Run) -> None:
        """Record one execution."""
        self.runs[run.layout] = self.runs.get(run.layout, 0) + 1
        self.last = run
        _list(self)  # a compiled callable outlives a `reset`
        log.debug("%s ran %s", self.title, run)


@dataclass
class Outside:
    """Calls of a compiled module that reached no captured graph: `calls` of them, and why. Those of a
    compiled function cannot be counted: 0."""

    model: str
    why: str
    calls: int = 0


@dataclass
class Report:
    """A list of captured graphs, and calls that reached none; ``str()`` is a table, `to_json` the same
    data."""

    graphs: list[GraphReport] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as a JSON object."""
        graphs, outside = map(asdict, self.graphs), map(asdict, self.outside)
        return json.dumps({"graphs": list(graphs), "outside": list(outside)}, default=str)

    def __str__(self) -> str:
        if not (self.graphs or self.outside):
            return "fx_packing: no graph was captured by backend 'grpo_pack' in this process."
        return "\n".join([*map(_lines, self.graphs), *map(_outside_lines, self.outside)])


def _outside_lines(outside: Outside) -> str:
    calls = f"{outside.calls} calls" if outside.calls else "calls that nobody could count"
    return f"outside ({outside.model}): {calls}\n  reason        {outside.why}"


def _lines(graph: GraphReport) -> str:
    state = "packed" if graph.rewritten else "runs as captured"
    if graph.rewritten and graph.last is not None and graph.last.layout == "padded":
        state = "can be packed, but last ran as captured"
    lines = [f"{graph.title}: {state}"]
    if graph.reason:
        lines.append(f"  reason        {graph.reason}")
    kinds: dict[str, int] = {}
    for a in graph.attention:
        text = (
            f"{a.kind}, {a.mask}, {a.heads} heads on {a.kv_heads}, head_dim {a.head_dim}, "
            f"scale {a.scale:.4g}" + (f", softcap {a.softcap:g}" if a.softcap else "")
        )
        kinds[text] = kinds.get(text, 0) + 1
    lines += [f"  attention     {n} x {text}" for text, n in kinds.items()]
    if graph.runs:
        lines.append("  runs          " + ", ".join(f"{k}: {v}" for k, v in graph.runs.items()))
    if graph.compiles:
        lines.append("  compiled      " + ", ".join(f"{k}: {v}" for k, v in graph.compiles.items()))
    run = graph.last
    if run is not None:
        real = "" if run.real_tokens is None else f"{run.real_tokens} real, "
        tokens = f"{run.padded_tokens} padded, {real}{run.run_tokens} run"
        saved = run.padded_tokens / max(run.run_tokens, 1)
        lines.append(
            f"  last run      {run.layout}" + (f" ({run.kernel})" if run.kernel else "")
            + f": {run.rows} rows, tokens {tokens} ({saved:.2f}x fewer)"
            + (f" in {run.bins} parts" if run.bins > 1 else "")
        )  # fmt: skip
        if run.reason:
            lines.append(f"                {run.reason}")
    for v in graph.verifications[-3:]:
        error = "-" if v.max_error is None else f"{v.max_error:.3g}"
        allowed = "-" if v.tolerance is None else f"{v.tolerance:.3g}"
        lines.append(
            f"  verified      {v.layout}{', gradients' if v.gradients else ''}: "
            f"{'passed' if v.passed else 'FAILED'}, error {error}, allowed {allowed} ({v.why})"
        )
    lines += [f"  guard         {g}" for g in graph.guards]
    return "\n".join(lines)


_graphs: deque[GraphReport] = deque(maxlen=256)
_outside: dict[tuple[str, str], Outside] = {}
_lock = threading.Lock()
_warned: set[str] = set()


def new_graph(model: str = "") -> GraphReport:
    """A record for a newly captured graph, part of `report()` from now on."""
    with _lock:
        graph = GraphReport(f"graph {len(_graphs)}", model)
        _graphs.append(graph)
    return graph


def report() -> Report:
    """Everything that ``grpo_pack`` compiled and ran in this process since the last `reset`."""
    with _lock:
        return Report(list(_graphs), [replace(o) for o in _outside.values()])


def ran_outside(model: str, why: str, calls: int = 1) -> None:
    """Record calls that reached no captured graph; none yet where a reason is known before the calls."""
    with _lock:
        _outside.setdefault((model, why), Outside(model, why)).calls += calls


def _list(graph: GraphReport) -> None:
    with _lock:
        if not any(g is graph for g in _graphs):
            _graphs.append(graph)


def forget() -> None:
    """Drop all records and counts, and let each warning be given once more."""
    with _lock:
        _graphs.clear()
        _outside.clear()
        _warned.clear()
    compat.forget_counts()


def fresh(graph: GraphReport) -> GraphReport:
    """The record of the same captured graph with nothing run yet."""
    return replace(graph, runs={}, last=None, verifications=[], compiles={})


def drop(graphs: list[GraphReport]) -> None:
    """Take records out of `report()`, and what they counted out of the counts."""
    with _lock:
        kept = [g for g in _graphs if not any(g is d for d in graphs)]
        _graphs.clear()
        _graphs.extend(kept)
    for graph in graphs:
        compat.count("rewritten" if graph.rewritten else "refused", -1)
        for layout, times in graph.runs.items():
            compat.count(f"ran_{layout}", -times)


def warn_once(key: str, message: str) -> None:
    """One ``UserWarning`` a cause, and a log line."""
    log.info(message)
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(f"fx_packing: {message}", stacklevel=3)


def describe_attention(attention: list[Any]) -> list[AttentionRecord]:
    """The records of a list of `passes.attention.Attention`."""
    records = []
    for a in attention:
        mask = "causal" if a.window is None else f"causal, window {a.window}"
        mask += ", padding mask" if a.mask is not None else ""
        records.append(
            AttentionRecord(
                a.kind, mask, a.window, a.softcap, False, a.heads, a.kv_heads, a.head_dim, a.scale
            )
        )
    return records
