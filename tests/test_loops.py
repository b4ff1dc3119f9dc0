"""Loops that take the batch's rows apart and stack what they make of each."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F
from packing import assert_packed, assert_tail, pack, shared_batch
from torch import nn

import fx_packing

KEEP = 7  # as many as there are rows


@pytest.fixture(scope="module")
def model():
    return tiny.PlainDecoder(hidden=32).double()


def packed(fn, **options):
    return pack(fn, **{"inner": "aot_eager"} | options)


def logps_of(row, ids):
    return row.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


# -- folded ----------------------------------------------------------------------------------------


def zipped(model, ids, mask):
    logits, found = model(ids, mask)[:, :-1], []
    for row_logits, row_ids in zip(logits, ids[:, 1:], strict=True):
        logps = row_logits.log_softmax(dim=-1)
        found.append(torch.gather(logps, dim=1, index=row_ids.unsqueeze(1)).squeeze(1))
    return torch.stack(found)


def by_number(model, ids, mask):
    logits, found = model(ids, mask)[:, :-1] / 0.7, []
    ids = ids[:, 1:]
    for i in range(logits.shape[0]):
        selected = logits[i].gather(-1, ids[i].unsqueeze(-1)).squeeze(-1)
        found.append(selected - torch.logsumexp(logits[i], dim=-1))
    return torch.stack(found, dim=0)


def sliced_inside(model, ids, mask):
    logits = model(ids, mask)
    return torch.stack([logps_of(logits[i, :-1], ids[i][1:]) for i in range(len(ids))])


def kept(model, ids, mask):
    logits, ids = model(ids, mask)[:, -KEEP - 1 : -1], ids[:, -KEEP:]
    pairs = zip(logits.unbind(0), torch.unbind(ids), strict=True)
    return torch.stack([-F.cross_entropy(row, target, reduction="none") for row, target in pairs])


def only_the_normaliser(model, ids, mask):
    logits = model(ids, mask)[:, :-1]
    normaliser = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return logits.gather(-1, ids[:, 1:, None])[..., 0] - normaliser


def with_entropy(model, ids, mask):
    logits, ids = model(ids, mask)[:, :-1], ids[:, 1:]
    logps, entropies = [], []
    for i in range(logits.size(0)):
        every = torch.log_softmax(logits.select(0, i), -1)
        logps.append(every.gather(-1, ids[i][:, None]).view(-1))
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.stack(logps) + 0.3 * torch.stack(entropies)


def changed_in_place_before(model, ids, mask):
    logits = model(ids, mask)[:, :-1].clone()
    logits.div_(0.9)
    return torch.stack([logps_of(row, i) for row, i in zip(logits, ids[:, 1:], strict=True)])


def unjoined(model, ids, mask):
    return torch.stack([row.exp().amax(-1).log() for row in model(ids, mask)])


FOLDED = (
    zipped, by_number, sliced_inside, kept, only_the_normaliser, with_entropy, changed_in_place_before,
    unjoined,
)  # fmt: skip


@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
@pytest.mark.parametrize("fn", FOLDED)
def test_a_loop_over_the_rows_is_packed(fn, layout, model):
    ids, mask = shared_batch("left")
    known = mask if fn is unjoined else None
    assert_tail(fn, model, ids, mask, known=known, layout=layout)
    assert_packed(layout, ids, mask)


@pytest.mark.parametrize(
    "fn, rows, length", ((sliced_inside, 4, 24), (zipped, 7, 8), (by_number, 7, 7), (zipped, 1, 9))
)
def test_sizes_that_coincide(fn, rows, length, model):
    """As many rows as heads, or as columns, without the first or with it; one row."""
    ids, mask = tiny.batch("left", rows=rows, length=length, seed=3)
    mask[0], mask[:, -2:] = 1, 1
    graph = assert_tail(fn, model, ids, mask, layout="varlen")
    assert graph.runs == {"varlen": 1} and graph.last.run_tokens == int(mask.sum())


@pytest.mark.parametrize(
    "fn", (zipped, *(pytest.param(f, marks=pytest.mark.slow) for f in (sliced_inside, kept)))
)
def test_dynamic_shapes(fn, model):
    """Dynamo makes a loop's length a constant: another B is captured anew, another L is not."""
    run = packed(fn, dynamic=True, layout="varlen")
    for rows, length, captures in ((4, 24, 1), (4, 30, 1), (5, 30, 2)):
        ids, mask = tiny.batch("left", rows=rows, length=length, seed=3)
        mask[:, -2:] = 1
        got, want = run(model, ids, mask), fn(model, ids, mask)
        n = want.shape[1]
        known = (mask[:, -n:] * mask[:, -n - 1 : -1]).bool()
        assert float((got - want)[known].detach().abs().max()) < 1e-10
        graphs = fx_packing.report().graphs
        assert len(graphs) == captures and graphs[-1].last.layout == "varlen"


@pytest.mark.parametrize("positions", ("row", pytest.param("captured", marks=pytest.mark.slow)))
def test_a_checked_loop_in_half_precision(positions, model):
    model = tiny.build("llama").bfloat16()
    ids, mask = shared_batch("left")

    def score(model, ids, mask):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        return torch.stack([logps_of(row, i) for row, i in zip(logits, ids[:, 1:], strict=True)])

    got = packed(score, positions=positions)(model, ids, mask)
    known = (mask[:, 1:] * mask[:, :-1]).bool()
    assert got.dtype == torch.bfloat16
    assert float((got - score(model, ids, mask))[known].detach().abs().max()) < 0.5
    graph = fx_packing.report().graphs[-1]
    # Captured positions of rows that are padded differently are not the same: nothing is shared.
    assert graph.last.layout == {"row": "prefix", "captured": "varlen"}[positions]
    assert all(v.passed for v in graph.verifications)
    assert {v.gradients for v in graph.verifications} == {True, False}


def test_the_padded_graph_is_the_captured_one(model):
    ids, mask = shared_batch("left")
    run = packed(zipped)
    with fx_packing.disabled():
        assert torch.equal(run(model, ids, mask), zipped(model, ids, mask))
    run(model, ids, mask)
    graph = fx_packing.report().graphs[-1]
    assert graph.runs == {"prefix": 1}


def test_a_loop_over_something_else_as_long_as_the_batch(model):
    scales = nn.Parameter(torch.rand(7, tiny.VOCAB, dtype=torch.float64))

    def score(model, ids, mask):
        spread = torch.stack([row.softmax(-1) for row in scales]).amax(0)
        return (model(ids, mask) * spread).amax(-1)

    ids, mask = shared_batch("left")
    with torch.no_grad():
        got, want = packed(score)(model, ids, mask), score(model, ids, mask)
    assert float((got - want)[mask.bool()].abs().max()) < 1e-10
    assert_packed("auto", ids, mask)


# -- left as they are ------------------------------------------------------------------------------


def backwards(x, ids):
    return torch.stack([x[i].amax(-1) for i in reversed(range(len(x)))])


def one_missing(x, ids):
    return torch.stack([x[i].amax(-1) for i in range(len(x) - 1)])


def one_twice(x, ids):
    return torch.stack([x[max(i, 1)].amax(-1) for i in range(len(x))])


def two_of_each(x, ids):
    return torch.stack([x[i].amax(-1) for i in (*range(len(x)), *range(len(x)))])


def another_operation(x, ids):
    return torch.stack([x[i].amax(-1) if i else x[i].amin(-1) for i in range(len(x))])


def another_number(x, ids):
    return torch.stack([(x[i] * (1.0 + i)).amax(-1) for i in range(len(x))])


def another_type_of_number(x, ids):
    return torch.stack([(x[i] / (1.0 if i else 1)).amax(-1) for i in range(len(x))])


def another_sign_of_zero(x, ids):
    return torch.stack([(x[i] * 0.0 + (0.0 if i else -0.0)).amax(-1) for i in range(len(x))])


def another_axis(x, ids):
    return torch.stack([x[i].amax(-1) for i in range(len(x))], dim=1)


def rows_of_two(x, ids):
    return torch.stack([logps_of(x[i], ids[i - 1]) for i in range(len(x))])


def less_the_first(x, ids):
    return torch.stack([(x[i] - x[0]).amax(-1) for i in range(len(x))])


def less_the_first_of_them(x, ids):
    rows = x.unbind(0)
    return torch.stack([(row - rows[0]).amax(-1) for row in rows])


def less_the_one_before(x, ids):
    return torch.stack([(x[i] - x[i - 1]).amax(-1) for i in range(len(x))])


def the_first_once_more(x, ids):
    rows = [row.amax(-1) for row in x]
    return torch.stack(rows) + rows[0]


def a_running_sum(x, ids):
    found, total = [], torch.zeros_like(x[0])
    for row in x:
        total = total + row
        found.append(total.amax(-1))
    return torch.stack(found)


def a_running_sum_in_place(x, ids):
    found, total = [], torch.zeros_like(x[0])
    for row in x:
        total += row
        found.append(total.amax(-1))
    return torch.stack(found)


def changed_inside(x, ids):
    x = x.clone()
    return torch.stack([x[i].mul_(2).amax(-1) for i in range(len(x))])


def changed_between(x, ids):
    x = x.clone()
    found = [x[0].amax(-1)]
    x.mul_(2)
    return torch.stack(found + [x[i].amax(-1) for i in range(1, len(x))])


def another_region(x, ids):
    with torch.autocast("cpu", torch.bfloat16):
        found = [(x[0].float() @ x[0].float()[0]).double()]
    return torch.stack(found + [(x[i].float() @ x[i].float()[0]).double() for i in range(1, len(x))])


def with_all_rows(x, ids):
    return torch.stack([(x[i].amax(-1) * ids).amax(0) for i in range(len(x))])


def over_tokens(x, ids):
    return torch.stack([(x[i] - x[i].mean(0)).amax(-1) for i in range(len(x))])


def columns(x, ids):
    return torch.stack([column.amax(-1) for column in x.transpose(0, 1)])


LEFT = (
    backwards, one_missing, one_twice, two_of_each, another_operation, another_number,
    another_type_of_number, another_sign_of_zero, another_axis, rows_of_two, less_the_first,
    less_the_first_of_them, less_the_one_before, the_first_once_more, a_running_sum,
    a_running_sum_in_place, changed_inside,
    changed_between, another_region, with_all_rows, over_tokens, columns,
)  # fmt: skip


@pytest.mark.parametrize(
    "loop, rows, length",
    [(loop, 4, 9) for loop in LEFT] + [(loop, 7, 7) for loop in (columns, with_all_rows, another_axis)],
)
def test_a_loop_that_is_not_the_same_for_each_row_is_refused(loop, rows, length, model):
    ids, mask = tiny.batch("left", rows=rows, length=length, seed=3)
    mask[0], mask[:, -2:] = 1, 1

    def score(model, ids, mask):
        return loop(model(ids, mask), ids)

    with torch.no_grad():
        run = packed(score, verify="never", fullgraph=False)
        got, want = run(model, ids, mask), score(model, ids, mask)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    graph = fx_packing.report().graphs[-1]
    assert not graph.rewritten and graph.runs == {"padded": 1}


def test_the_reason_names_the_line(model):
    def score(model, ids, mask):
        logits = model(ids, mask)
        return torch.stack([(row - row.mean(0)).amax(-1) for row in logits])

    ids, mask = shared_batch("left")
    packed(score)(model, ids, mask)
    reason = fx_packing.report().graphs[-1].reason
    assert "mean sums, compares or normalises over the tokens (dimension L)" in reason
    assert "row.mean(0)" in reason
