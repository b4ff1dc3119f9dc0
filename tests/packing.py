"""What tests of the whole way need: a compiled model, a batch with shared prompts, and the proof that
the packed graph really ran. A batch that falls back to the captured graph passes every comparison of
numbers, so no test may compare numbers alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

import fx_packing
from fx_packing import inner
from fx_packing.report import GraphReport

BUDGET = 1.15  # the default of the option min_sharing


def pack(model: Any, **options: Any) -> Any:
    """`model` under ``grpo_pack``, its flat graph run as plain Python unless said otherwise."""
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", True)
    options = {"inner": "eager"} | options
    return torch.compile(
        model, backend="grpo_pack", dynamic=dynamic, fullgraph=fullgraph, options=options
    )


def stored_tokens(ids: Tensor, mask: Tensor, *also: Tensor) -> int:
    """How many distinct (prefix, token) pairs a batch has, by plain Python sets. What `also` holds
    for a token (its position, say) is part of the token."""
    pairs: set[tuple] = set()
    for row in range(ids.shape[0]):
        real = mask[row].bool()
        columns = [v[row][real].tolist() for v in (ids, *also)]
        path = tuple(zip(*columns, strict=True))
        pairs |= {path[: i + 1] for i in range(len(path))}
    return len(pairs)


def expected_run(layout: str, ids: Tensor, mask: Tensor, *also: Tensor) -> tuple[str, int]:
    """(layout, run_tokens) that a batch must show under the option `layout`."""
    real, stored = int(mask.sum()), stored_tokens(ids, mask, *also)
    if layout == "auto":
        layout = "prefix" if stored < real and real >= BUDGET * stored else "varlen"
    return layout, stored if layout == "prefix" else real


def assert_packed(
    layout: str,
    ids: Tensor,
    mask: Tensor,
    *also: Tensor,
    graph: GraphReport | None = None,
    reason: str | None = None,
) -> GraphReport:
    """The last captured graph (or `graph`) packed this very batch, and was checked."""
    graph = graph or fx_packing.report().graphs[-1]
    assert graph.rewritten, graph.reason
    assert graph.last is not None
    layout, tokens = expected_run(layout, ids, mask, *also)
    assert graph.last.layout == layout
    assert graph.last.reason is None if reason is None else reason in graph.last.reason
    assert graph.last.run_tokens == tokens
    assert graph.last.real_tokens == int(mask.sum())
    assert graph.last.padded_tokens == mask.numel()
    assert graph.last.run_tokens < mask.numel() or bool(mask.all())
    assert set(graph.runs) <= {"varlen", "prefix"}, graph.runs
    checks = [v for v in graph.verifications if v.layout == layout]
    assert checks and checks[-1].passed, checks
    assert not any(v.max_error is not None and not v.passed for v in graph.verifications)
    return graph


def shared_batch(padding: str = "left", *, length: int = 26, seed: int = 0) -> tiny.Batch:
    """Seven rows, padded as `tiny.batch` pads: two prompts with three completions each, one of them
    the beginning of another (except where every row is full), and a row with nothing in common."""
    g = tiny.generator(seed)

    def draw(n: int) -> Tensor:
        return torch.randint(0, tiny.VOCAB, (n,), generator=g)

    rows = []
    for prompt, completions in ((9, (4, 11, 6)), (5, (8, 3, 15))):
        start = draw(prompt)
        answers = [draw(n) for n in completions]
        answers[0] = answers[1][: len(answers[0])].clone() if padding != "none" else answers[0]
        rows += [torch.cat([start, answer]) for answer in answers]
    rows.append(draw(12))
    if padding == "none":
        rows = [torch.cat([row, draw(length - len(row))]) for row in rows]
    batch = tiny.batch(padding, length=length, lengths=[len(r) for r in rows], seed=g)
    ids = batch.ids.clone()
    ids[batch.mask.bool()] = torch.cat(rows)
    return tiny.Batch(ids, batch.mask)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient of `loss`; fails where a parameter has none."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_gradients(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Every gradient, relative to the largest entry of the wanted one."""
    top = max(float(w.abs().max()) for w in want.values())
    assert top > 0 and got.keys() == want.keys()
    for name, expected in want.items():
        scale = max(float(expected.abs().max()), 1e-4 * top)
        error = float((got[name] - expected).abs().max()) / scale
        assert error < tolerance, f"{name}: {error:.3g}"


def assert_tail(
    fn: Any, model: Any, ids: Tensor, mask: Tensor, *args: Any, known: Tensor | None = None, **options: Any
) -> GraphReport:
    """``fn(model, ids, mask, *args)``, a number a token in float64, is packed and runs in tiles: the
    values where a token has one before it (or at `known`), zeros elsewhere, and all gradients."""
    run = pack(fn, **{"inner": "aot_eager"} | options)
    got, want = run(model, ids, mask, *args), fn(model, ids, mask, *args)
    if known is None:
        n = want.shape[1]
        before = F.pad(mask, (1, 0))[:, -n - 1 : -1]
        known = mask[:, -n:] * before
    known = known.bool()
    assert got.shape == want.shape and got.dtype == want.dtype == torch.float64
    assert float((got - want)[known].detach().abs().max()) < 1e-10
    assert bool((got[~known] == 0).all())
    weights = torch.randn(known.shape, generator=tiny.generator(4), dtype=torch.float64) * known
    found, exact = (gradients(model, (v * weights).sum()) for v in (got, want))
    assert_gradients(found, exact, 1e-10)
    graph = fx_packing.report().graphs[-1]
    assert graph.rewritten, graph.reason
    assert graph.last.tiles and graph.verifications and all(v.passed for v in graph.verifications)
    return graph


# -- models that are compiled once for many tests --------------------------------------------------


def compiled(**options):
    """``run(model, *args, **kwargs)``, whose captured graphs count against no limit but its own."""
    all_families_known()
    function = inner.own_function(lambda model, *args, **kwargs: model(*args, **kwargs), "model")
    return pack(function, **options)


@functools.cache
def all_families_known() -> None:
    """transformers keeps a list of families that is part of Dynamo's guards: a new one captures anew."""
    for family in tiny.FAMILIES:
        tiny.build(family)


def forget_runs() -> None:
    """As if nothing had run; what is compiled stays."""
    kept = dict(inner._flats)
    fx_packing.reset()
    inner._flats.update(kept)


@contextmanager
def messages(*, notes: bool = False) -> Iterator[list[str]]:
    """What fx_packing warns of inside; with `notes` also that padding moves the numbers of a model."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    texts = [str(w.message) for w in seen if issubclass(w.category, UserWarning)]
    texts = [text for text in texts if text.startswith("fx_packing")]
    found += [text for text in texts if notes or "padding moves its numbers" not in text]
