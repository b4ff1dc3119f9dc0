"""Arbitrary masks, and arbitrary orders of what a program may do with a compiled model: each result is
right, and the report says truly what ran.

The model has learned positions, so the captured padded batch and its rows alone give other numbers:
which of the two ran can be told from the result.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packing import compiled, expected_run, forget_runs, stored_tokens
from torch import Tensor

import fx_packing
from fx_packing.attention import KERNELS
from fx_packing.report import GraphReport

TOLERANCE = 1e-5  # of the largest result, or of the largest gradient


@pytest.fixture(autouse=True)
def sizes_of_one_are_captured_by_themselves():
    """A handful of sizes, gradient modes and dtypes are more than Dynamo's eight, which is its own."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def decoder(seed: int = 0) -> tiny.PlainDecoder:
    return tiny.PlainDecoder(positions="learned", kv_heads=2, seed=seed)


# -- batches ---------------------------------------------------------------------------------------


@st.composite
def batches(draw, rows: int = 5, columns: int = 8) -> tiny.Batch:
    """Any mask at all; few different tokens, so that rows repeat and share what they begin with."""
    b, length = draw(st.integers(1, rows)), draw(st.integers(2, columns))
    line = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    real = st.one_of(
        st.lists(st.booleans(), min_size=length, max_size=length),
        st.integers(0, length).map(lambda n: [False] * n + [True] * (length - n)),
        st.integers(0, length).map(lambda n: [True] * n + [False] * (length - n)),
    )
    pool = draw(st.lists(st.tuples(line, real), min_size=1, max_size=b))
    chosen = draw(st.lists(st.integers(0, len(pool) - 1), min_size=b, max_size=b))
    ids, mask = zip(*(pool[i] for i in chosen), strict=True)
    return tiny.Batch(torch.tensor(ids), torch.tensor(mask).long())


def close(got: Tensor, want: Tensor, mask: Tensor) -> None:
    """Equal at real tokens, as far as float32 goes."""
    real = mask.bool()
    assert got.shape == want.shape and bool(got[real].isfinite().all())
    if bool(real.any()):
        scale = max(1.0, float(want[real].detach().abs().max()))
        assert float((got - want)[real].detach().abs().max()) < TOLERANCE * scale


def alone(model, batch: tiny.Batch) -> Tensor:
    """Each row by itself; zeros where no row has any token."""
    if not bool(batch.mask.any()):
        return torch.zeros(*batch.ids.shape, tiny.VOCAB)
    return tiny.per_row(model, *batch)


ONE_TOKEN = tiny.Batch(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))
NO_TOKEN = tiny.Batch(torch.tensor([[1, 2], [0, 0]]), torch.zeros(2, 2, dtype=torch.int64))
ALL_ALIKE = tiny.Batch(torch.ones(4, 6, dtype=torch.int64), torch.ones(4, 6, dtype=torch.int64))
HOLES = tiny.Batch(torch.tensor([[1, 0, 1, 2], [1, 1, 2, 2]]), torch.tensor([[1, 0, 1, 1], [1, 0, 1, 0]]))


@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
@pytest.mark.parametrize("dtype", (torch.int64, torch.bool, torch.float32), ids=str)
def test_any_mask(dtype, layout):
    model, packed = decoder(), compiled(dynamic=True, layout=layout, verify="always")
    warnings.filterwarnings("ignore", message="fx_packing.*padding moves its numbers")

    @settings(derandomize=True, deadline=None, database=None, max_examples=40)
    @given(batches())
    @example(ONE_TOKEN)
    @example(NO_TOKEN)
    @example(ALL_ALIKE)
    @example(HOLES)
    def check(batch):
        forget_runs()
        with torch.no_grad():
            got = packed(model, batch.ids, attention_mask=batch.mask.to(dtype))
        (graph,) = fx_packing.report().graphs
        if dtype.is_floating_point:  # refused: the model may add such a mask to its scores
            close(got, model(*batch), batch.mask)
            assert not graph.rewritten and "float" in graph.reason and graph.runs == {"padded": 1}
            return
        close(got, alone(model, batch), batch.mask)
        assert bool((got[batch.mask == 0] == 0).all())
        assert graph.runs == {layout: 1} and graph.last.reason is None
        assert graph.last.run_tokens == expected_run(layout, *batch)[1]
        assert graph.last.real_tokens == int(batch.mask.sum())
        assert all(check.passed or check.max_error is None for check in graph.verifications)
        # One row, or none, has no neighbour that it could be confused with.
        if int((batch.mask.sum(1) > 1).sum()) > 1 and stored_tokens(*batch) == int(batch.mask.sum()):
            assert graph.verifications[-1].passed, graph.verifications

    check()


# -- interleavings ---------------------------------------------------------------------------------

MODES = ("train", "eval", "no_grad", "inference")


@dataclass(frozen=True)
class Step:
    """One call of the compiled model. `goes_wrong`: the kernel raises once, or an id is out of range."""

    batch: tiny.Batch = field(repr=False)
    mode: str = "train"
    model: int = 0
    disabled: bool = False
    goes_wrong: str | None = None

    def __repr__(self) -> str:  # what hypothesis shows of a failure
        parts = [f"{self.batch.ids.tolist()}", f"{self.batch.mask.tolist()}", self.mode, f"{self.model}"]
        return f"Step({', '.join(parts)}, disabled={self.disabled}, goes_wrong={self.goes_wrong})"


steps = st.builds(
    Step,
    batches(),
    st.sampled_from(MODES),
    st.sampled_from((0, 0, 1)),
    st.sampled_from((False, False, False, True)),
    st.sampled_from((None, None, None, None, "kernel", "ids")),
)


class KernelDown(RuntimeError):
    """What a kernel may raise."""


@contextmanager
def kernel_fails_once() -> Iterator[list[int]]:
    """The next use of the kernel raises; the list says whether there was one."""
    real, used = KERNELS["segments"].inputs, []

    def inputs(plan, window):
        if not used:
            used.append(1)
            raise KernelDown("the kernel is down")
        return real(plan, window)

    KERNELS["segments"].inputs = inputs
    try:
        yield used
    finally:
        KERNELS["segments"].inputs = real


class Program:
    """Runs steps, and knows what each has to give and the report has to say."""

    def __init__(self, packed) -> None:
        self.packed, self.models = packed, [decoder(seed) for seed in (0, 1)]
        self.off: dict[int, set[str]] = {}  # graph -> the layouts in which an exception was met

    def run(self, step: Step) -> None:
        model, batch = self.models[step.model], step.batch
        model.train(step.mode == "train")
        before = self._counts()
        if step.goes_wrong == "ids" and bool(batch.mask.any()):
            ids = batch.ids.clone()
            ids[batch.mask.bool()] = tiny.VOCAB + 1
            with pytest.raises(IndexError), self._surroundings(step):
                self.packed(model, ids, attention_mask=batch.mask)
            assert self._counts() == before  # nothing ran, so nothing is said to have run
            return
        failing = kernel_fails_once() if step.goes_wrong == "kernel" else nullcontext([])
        with failing as used, self._surroundings(step):
            got = self.packed(model, batch.ids, attention_mask=batch.mask)
        graph = self._that_ran(before)
        self._assert_report(step, graph, bool(used))
        want = model(*batch) if graph.last.layout == "padded" else alone(model, batch)
        if step.mode == "train":
            self._assert_gradients(model, batch, got, want)
        assert got.requires_grad == (step.mode in ("train", "eval"))
        close(got.detach().clone(), want.detach(), batch.mask)

    @contextmanager
    def _surroundings(self, step: Step) -> Iterator[None]:
        mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(step.mode, nullcontext)
        off = fx_packing.disabled() if step.disabled else nullcontext()
        with mode(), off, warnings.catch_warnings():
            warnings.filterwarnings("error", message="fx_packing")
            for known in ("the kernel is down", "padding moves its numbers"):
                warnings.filterwarnings("ignore", message=f"fx_packing.*{known}")
            yield

    @staticmethod
    def _counts() -> dict[int, dict[str, int]]:
        return {id(g): dict(g.runs) for g in fx_packing.report().graphs if g.runs}

    def _that_ran(self, before: dict[int, dict[str, int]]) -> GraphReport:
        """Exactly one graph ran, exactly once, in the layout that it says."""
        grown = []
        for graph in fx_packing.report().graphs:
            old = before.get(id(graph), {})
            new = {k: n - old.get(k, 0) for k, n in graph.runs.items() if n != old.get(k, 0)}
            grown += [(graph, new)] if new else []
        ((graph, new),) = grown
        assert new == {graph.last.layout: 1}
        return graph

    def _assert_report(self, step: Step, graph: GraphReport, failed: bool) -> None:
        batch, last = step.batch, graph.last
        assert (last.rows, last.padded_tokens) == (len(batch.ids), batch.ids.numel())
        assert not [c for c in graph.verifications if c.max_error is not None and not c.passed]
        if step.disabled:
            assert last.layout == "padded" and "disabled" in last.reason and not failed
            return
        off = self.off.setdefault(id(graph), set())
        wanted, _ = expected_run("auto", *batch)
        layouts = [layout for layout in (wanted, "varlen") if layout not in off]
        assert failed == (step.goes_wrong == "kernel" and bool(layouts))
        if failed:
            off.add(layouts[0])
        if failed or not layouts:
            assert last.layout == "padded" and "the kernel is down" in last.reason
            return
        assert last.layout == layouts[0]
        assert (last.reason is None) == (layouts[0] == wanted)
        assert last.run_tokens == expected_run(layouts[0], *batch)[1]
        assert last.real_tokens == int(batch.mask.sum())
        assert last.layout in [check.layout for check in graph.verifications]

    @staticmethod
    def _assert_gradients(model, batch: tiny.Batch, got: Tensor, want: Tensor) -> None:
        weights = torch.randn(got.shape, generator=tiny.generator(3)) * batch.mask[..., None]
        parameters = list(model.parameters())
        got, want = (
            torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True)
            if x.requires_grad
            else [None] * len(parameters)
            for x in (got, want)
        )
        assert all(p.grad is None for p in parameters)
        got, want = (
            [torch.zeros_like(p) if g is None else g for g, p in zip(some, parameters, strict=True)]
            for some in (got, want)
        )
        top = max(float(g.abs().max()) for g in want)
        for a, b in zip(got, want, strict=True):
            assert float((a - b).abs().max()) <= TOLERANCE * max(float(b.abs().max()), 0.1 * top)


def test_any_order_of_steps():
    packed = compiled(dynamic=True, min_sharing=1.1)
    programs = itertools.count()
    seen: set[str] = set()

    @settings(derandomize=True, deadline=None, database=None, max_examples=30)
    @given(st.lists(steps, min_size=1, max_size=8))
    def check(program):
        forget_runs()
        next(programs)
        running = Program(packed)
        for step in program:
            running.run(step)
        seen.update(layout for g in fx_packing.report().graphs for layout in g.runs)

    check()
    assert next(programs) >= 30 and seen == {"varlen", "prefix", "padded"}
