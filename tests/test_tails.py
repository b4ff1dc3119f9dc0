"""Ways to write the log-probabilities: each is packed, and its tail runs in tiles."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F
from packing import assert_gradients, assert_packed, assert_tail, gradients, pack, shared_batch
from test_logprobs import small_tiles  # noqa: F401

import fx_packing

KEEP = 9


@pytest.fixture(scope="module")
def model():
    return tiny.PlainDecoder(hidden=32).double()


def logps_of(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def classes_in_the_middle(model, ids, mask):
    logits = model(ids, mask)[:, :-1]
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def classes_in_the_middle_of_the_kept(model, ids, mask):
    logits = model(ids, mask, logits_to_keep=KEEP + 1)
    return F.cross_entropy(logits[:, :-1].permute(0, 2, 1), ids[:, -KEEP:], reduction="none")


def merged(model, ids, mask):
    logits = model(ids, mask)[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1), reduction="none")
    return losses.view(ids.shape[0], -1)


def merged_by_the_vocabulary(model, ids, mask):
    logits = model(ids, mask)[:, :-1].contiguous()
    losses = F.cross_entropy(logits.view(-1, tiny.VOCAB), ids[:, 1:].flatten(), reduction="none")
    return -losses.reshape(len(ids), -1)


def kept_at_last(model, ids, mask):
    return logps_of(model(ids, mask)[:, :-1], ids[:, 1:])[:, -KEEP:]


def kept_at_last_of_more(model, ids, mask):
    logits = model(ids, mask, logits_to_keep=KEEP + 5)[:, :-1]
    return logps_of(logits, ids[:, -KEEP - 4 :])[:, 1:][:, 3:-1]


def kept_twice(model, ids, mask):
    return logps_of(model(ids, mask)[:, :-1][:, -KEEP:], ids[:, 1:][:, -KEEP:])


def kept_at_last_and_masked(model, ids, mask):
    logps = logps_of(model(ids, mask)[:, :-1], ids[:, 1:])
    return logps[:, -KEEP:] * mask[:, -KEEP:]


def masked_and_kept_at_last(model, ids, mask):
    """The mask of both tokens enters the tail as one."""
    logps = logps_of(model(ids, mask)[:, :-1], ids[:, 1:])
    return (logps * (mask[:, 1:] * mask[:, :-1]))[:, -KEEP:]


def normalised_without_gradients(model, ids, mask):
    logits = model(ids, mask)[:, :-1]
    with torch.no_grad():
        normaliser = logits.logsumexp(-1)
    return logits.gather(-1, ids[:, 1:, None])[..., 0] - normaliser


FORMS = (
    normalised_without_gradients, classes_in_the_middle, classes_in_the_middle_of_the_kept, merged,
    merged_by_the_vocabulary,
    kept_at_last, kept_at_last_of_more, kept_twice, kept_at_last_and_masked, masked_and_kept_at_last,
)  # fmt: skip


def known(fn, ids, mask):
    if fn is not kept_at_last_of_more:
        return None
    return mask[:, -KEEP:-1] * mask[:, -KEEP - 1 : -2]


@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
@pytest.mark.parametrize("fn", FORMS)
def test_a_form_is_packed(fn, layout, model, small_tiles):  # noqa: F811
    ids, mask = shared_batch("left")
    graph = assert_tail(fn, model, ids, mask, layout=layout, known=known(fn, ids, mask))
    assert_packed(layout, ids, mask)
    assert graph.last.tiles > 1


@pytest.mark.parametrize("fn", [*FORMS[:3], *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS[3:])])
def test_a_form_under_dynamic_shapes(fn, model):
    """One capture serves every shape."""
    run = pack(fn, dynamic=True, layout="varlen")
    with torch.no_grad():
        for rows, length in ((4, 24), (5, 30), (3, 21)):
            ids, mask = tiny.batch("left", rows=rows, length=length, seed=3)
            mask[:, -4:] = 1
            got, want = run(model, ids, mask), fn(model, ids, mask)
            n = want.shape[1]
            chosen = known(fn, ids, mask)
            chosen = mask[:, -n:] * mask[:, -n - 1 : -1] if chosen is None else chosen
            assert float((got - want)[chosen.bool()].abs().max()) < 1e-10
            assert fx_packing.report().graphs[-1].last.layout == "varlen"
    assert len(fx_packing.report().graphs) == 1


@pytest.mark.parametrize("dynamic", (None, True))
def test_how_many_are_kept_is_the_callers(dynamic, model):
    def twice(model, ids, mask, keep):
        return logps_of(model(ids, mask)[:, :-1][:, -keep:], ids[:, -keep:])

    def at_last(model, ids, mask, keep):
        return logps_of(model(ids, mask)[:, :-1], ids[:, 1:])[:, -keep:]

    ids, mask = shared_batch("left")
    for fn in (twice, at_last):
        run = pack(fn, dynamic=dynamic, layout="prefix")
        with torch.no_grad():
            for keep in (9, 5, 25):
                got, want = run(model, ids, mask, keep), fn(model, ids, mask, keep)
                known = (mask[:, -keep:] * mask[:, -keep - 1 : -1]).bool()
                assert float((got - want)[known].abs().max()) < 1e-10
                assert fx_packing.report().graphs[-1].last.layout == "prefix"


def test_slices_of_joined_slices_beside_the_logits(model):
    """Nothing is tiled where the logits are returned: the flat graph itself takes the slice."""

    def both(model, ids, mask):
        logits = model(ids, mask)
        logps = logps_of(logits[:, :-1], ids[:, 1:])
        return logits, logps[:, -KEEP:], logps[:, 2:][:, :3]

    ids, mask = shared_batch("right")
    for layout in ("varlen", "prefix"):
        got, want = pack(both, layout=layout)(model, ids, mask), both(model, ids, mask)
        pairs = mask[:, 1:] * mask[:, :-1]
        chosen = (mask, pairs[:, -KEEP:], pairs[:, 2:5])
        for a, b, real in zip(got, want, chosen, strict=True):
            assert a.shape == b.shape
            assert float((a - b)[real.bool()].detach().abs().max()) < 1e-10
        assert_packed(layout, ids, mask)


def test_what_needs_the_logits_alone_beside_a_slice_of_joined_slices(model):
    def score(model, ids, mask):
        logits = model(ids, mask)[:, :-1]
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return logps_of(logits, ids[:, 1:])[:, -KEEP:], entropy[:, -KEEP:]

    ids, mask = shared_batch("right")
    got, want = pack(score, layout="prefix")(model, ids, mask), score(model, ids, mask)
    chosen = (mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1], mask[:, -KEEP - 1 : -1])
    for a, b, real in zip(got, want, chosen, strict=True):
        assert float((a - b)[real.bool()].detach().abs().max()) < 1e-10
        assert not bool(a[~real.bool()].any())
    assert_packed("prefix", ids, mask)
    assert fx_packing.report().graphs[-1].last.tiles


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
def test_an_entropy_without_gradients_has_none(layout, model, small_tiles):  # noqa: F811
    """As trainers log it: the same bits, and no graph of autograd that a log would keep alive."""

    def score(model, ids, mask):
        logits = model(ids, mask)[:, :-1]
        with torch.no_grad():
            logs = logits.log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1)
        return logps_of(logits, ids[:, 1:]), entropy

    ids, mask = shared_batch("left")
    got, want = pack(score, layout=layout, inner="aot_eager")(model, ids, mask), score(model, ids, mask)
    assert [v.requires_grad for v in got] == [v.requires_grad for v in want] == [True, False]
    known = (mask[:, 1:] * mask[:, :-1]).bool()
    for a, b in zip(got, want, strict=True):
        assert float((a - b)[known].detach().abs().max()) < 1e-10
    found, exact = (gradients(model, v[0][known].sum()) for v in (got, want))
    assert_gradients(found, exact, 1e-10)
    assert_packed(layout, ids, mask)
    assert fx_packing.report().graphs[-1].last.tiles > 1


def test_hidden_states_that_are_detached_have_no_gradient(model):
    def hidden(model, ids, mask):
        logits = model(ids, mask)
        return logits, logits.detach() * 2

    ids, mask = shared_batch("left")
    got = pack(hidden, layout="prefix")(model, ids, mask)
    assert [v.requires_grad for v in got] == [True, False]
    assert_packed("prefix", ids, mask)


def test_a_head_without_gradients(model):
    def score(model, ids, mask):
        with torch.no_grad():
            logits = model(ids, mask)[:, :-1]
        temperature = model.embed.weight.mean() + 1
        return logps_of(logits / temperature, ids[:, 1:])

    ids, mask = shared_batch("left")
    got, want = pack(score, layout="prefix")(model, ids, mask), score(model, ids, mask)
    known = (mask[:, 1:] * mask[:, :-1]).bool()
    assert float((got - want)[known].detach().abs().max()) < 1e-10
    found, exact = (
        torch.autograd.grad(v[known].sum(), model.embed.weight)[0] for v in (got, want)
    )
    assert float((found - exact).abs().max()) < 1e-10 * float(exact.abs().max())
    assert fx_packing.report().graphs[-1].last.layout == "prefix"


def test_autocast_around_the_head_is_kept():
    """In float32 with autocast inside: the head computes in bfloat16, as it was captured."""

    def score(model, ids, mask):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, mask)[:, :-1]
        return logits.float().amax(-1)

    model = tiny.PlainDecoder(hidden=32)
    ids, mask = shared_batch("left")
    with torch.no_grad():
        for got in (score(model, ids, mask), pack(score, layout="prefix")(model, ids, mask)):
            assert torch.equal(got.bfloat16().float(), got)
        assert not torch.equal(model(ids, mask).bfloat16().float(), model(ids, mask))
    assert_packed("prefix", ids, mask)
