"""What an attention means is measured: masks, windows, scales, soft caps, grouped heads."""

from __future__ import annotations

import packing
import pytest
import tiny
import torch
import torch.nn.functional as F
from toys import Toy, causal, eager, places, real, run, sdpa

import fx_packing


def near(reach, length):
    q, k = places(length)
    return (k <= q) & reach(q, k)


def additive(allowed, far):
    return torch.zeros(allowed.shape).masked_fill(~allowed, far)


UNDERSTOOD = {
    "causal": (lambda t, n, m: causal(n) & real(m), None),
    "window 7": (lambda t, n, m: near(lambda q, k: q - k < 7, n) & real(m), 7),
    "window 30": (lambda t, n, m: near(lambda q, k: q - k < 30, n) & real(m), 30),
    "window of a float": (lambda t, n, m: near(lambda q, k: q - k < 30.0, n) & real(m), 30),
    "window, the other way": (lambda t, n, m: near(lambda q, k: k >= q - 29, n) & real(m), 30),
    "window 4096 beyond L": (lambda t, n, m: near(lambda q, k: q - k < 4096, n) & real(m), 4096),
    "window by triu": (lambda t, n, m: causal(n).triu(-29) & real(m), 30),
    "window in a buffer": (lambda t, n, m: near(lambda q, k: q - k < t.thirty, n) & real(m), 30),
    "two windows": (
        lambda t, n, m: near(lambda q, k: (q - k < 30) & (q - k < 40), n) & real(m),
        30,
    ),
    "0 and -inf": (lambda t, n, m: additive(causal(n) & real(m), -torch.inf), None),
    "0 and min": (
        lambda t, n, m: additive(causal(n) & real(m), torch.finfo(torch.float32).min),
        None,
    ),
    "0 and -10000": (lambda t, n, m: (1 - (causal(n) & real(m)).float()) * -10000.0, None),
    "0 and -1e9": (lambda t, n, m: ((causal(n) & real(m)).float() - 1) * 1e9, None),
    "in place": (lambda t, n, m: torch.ones(n, n, dtype=torch.bool).tril_() & real(m), None),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_masks_that_are_understood(name):
    allowed, window = UNDERSTOOD[name]
    graph, _, alone = run(Toy(attend=sdpa(allowed)))
    assert graph.rewritten, graph.reason
    assert (graph.last.layout, graph.attention[0].window) == ("varlen", window)
    assert alone < 2e-5


REFUSED = {
    "window in a table": (lambda t, n, m: t.band[:n, :n] & real(m), None),
    "a large table": (lambda t, n, m: t.wide[:n, :n] & real(m), "table"),
    "chunks": (lambda t, n, m: near(lambda q, k: q // 32 == k // 32, n) & real(m), "chunked"),
    "chunks by shift": (lambda t, n, m: near(lambda q, k: q >> 5 == k >> 5, n) & real(m), "chunked"),
    "chunks by bits": (lambda t, n, m: near(lambda q, k: q & 32 == k & 32, n) & real(m), "chunked"),
    "chunks of floats": (
        lambda t, n, m: near(lambda q, k: (q / 32.0).floor() == (k / 32.0).floor(), n) & real(m),
        "chunked",
    ),
    "huge chunks": (lambda t, n, m: near(lambda q, k: q >> 13 == k >> 13, n) & real(m), "window"),
    "prefix": (lambda t, n, m: (causal(n) | (torch.arange(n) < 5)) & real(m), "prefix"),
    "late prefix": (
        lambda t, n, m: (causal(n) | ((places(n)[0] < 30) & (places(n)[1] < 30))) & real(m), "prefix"
    ),
    "sink token": (lambda t, n, m: near(lambda q, k: (q - k < 20) | (k == 0), n) & real(m), "neither"),
    "dilated": (
        lambda t, n, m: near(lambda q, k: (q - k < 26) | ((q - k) % 2 == 0), n) & real(m), "neither"
    ),
    "last query": (
        lambda t, n, m: near(lambda q, k: ~((q == n - 1) & (k < 3)), n) & real(m), "neither"
    ),
    "in place, later rows": (
        lambda t, n, m: causal(n).index_fill_(1, torch.tensor([2]), False) & real(m), None
    ),
    "bidirectional": (lambda t, n, m: real(m).expand(-1, -1, n, -1), "bidirectional"),
    "backwards": (lambda t, n, m: causal(n).T & real(m), None),
    "another row's padding": (lambda t, n, m: causal(n) & real(m).any(0, keepdim=True), None),
    "a neighbour's padding": (lambda t, n, m: causal(n) & real(m) & real(m).roll(1, -1), None),
    "at most 26 real tokens": (
        lambda t, n, m: causal(n) & real(m) & (real(m).cumsum(-1) < 26), "neither"
    ),
    "ALiBi": (
        lambda t, n, m: additive(causal(n) & real(m), -torch.inf) - 0.1 * (places(n)[0] - places(n)[1]),
        "bias",
    ),
    "ALiBi from 25 on": (
        lambda t, n, m: additive(causal(n) & real(m), -torch.inf)
        - 0.5 * (places(n)[0] - places(n)[1] - 25).clamp(min=0),
        "bias",
    ),
    "a parameter": (lambda t, n, m: additive(causal(n) & real(m), -torch.inf) + t.bias, "parameter"),
    "per head": (
        lambda t, n, m: causal(n) & real(m) & ~((torch.arange(4) == 1)[:, None, None] & (places(n)[1] == 0)
                                                & (places(n)[0] > 0)),
        "heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_are_refused(name):
    allowed, why = REFUSED[name]
    graph, padded, _ = run(Toy(attend=sdpa(allowed)))
    assert not graph.rewritten
    assert padded == 0
    assert (why or "") in graph.reason and ".py:" in graph.reason


def test_a_window_made_from_a_dynamic_length_is_refused():
    model = Toy(attend=sdpa(lambda t, n, m: near(lambda q, k: q - k < n // 2, n) & real(m)))
    graph, padded, _ = run(model, dynamic=True)
    assert not graph.rewritten and padded == 0


def test_a_window_that_the_caller_passes_is_refused_or_right():
    class Windowed(Toy):
        def forward(self, ids, attention_mask, window):
            allowed = sdpa(lambda t, n, m: near(lambda q, k: q - k < window, n) & real(m))
            self.attend = allowed
            return super().forward(ids, attention_mask)

    model = Windowed()
    ids, mask = tiny.batch("left", lengths=[47, 40], length=48)
    packed = packing.pack(model, dynamic=True, verify="never", fullgraph=False)
    with torch.no_grad():
        for window in (20, 9):
            got, want = packed(ids, mask, window), model(ids, mask, window)
            assert float((got - want)[mask.bool()].abs().max()) < 2e-5


@pytest.mark.parametrize("length", [24, 40])
def test_window_with_dynamic_length_beyond_it(length):
    graph, _, alone = run(
        Toy(attend=sdpa(UNDERSTOOD["window 7"][0])), dynamic=True, length=length,
        lengths=(length, length - 3, 8),
    )  # fmt: skip
    assert graph.rewritten and graph.attention[0].window == 7 and alone < 2e-5


# -- attention spelled out -----------------------------------------------------------------------

SPELLED = {
    "scale by product": (eager(), 0.25, None),
    "scale by division": (eager(lambda t, s, x: s / 2.0, scale=1.0), 0.5, None),
    "both": (eager(lambda t, s, x: s / 4.0, scale=0.5), 0.125, None),
    "soft cap": (eager(lambda t, s, x: (s / 20.0).tanh() * 20.0), 0.25, 20.0),
    "shifted by its mean": (eager(lambda t, s, x: s - s.mean(-1, keepdim=True)), 0.25, None),
}


@pytest.mark.parametrize("name", SPELLED)
def test_spelled_out(name):
    attend, scale, softcap = SPELLED[name]
    graph, _, alone = run(Toy(attend=attend))
    assert graph.rewritten, graph.reason
    record = graph.attention[0]
    assert (record.kind, record.scale, record.softcap) == ("eager", pytest.approx(scale), softcap)
    assert graph.last.layout == "varlen" and alone < 2e-5


def test_prescaled_queries():
    def attend(toy, q, k, v, mask, x):
        s = (q * 0.25) @ k.transpose(2, 3)
        return s.masked_fill(~(causal(q.shape[2]) & real(mask)), -1e9).softmax(-1) @ v

    graph, _, alone = run(Toy(attend=attend))
    assert graph.rewritten and graph.attention[0].scale == 1.0 and alone < 2e-5


def stripes(length, low, high=1.0, at=10):
    return torch.where(torch.arange(length) < at, low, high)


SPELLED_REFUSED = {
    "a learned temperature": eager(lambda t, s, x: s * t.temperature),
    "a learned bias": eager(lambda t, s, x: s + t.bias),
    "a gate by token": eager(lambda t, s, x: s * x.mean(-1).sigmoid()[:, None, :, None]),
    "a scale by query": eager(lambda t, s, x: s * stripes(s.shape[2], 0.5)[:, None]),
    "a scale by key": eager(lambda t, s, x: s * stripes(s.shape[2], 0.5)),
    "a scale by late query": eager(lambda t, s, x: s * stripes(s.shape[2], 1.0, 0.5, 31)[:, None]),
    "log length scaling": eager(
        lambda t, s, x: s * (torch.arange(s.shape[2]) + 2.0).log()[:, None]
    ),
    "absolute scores": eager(lambda t, s, x: s.abs()),
    "clamped from below": eager(lambda t, s, x: s.clamp(min=-3)),
    "top k": eager(lambda t, s, x: s.masked_fill(s < s.topk(3, -1).values[..., -1:], -1e9)),
    "a head switched off": eager(
        None, lambda t, w, x: w * torch.tensor([1.0, 1, 1, 0])[:, None, None]
    ),
    "twice": eager(None, lambda t, w, x: w * 2),
    "heads swapped": eager(None, lambda t, w, x: w[:, [1, 0, 3, 2]]),
    "rolled": eager(None, lambda t, w, x: w.roll(1, 2)),
    "late rows thinned": eager(
        None, lambda t, w, x: w * stripes(w.shape[2], 1.0, 0.5, 30)[:, None]
    ),
    "detached": eager(None, lambda t, w, x: w.detach()),
    "dropout": eager(None, lambda t, w, x: F.dropout(w, 0.5, True)),
    "rows mixed": eager(lambda t, s, x: s - s.mean(0, keepdim=True)),
}


@pytest.mark.parametrize("name", SPELLED_REFUSED)
def test_spelled_out_refused(name):
    graph, padded, _ = run(Toy(attend=SPELLED_REFUSED[name]))
    assert not graph.rewritten and ".py:" in graph.reason
    assert padded == 0 or name == "dropout"


def in_training(attend):
    """The report of a call that records gradients, and how far it is from the rows alone."""
    model = Toy(attend=attend)
    ids, mask = tiny.batch("left", lengths=[47, 40, 31, 9], length=48, seed=1)
    got = packing.pack(model, layout="varlen", verify="never")(ids, mask)
    distance = (got - tiny.per_row(model, ids, mask))[mask.bool()].abs().max()
    return fx_packing.report().graphs[-1], float(distance.detach())


def test_a_mask_from_before_a_region_without_gradients():
    """As transformers makes it, before the angles of the positions: a mask has no gradient in any mode."""

    def attend(toy, q, k, v, mask, x):
        allowed = causal(q.shape[2]) & real(mask)
        with torch.no_grad():
            turn = toy.temperature * 0 + 0.25
        s = (q * turn) @ k.transpose(2, 3)
        return s.masked_fill(~allowed, torch.finfo(s.dtype).min).softmax(-1) @ v

    graph, distance = in_training(attend)
    assert graph.rewritten, graph.reason
    assert graph.last.layout == "varlen" and distance < 2e-5


def test_weights_without_gradients_are_refused():
    def attend(toy, q, k, v, mask, x):
        s = q @ k.transpose(2, 3) * 0.25
        with torch.no_grad():
            w = s.masked_fill(~(causal(q.shape[2]) & real(mask)), -1e9).softmax(-1)
        return w @ v

    graph, _ = in_training(attend)
    assert not graph.rewritten and "a part of attention runs under no_grad" in graph.reason


def test_sinks_are_refused():
    def attend(toy, q, k, v, mask, x):
        s = q @ k.transpose(2, 3) * 0.25
        s = s.masked_fill(~(causal(q.shape[2]) & real(mask)), -1e9)
        s = torch.cat([s, toy.temperature.expand(s.shape[0], 4, s.shape[2], 1)], -1)
        return s.softmax(-1)[..., :-1] @ v

    graph, padded, _ = run(Toy(attend=attend))
    assert not graph.rewritten and padded == 0


# -- SDPA's arguments ----------------------------------------------------------------------------


def both(t, n, m):
    return causal(n) & real(m)


def heads(of_k, **options):
    def attend(toy, q, k, v, mask, x):
        k, v = of_k(k, q.shape), of_k(v, q.shape)
        allowed = both(toy, q.shape[2], mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, **options)

    return attend


GROUPED = {
    "expand and reshape": (
        heads(lambda k, s: k[:, :2][:, :, None].expand(-1, -1, 2, -1, -1).reshape(s)),
        2,
    ),
    "repeat_interleave": (heads(lambda k, s: k[:, :2].repeat_interleave(2, 1)), 4),
    "enable_gqa": (heads(lambda k, s: k[:, :2], enable_gqa=True), 2),
    "tiled": (heads(lambda k, s: k[:, :2].repeat(1, 2, 1, 1)), 4),
    "tiled by expand": (heads(lambda k, s: k[:, None, :2].expand(-1, 2, -1, -1, -1).reshape(s)), 4),
    "swapped": (heads(lambda k, s: k[:, [1, 0], None].expand(-1, -1, 2, -1, -1).reshape(s)), None),
    "one for all": (heads(lambda k, s: k[:, :1]), 1),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name):
    attend, kv_heads = GROUPED[name]
    graph, padded, alone = run(Toy(attend=attend))
    if not graph.rewritten:
        assert kv_heads is None and padded == 0
        return
    assert kv_heads in (None, graph.attention[0].kv_heads)
    assert graph.last.layout == "varlen" and alone < 2e-5


def test_is_causal_and_scale():
    def attend(toy, q, k, v, mask, x):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)

    graph, _, alone = run(Toy(attend=attend), padding="right")
    assert graph.rewritten and graph.attention[0].scale == 0.1 and alone < 2e-5


def test_values_of_another_width():
    def attend(toy, q, k, v, mask, x):
        allowed = both(toy, q.shape[2], mask)
        y = F.scaled_dot_product_attention(q, k, v[..., :8], attn_mask=allowed)
        return torch.cat([y, v[..., 8:]], -1)

    graph, _, alone = run(Toy(attend=attend))
    assert graph.rewritten and graph.last.layout == "varlen" and alone < 2e-5


SDPA_REFUSED = {
    "bidirectional": lambda t, q, k, v, m, x: F.scaled_dot_product_attention(q, k, v),
    "dropout": lambda t, q, k, v, m, x: F.scaled_dot_product_attention(
        q, k, v, attn_mask=both(t, q.shape[2], m), dropout_p=0.1
    ),
    "over the rows": lambda t, q, k, v, m, x: F.scaled_dot_product_attention(
        q.transpose(0, 2), k.transpose(0, 2), v.transpose(0, 2), is_causal=True
    ).transpose(0, 2),
    "over the heads": lambda t, q, k, v, m, x: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2),
    "keys of one row": lambda t, q, k, v, m, x: F.scaled_dot_product_attention(
        q, k[:1], v[:1], attn_mask=both(t, q.shape[2], m)
    ),
    "a mask changed later": lambda t, q, k, v, m, x: (
        lambda c: (F.scaled_dot_product_attention(q, k, v, attn_mask=c), c.tril_())[0]
    )(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool) & real(m)),
}


@pytest.mark.parametrize("name", SDPA_REFUSED)
def test_sdpa_refused(name):
    graph, padded, _ = run(Toy(attend=SDPA_REFUSED[name]))
    assert not graph.rewritten and ".py:" in graph.reason
    assert padded == 0 or name == "dropout"


def test_active_attention_dropout_names_the_remedy():
    model = tiny.build("llama", num_hidden_layers=1, attention_dropout=0.1).train()
    ids, mask = tiny.batch("left")
    packing.pack(model)(ids, attention_mask=mask, use_cache=False)
    (graph,) = fx_packing.report().graphs
    assert not graph.rewritten and "model.eval()" in graph.reason and "self_attn" in graph.reason
