"""The quantity of GRPO: log-probabilities of the completions, and the tail that computes them in tiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.nn.functional as F
from packing import assert_gradients, gradients, shared_batch, stored_tokens
from torch import nn

import fx_packing
from fx_packing import per_token_logps, tiles

KEEP = 9


class Head(nn.Module):
    """A plain decoder under a head of `vocab` logits, with what models put behind one."""

    def __init__(self, *, vocab=1500, bias=False, softcap=None, scale=1.0):
        super().__init__()
        self.trunk = tiny.PlainDecoder(hidden=32)  # whose logits are the hidden states here
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.lm_head = nn.Linear(tiny.VOCAB, vocab, bias=bias)
        self.softcap, self.scale = softcap, scale
        self.double()

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, use_cache=None):
        hidden = self.trunk(input_ids, attention_mask)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return Output(logits)


class Output:
    def __init__(self, logits):
        self.logits = logits


def alone(model, ids, mask, keep, temperature=1.0):
    """Log-probabilities and entropies of each row by itself, float64, by the textbook formula."""
    logps = torch.zeros(len(ids), keep, dtype=torch.float64)
    entropies = torch.zeros_like(logps)
    first = ids.shape[1] - keep
    for r in range(len(ids)):
        columns = mask[r].nonzero()[:, 0]
        row = ids[r, columns][None]
        if not len(columns):
            continue
        out = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
        logits = out.logits[0].double() / temperature
        every = logits.log_softmax(-1)
        for i, c in enumerate(columns.tolist()):
            if c >= first and i > 0 and mask[r, c - 1]:
                logps[r, c - first] = every[i - 1, ids[r, c]]
                entropies[r, c - first] = -(every[i - 1].exp() * every[i - 1]).sum()
    return logps, entropies


def compiled(fn, **options):
    return torch.compile(fn, backend="grpo_pack", options={"inner": "aot_eager"} | options)


def last():
    graph = fx_packing.report().graphs[-1]
    assert graph.rewritten, graph.reason
    assert all(v.passed for v in graph.verifications) and graph.verifications
    return graph


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "_ELEMENTS", 4000)
    monkeypatch.setattr(tiles, "_LEAST", 3)


# -- in plain PyTorch ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ("llama", "gpt2", "gemma2"))
def test_uncompiled_it_is_the_formula(family):
    model = tiny.build(family)
    ids, mask = shared_batch("right")
    with torch.no_grad():
        got, entropy = per_token_logps(model, ids, mask, 20, temperature=0.7, entropy=True)
        want, spread = alone(model, ids, mask, 20, 0.7)
    assert got.dtype == entropy.dtype == torch.float32 and got.shape == (7, 20)
    # The first token of a row in the batch has a token before it that is padding.
    known = (mask[:, -20:] * mask[:, -21:-1]).bool()
    assert torch.allclose(got.double()[known], want[known], atol=2e-5)
    assert torch.allclose(entropy.double()[known], spread[known], atol=2e-5)
    assert bool((got[mask[:, -20:] == 0] == 0).all()) and bool((entropy[mask[:, -20:] == 0] == 0).all())


def test_a_model_that_keeps_all_logits_and_one_that_is_wrapped():
    ids, mask = shared_batch("right")
    plain = tiny.build("llama")

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain

        def forward(self, input_ids, attention_mask=None, use_cache=None):
            return self.inner(input_ids, attention_mask=attention_mask, use_cache=use_cache)

    want = per_token_logps(plain, ids, mask, KEEP)
    assert torch.allclose(per_token_logps(All(), ids, mask, KEEP), want, atol=1e-6)
    eager = torch.compile(plain, backend="eager")
    assert torch.allclose(per_token_logps(eager, ids, mask, KEEP), want, atol=1e-6)
    assert torch.allclose(
        per_token_logps(plain, ids[:1, :12], None, KEEP),
        per_token_logps(plain, ids[:1, :12], torch.ones_like(ids[:1, :12]), KEEP),
        atol=1e-6,
    )


@pytest.mark.parametrize("keep", (0, 26, -1))
def test_a_number_of_columns_that_cannot_be_kept(keep):
    ids, mask = shared_batch("right")
    with pytest.raises(ValueError, match=f"logits_to_keep is {keep}, expected 1 to 25"):
        per_token_logps(tiny.build("llama"), ids, mask, keep)


# -- packed ----------------------------------------------------------------------------------------

HEADS = {
    "plain": {},
    "softcap": {"softcap": 3.0, "bias": True},
    "bias": {"bias": True},
    "logit scale": {"scale": 0.25},
}
SLOW_HEADS = ("bias", "logit scale")  # the first is in "softcap", the second as Cohere and Granite have it


@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
@pytest.mark.parametrize(
    "head", [pytest.param(h, marks=pytest.mark.slow) if h in SLOW_HEADS else h for h in HEADS]
)
def test_values_and_gradients_in_float64(head, layout, small_tiles):
    model = Head(**HEADS[head])
    ids, mask = shared_batch("both")
    packed = compiled(per_token_logps, layout=layout)
    got, entropy = packed(model, ids, mask, KEEP, temperature=0.8, entropy=True)
    want, spread = alone(model, ids, mask, KEEP, 0.8)
    known = (mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1]).bool()
    assert got.dtype == torch.float64
    assert torch.allclose(got[known], want[known], atol=1e-10)
    assert torch.allclose(entropy[known], spread[known], atol=1e-10)
    assert bool((got[~known] == 0).all()) and bool((entropy[~known] == 0).all())
    weights = torch.randn(known.shape, generator=tiny.generator(4), dtype=torch.float64) * known
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(((got + 0.3 * entropy) * weights).sum(), parameters)
    exact = torch.autograd.grad(((want + 0.3 * spread) * weights).sum(), parameters)
    for name, a, b in zip(names, found, exact, strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * max(float(b.abs().max()), 1e-3), name
    graph = last()
    assert graph.runs == {layout: 1} and graph.last.tiles > 1 and "tail" in graph.compiles


@pytest.mark.parametrize("family", ("llama", "qwen2", "gemma2", "gpt2", "cohere", "granite"))
def test_models(family, small_tiles):
    model = tiny.build(family, **EXTRA.get(family, {}))
    ids, mask = shared_batch("left")
    packed = compiled(per_token_logps)
    got = packed(model, ids, mask, 15, temperature=0.7)
    want, _ = alone(model, ids, mask, 15, 0.7)
    known = (mask[:, -15:] * mask[:, -16:-1]).bool()
    assert float((got.double() - want)[known].abs().max()) < 2e-5
    weights = torch.randn(known.shape, generator=tiny.generator(4)) * known
    found, exact = gradients(model, (got * weights).sum()), gradients(model, (want * weights).sum())
    assert_gradients(found, exact, 2e-5)
    assert last().runs == {"prefix": 1} and last().last.tiles > 1


EXTRA = {
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 5.0},
}

# -- functions that others wrote -------------------------------------------------------------------


def full_then_shift(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logps = logits.float().log_softmax(-1)
    return logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def kept_then_shift(model, ids, mask):
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=KEEP + 1)
    logits = out.logits[:, :-1]
    logits = logits[:, -KEEP:]
    logits.div_(0.7)
    selected = torch.gather(logits, dim=-1, index=ids[:, -KEEP:].unsqueeze(-1)).squeeze(-1)
    return selected - torch.logsumexp(logits, dim=-1)


def full_then_kept(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = logits[:, :-1, :][:, -KEEP:] / 0.7
    return F.log_softmax(logits, -1).gather(2, ids[:, -KEEP:, None])[..., 0]


def cross_entropy(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.reshape(-1, tiny.VOCAB), ids[:, 1:].reshape(-1), reduction="none")
    return losses.view(ids.shape[0], -1)


def statistics(model, ids, mask):
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=KEEP + 1)
    logits = out.logits[:, :-1]
    targets = ids[:, -KEEP:]
    logps = logits.log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    top = logits.argmax(-1) == targets
    return logps.gather(-1, targets[..., None])[..., 0], entropy, top


@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
@pytest.mark.parametrize("fn", (full_then_shift, kept_then_shift, full_then_kept, cross_entropy, statistics))
def test_functions_that_others_wrote(fn, layout, small_tiles):
    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    got, want = compiled(fn, layout=layout)(model, ids, mask), fn(model, ids, mask)
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    for a, b in zip(got, want, strict=True):
        n = a.shape[1]
        known = (mask[:, -n:] * mask[:, -n - 1 : -1]).bool()
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype == torch.bool:
            assert bool((a == b)[known].all()) and not bool(a[~known].any())
        else:
            assert float((a - b)[known].detach().abs().max()) < 3e-5
            assert bool((a[~known] == 0).all())
    weights = torch.randn(known.shape, generator=tiny.generator(4)) * known
    found = gradients(model, (got[0] * weights).sum())
    assert_gradients(found, gradients(model, (want[0] * weights).sum()), 3e-5)
    graph = last()
    assert graph.runs == {layout: 1} and graph.last.tiles > 1
    tokens = stored_tokens(ids, mask) if layout == "prefix" else int(mask.sum())
    assert graph.last.run_tokens == tokens


def test_logits_that_are_returned_are_kept_and_not_tiled():
    def both(model, ids, mask):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return logits, logps

    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    got, want = compiled(both, layout="prefix")(model, ids, mask), both(model, ids, mask)
    real, known = mask.bool(), (mask[:, 1:] * mask[:, :-1]).bool()
    assert float((got[0] - want[0])[real].detach().abs().max()) < 2e-5
    assert float((got[1] - want[1])[known].detach().abs().max()) < 2e-5
    assert last().last.tiles == 0 and "tail" not in last().compiles


# -- what enters, what it costs --------------------------------------------------------------------


def test_one_entry_for_each_pair_of_tokens_that_is_read(monkeypatch):
    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    seen, real = [], tiles.run
    monkeypatch.setattr(
        tiles, "run", lambda rest, hidden, *a: seen.append(hidden.shape) or real(rest, hidden, *a)
    )
    with torch.no_grad():
        compiled(per_token_logps, layout="prefix")(model, ids, mask, KEEP)
    pairs = int((mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1]).sum())
    assert seen and all(shape == (1, pairs, 64) for shape in seen[:1])


def test_no_tensor_of_all_tokens_by_the_vocabulary(small_tiles, monkeypatch):
    """The head is computed a tile at a time, forward and backward, and nothing as wide is saved."""
    vocab, made = 1500, []
    real = F.linear

    def linear(*args):
        out = real(*args)
        made.append(out.numel() // vocab)
        return out

    model = Head(vocab=vocab)
    ids, mask = shared_batch("both", length=40)
    packed = compiled(per_token_logps, verify="never", layout="prefix")
    packed(model, ids, mask, 20).sum().backward()  # compiles
    monkeypatch.setattr(tiles, "F", SimpleNamespace(linear=linear))
    out = packed(model, ids, mask, 20)
    forward, todo, saved = len(made), [out.grad_fn], []
    while todo:
        node = todo.pop()
        names = [n for n in dir(node) if n == "saved_tensors" or n.startswith("_saved_")]
        for value in (getattr(node, n) for n in names):
            saved += [t for t in (value if isinstance(value, tuple) else [value])]
        todo += [n for n, _ in node.next_functions if n is not None]
    saved = [t for t in saved if isinstance(t, torch.Tensor)]
    out.sum().backward()
    pairs = int((mask[:, -20:] * mask[:, -21:-1]).sum())
    assert forward == last_tiles() > 10 and len(made) == 2 * forward
    assert max(made) <= 3 and sum(made) == 2 * pairs
    shapes = [t.shape for t in saved if vocab in t.shape]
    assert shapes and all(t == model.lm_head.weight.shape for t in shapes)


def last_tiles():
    return fx_packing.report().graphs[-1].last.tiles


INDUCTOR = [
    pytest.param("inductor", dtype, family, marks=pytest.mark.slow)
    for dtype in (torch.float32, torch.bfloat16)
    for family in ("llama", "gemma2", "gpt2")
]


@pytest.mark.parametrize(("inner", "dtype", "family"), [("aot_eager", torch.float32, "llama"), *INDUCTOR])
@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
def test_without_gradients_and_with_them_the_same_bits(layout, inner, dtype, family):
    """Under Inductor each mode has kernels of its own: `compat.inductor_options` makes them round alike."""
    model = tiny.build(family).to(dtype)
    ids, mask = shared_batch("left")
    packed = compiled(per_token_logps, layout=layout, inner=inner)
    with torch.no_grad():
        old = packed(model, ids, mask, KEEP)
        reference = packed(model, ids, mask, KEEP)
    new = packed(model, ids, mask, KEEP)
    assert torch.equal(old, new) and torch.equal(old, reference)
    ratio = (new - old).exp()
    assert bool((ratio == 1).all())
    ratio.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert {g.last.layout for g in fx_packing.report().graphs} == {layout}


@pytest.mark.parametrize("temperature", (1e-3, 1.0))
def test_masked_columns_are_finite_forward_and_backward(temperature):
    model = tiny.build("llama")
    ids, mask = shared_batch("both")
    mask[2] = 0  # a row with no token
    packed = compiled(per_token_logps)
    logps, entropy = packed(model, ids, mask, 20, temperature=temperature, entropy=True)
    for value in (logps, entropy, (logps - logps.detach()).exp()):
        assert bool(value.isfinite().all())
    ((logps - logps.detach()).exp().sum() + entropy.sum()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_under_autocast():
    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    packed = compiled(per_token_logps, layout="prefix")
    with torch.autocast("cpu", torch.bfloat16):
        got = packed(model, ids, mask, KEEP)
        want = per_token_logps(model, ids, mask, KEEP)
    known = (mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1]).bool()
    exact = alone(model, ids, mask, KEEP)[0]
    noise = float((want.double() - exact)[known].abs().max())
    assert got.dtype == torch.float32
    assert float((got.double() - exact)[known].abs().max()) < 2 * noise + 0.02
    found = gradients(model, got[known].sum())
    exact = gradients(model, exact[known].sum())
    for name, g in found.items():
        assert float((g - exact[name]).norm() / exact[name].norm()) < 0.1, name
    assert last().last.tiles


def test_slices_whose_lengths_part_run_padded():
    """Equal when captured, not later: the join means nothing any more."""

    def score(model, ids, mask, a, b):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[:, -a:].log_softmax(-1).gather(-1, ids[:, -b:, None])[..., 0]

    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    packed = compiled(score)
    with torch.no_grad():
        for a, b in ((9, 9), (8, 8), (9, 8)):  # gather takes the first 8 of 9
            got, want = packed(model, ids, mask, a, b), score(model, ids, mask, a, b)
            real = mask[:, -b:].bool() if a == b else torch.ones_like(ids[:, -b:], dtype=torch.bool)
            assert float((got - want)[real].abs().max()) < 2e-5
    assert "differently" in fx_packing.report().graphs[-1].reason


def test_a_hole_between_a_token_and_the_one_before_it_runs_padded():
    """Prompts padded on the right, then completions: the logits before a completion's first token are
    those of a pad, padded or not; nothing packed could be right."""
    model = tiny.build("llama")
    ids, mask = shared_batch("right")
    mask = mask.clone()
    mask[:2, 4:6], mask[:2, 6:9] = 0, 1
    packed = compiled(per_token_logps)
    with torch.no_grad():
        got, want = packed(model, ids, mask, 22), per_token_logps(model, ids, mask, 22)
    assert torch.allclose(got, want, atol=1e-6)
    graph = fx_packing.report().graphs[-1]
    assert graph.rewritten and graph.runs == {"padded": 1} and "hole" in graph.last.reason


def test_a_bool_mask():
    model = tiny.build("llama")
    ids, mask = shared_batch("left")
    with torch.no_grad():
        got = compiled(per_token_logps, layout="prefix")(model, ids, mask.bool(), KEEP)
        want = per_token_logps(model, ids, mask, KEEP)
    known = (mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1]).bool()
    assert float((got - want)[known].abs().max()) < 2e-5
    assert last().runs == {"prefix": 1}


@pytest.mark.parametrize("dynamic", (None, True))
def test_another_temperature_is_packed_too(dynamic):
    """Dynamo makes a float that changes an input; the tail takes it as one."""
    model = Head()
    ids, mask = shared_batch("left")
    packed = torch.compile(
        per_token_logps, backend="grpo_pack", options={"inner": "aot_eager"}, dynamic=dynamic
    )
    known = (mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1]).bool()
    for temperature in (0.9, 0.8, 1.3, 0.7):
        got = packed(model, ids, mask, KEEP, temperature=temperature)
        want = per_token_logps(model, ids, mask, KEEP, temperature=temperature)
        assert float((got - want)[known].detach().abs().max()) < 1e-10
        found, exact = gradients(model, got[known].sum()), gradients(model, want[known].sum())
        assert_gradients(found, exact, 1e-10)
        assert last().last.layout == "prefix" and last().last.tiles
    graphs = fx_packing.report().graphs
    assert sum(sum(g.runs.values()) for g in graphs) == 4 and len(graphs) == (1 if dynamic else 2)
    # With and without recording gradients, in one value or in all.
    assert graphs[-1].compiles["tail"] <= 4 and not any("temperature" in g for g in graphs[-1].guards)


def test_an_int_temperature_that_varies_runs_padded_and_says_so():
    model = Head()
    ids, mask = shared_batch("left")
    packed = compiled(per_token_logps)
    with torch.no_grad():
        for temperature in (2, 3):
            got = packed(model, ids, mask, KEEP, temperature=temperature)
            want = per_token_logps(model, ids, mask, KEEP, temperature=temperature)
            known = (mask[:, -KEEP:] * mask[:, -KEEP - 1 : -1]).bool()
            assert float((got - want)[known].abs().max()) < 1e-10
    first, second = fx_packing.report().graphs
    assert first.rewritten and not second.rewritten
    assert "the int L['temperature'], which varies from call to call" in second.reason


def test_another_number_before_the_head_runs_padded_and_says_so():
    def score(model, ids, mask, scale, *, temperature):
        hidden = model.trunk(ids, mask) * scale
        logits = model.lm_head(hidden)[:, :-1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    model = Head()
    ids, mask = shared_batch("left")
    known = (mask[:, 1:] * mask[:, :-1]).bool()
    packed = torch.compile(score, backend="grpo_pack", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="scale.*changed from 0.9.*dynamic=False"):
        for scale, temperature in ((0.9, 0.7), (0.9, 0.6), (0.8, 0.6)):
            got = packed(model, ids, mask, scale, temperature=temperature)
            want = score(model, ids, mask, scale, temperature=temperature)
            assert float((got - want)[known].abs().max()) < 1e-10
    graph = fx_packing.report().graphs[-1]
    assert graph.runs == {"prefix": 2, "padded": 1}
    assert "scale == 0.9" in graph.guards and not any("temperature" in g for g in graph.guards)


# -- tiles by themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_tiles_are_the_whole(dtype, monkeypatch):
    monkeypatch.setattr(tiles, "_ELEMENTS", 700)
    monkeypatch.setattr(tiles, "_LEAST", 2)
    g = tiny.generator(0)
    hidden, weight, bias = (
        torch.randn(s, generator=g).to(dtype).requires_grad_() for s in ((1, 53, 8), (40, 8), (40,))
    )
    scale = torch.tensor(1.3, requires_grad=True)
    target = torch.randint(0, 40, (1, 53), generator=g)

    def rest(logits, target, scale):
        logps = (logits.float() * scale).log_softmax(-1)
        return logps.gather(-1, target[..., None])[..., 0], logits.argmax(-1)

    got, top = tiles.run(rest, hidden, weight, bias, [target, scale], [1, None], 1, [1, 1])
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias, scale)]
    want = (F.linear(*wide[:3]) * wide[3]).log_softmax(-1).gather(-1, target[..., None])[..., 0]
    eps = 0.05 if dtype is torch.bfloat16 else 1e-4  # `rest` is float32 throughout
    assert len(tiles.tile_bounds(53, 40)) == 4 and not top.requires_grad
    assert float((got - want).detach().abs().max()) < eps
    seeds = torch.rand(1, 53, generator=g)
    found = torch.autograd.grad((got * seeds).sum(), (hidden, weight, bias, scale))
    exact = torch.autograd.grad((want * seeds).sum(), wide)
    for a, b, t in zip(found, exact, (hidden, weight, bias, scale), strict=True):
        assert a.dtype == t.dtype and a.shape == t.shape
        assert float((a - b).norm() / b.norm()) < eps


def test_tiles_cover_every_token_once():
    for tokens in (1, 2, 255, 256, 257, 5000):
        bounds = tiles.tile_bounds(tokens, 1 << 20)
        assert bounds[0][0] == 0 and bounds[-1][1] == tokens
        assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
        assert all(high - low <= 256 for low, high in bounds)


@pytest.mark.parametrize("dynamic", (None, *(pytest.param(d, marks=pytest.mark.slow) for d in (True, False))))
@pytest.mark.parametrize("layout", (pytest.param("varlen", marks=pytest.mark.slow), "prefix"))
def test_all_columns_but_the_first(layout, dynamic):
    """K = L - 1 of each length: where sizes are symbols, Dynamo finds L equal to K + 1 and writes it so."""
    model = tiny.build("llama")
    packed = torch.compile(
        per_token_logps,
        backend="grpo_pack",
        options={"inner": "aot_eager", "layout": layout, "on_refuse": "raise"},
        dynamic=dynamic,
    )
    lengths = ((5, 9, 3), 2, 8), ((4, 7), 3, 11), ((6,), 5, 4), ((2, 12, 8, 5), 2, 7)
    for seed, (prompts, group, completion) in enumerate(lengths):
        ids, mask, _ = tiny.group_batch(prompts, group, completion, seed=seed)
        keep = ids.shape[1] - 1
        got = packed(model, ids, mask, keep)
        graph = last()
        assert graph.last.layout == layout and graph.last.run_tokens < graph.last.padded_tokens
        known = (mask[:, 1:] * mask[:, :-1]).bool()  # a row's first token has none before it
        logits = tiny.per_row(model, ids, mask)[:, :-1].log_softmax(-1)
        want = logits.gather(-1, ids[:, 1:, None])[..., 0].masked_fill(~known, 0)
        assert float((got - want).abs().max().detach()) < 2e-5
        parameters = list(model.parameters())
        found = torch.autograd.grad(got.square().sum(), parameters)
        exact = torch.autograd.grad(want.square().sum(), parameters)
        for a, b in zip(found, exact, strict=True):
            assert float((a - b).norm()) < 1e-4 * float(b.norm())
    with torch.no_grad():  # fewer columns: another graph, whose sizes are not tied
        got = packed(model, ids, mask, 5)
        assert last().last.layout == layout
        assert torch.allclose(got, per_token_logps(model, ids, mask, 5), atol=2e-5)


def test_two_ints_of_which_one_is_tied_by_another_distance():
    """L is a + 136 here: only L = K + 1 is read as such, the rest is refused or right."""
    model = tiny.build("llama")

    def ends(ids, mask, a, b):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[:, 136:] * 1.0 + ids[:, -a:, None] * 0.0, logits[:, -b:] * 1.0

    packed = torch.compile(
        ends, backend="grpo_pack", dynamic=True, options={"inner": "eager", "verify": "never"}
    )
    for length, a, b in ((150, 14, 14), (150, 14, 5), (156, 20, 30)):
        ids, mask = tiny.batch("left", rows=3, length=length, seed=1)
        with torch.no_grad():
            found = packed(ids, mask, a, b)
            want = ends(ids, mask, a, b)
        for got, full in zip(found, want, strict=True):
            real = mask[:, -full.shape[1] :].bool()
            assert got.shape == full.shape and float((got - full)[real].abs().max()) < 2e-5
