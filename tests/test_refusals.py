"""What mixes tokens, and bad or unusual input: refused with the reason, or right. Never wrong."""

from __future__ import annotations

import math

import packing
import pytest
import tiny
import torch
import torch.nn.functional as F
from toys import Toy, run

import fx_packing

ROWS, LENGTH = 4, 48  # what `toys.run` makes


def changed(x, change):
    """A copy of `x` after `change(copy)` worked on it in place."""
    x = x * 1
    change(x)
    return x


MIXING = {
    "mean over the sequence": lambda t, x, i, m: x + x.mean(1, keepdim=True),
    "cumsum": lambda t, x, i, m: x.cumsum(1),
    "roll": lambda t, x, i, m: x.roll(1, 1),
    "roll rows": lambda t, x, i, m: x.roll(1, 0),
    "flip": lambda t, x, i, m: x.flip(1),
    "strided slice": lambda t, x, i, m: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
    "last token": lambda t, x, i, m: x + x[:, -1:],
    "last token by select": lambda t, x, i, m: x + x[:, -1][:, None],
    "first row": lambda t, x, i, m: x + x[0],
    "shift by cat": lambda t, x, i, m: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "shift by pad": lambda t, x, i, m: F.pad(x, (0, 0, 1, -1)),
    "neighbours subtracted": lambda t, x, i, m: x + F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0)),
    "diff": lambda t, x, i, m: x + torch.diff(x, dim=1, prepend=x[:, :1]),
    "halves swapped": lambda t, x, i, m: torch.cat(x.chunk(2, 1)[::-1], 1),
    "convolution": lambda t, x, i, m: t.conv(x.transpose(1, 2)).transpose(1, 2),
    "pooling": lambda t, x, i, m: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "unfold": lambda t, x, i, m: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "fft": lambda t, x, i, m: torch.fft.fft(x, dim=1).real,
    "batch norm in training": lambda t, x, i, m: F.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ).transpose(1, 2),
    "softmax over the rows": lambda t, x, i, m: x.softmax(0),
    "less its mean over the rows": lambda t, x, i, m: x - x.mean(0),
    "row embedding": lambda t, x, i, m: x + t.place[torch.arange(x.shape[0])][:, None],
    "sort": lambda t, x, i, m: x.sort(dim=1).values,
    "order of ids": lambda t, x, i, m: x.gather(1, i.argsort(1)[:, :, None].expand_as(x)),
    "kth value": lambda t, x, i, m: x - x.kthvalue(2, dim=1, keepdim=True).values,
    "cummax": lambda t, x, i, m: x.cummax(1).values,
    "masked pooling": lambda t, x, i, m: x + (x * m[..., None]).sum(1, keepdim=True),
    "row lengths": lambda t, x, i, m: x * m.sum(1)[:, None, None],
    "scrambling view": lambda t, x, i, m: x.view(x.shape[1], x.shape[0], -1).transpose(0, 1),
    "scrambling reshape": lambda t, x, i, m: (
        x.reshape(-1, 64).view(x.shape[1], x.shape[0], 64).transpose(0, 1)
    ),
    "tokens cut in two": lambda t, x, i, m: x.view(x.shape[0], -1, 32).flip(1).view_as(x),
    "linear attention": lambda t, x, i, m: x + x @ (x.transpose(1, 2) @ x),
    "einsum over tokens": lambda t, x, i, m: torch.einsum("bld,bmd,bme->ble", x, x, x),
    "norm of all": lambda t, x, i, m: x / x.norm(),
    "layer norm of all": lambda t, x, i, m: F.layer_norm(x, x.shape[1:]),
    "tril of tokens": lambda t, x, i, m: x + x.tril(),
    "isin": lambda t, x, i, m: x + torch.isin(i, i[:1]).to(x.dtype)[..., None],
    "take": lambda t, x, i, m: x + torch.take(x, i)[..., None],
    "token looked up": lambda t, x, i, m: x + x.flatten(0, 1)[torch.zeros_like(i)],
    "scatter": lambda t, x, i, m: x.scatter(1, i[..., None].clamp(max=2).expand_as(x), x),
    "index_put": lambda t, x, i, m: x.index_put((torch.tensor([0]), torch.tensor([1])), x[0, 0]),
    "index_copy": lambda t, x, i, m: x.index_copy(1, torch.tensor([0]), x[:, 1:2]),
    "set a slice": lambda t, x, i, m: changed(
        x, lambda y: y.__setitem__((slice(None), slice(3)), 0)
    ),
    "change a slice": lambda t, x, i, m: changed(x, lambda y: y[:, -4:].mul_(2)),
    "change a reshaped copy": lambda t, x, i, m: changed(
        x, lambda y: y.transpose(0, 1).reshape(-1, 64).mul_(2)
    ),
    "change the input": lambda t, x, i, m: x + i.add_(0)[..., None] * 0,
    "change a buffer": lambda t, x, i, m: x + t.calls.add_(1),
    "random numbers": lambda t, x, i, m: x + torch.rand_like(x) * 0,
    "coin flips": lambda t, x, i, m: x + torch.bernoulli(x.sigmoid()) * 0,
    "channel dropout": lambda t, x, i, m: x + F.dropout1d(x, 0.5, True) * 0,
    "gradients by frequency": lambda t, x, i, m: (
        x + F.embedding(i, t.embed.weight, scale_grad_by_freq=True)
    ),
    "positions from the end": lambda t, x, i, m: (
        x * (x.shape[1] - 1 - torch.arange(x.shape[1]))[:, None]
    ),
    "positions over L": lambda t, x, i, m: x * (torch.arange(x.shape[1]) / x.shape[1])[:, None],
    "positions times 1/L": lambda t, x, i, m: (
        x * (torch.arange(x.shape[1]) * (1 / x.shape[1]))[:, None]
    ),
    "positions by linspace": lambda t, x, i, m: x * torch.linspace(0, 1, x.shape[1])[:, None],
    "positions backwards": lambda t, x, i, m: x * torch.arange(x.shape[1] - 1, -1, -1)[:, None],
    "a table backwards": lambda t, x, i, m: x + t.place[: x.shape[1]].flip(0),
    "product and permuted sum": lambda t, x, i, m: torch.addmm(
        x.transpose(0, 1).reshape(-1, 64), x.reshape(-1, 64), t.o.weight
    ).view_as(x),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused(name):
    graph, padded, _ = run(Toy(mix=MIXING[name]))
    assert not graph.rewritten
    assert padded == 0 or name in ("channel dropout", "change a buffer")
    assert ".py:" in graph.reason and "; " in graph.reason  # where, and what would help


@pytest.mark.parametrize(
    "name", ["cumsum", "roll", "shift by cat", "change a slice", "scrambling view"]
)
def test_what_mixes_tokens_is_refused_dynamic(name):
    graph, padded, _ = run(Toy(mix=MIXING[name]), dynamic=True)
    assert not graph.rewritten and padded == 0


RIGHT = {
    "mean over the hidden size": lambda t, x, i, m: x - x.mean(-1, keepdim=True),
    "one position times a number": lambda t, x, i, m: x * (torch.arange(x.shape[1]) * 0.1)[:, None],
    "every second position": lambda t, x, i, m: torch.where(
        torch.arange(x.shape[1])[:, None] % 2 == 0, x, -x
    ),
    "a table of numbers": lambda t, x, i, m: x * t.place[: x.shape[1], :1],
    "times the mask": lambda t, x, i, m: x * m[..., None],
    "a number that is L": lambda t, x, i, m: x * (torch.full((1,), LENGTH) / LENGTH),
    "a number that is B": lambda t, x, i, m: x * (x.new_full((1,), ROWS) / ROWS),
    "in place on a view": lambda t, x, i, m: changed(x, lambda y: torch.unsqueeze(y, 0).mul_(2)),
    "in place on channels": lambda t, x, i, m: changed(x, lambda y: torch.narrow(y, 2, 0, 3).mul_(2)),
    "in place on positions": lambda t, x, i, m: x
    + t.place[torch.arange(x.shape[1]).add_(1)] + t.place[torch.arange(x.shape[1])],
    "at most 1024 tokens": lambda t, x, i, m: x[:, :1024],
    "swapped and back": lambda t, x, i, m: (x.transpose(0, 1) * 2).transpose(0, 1),
    "heads merged with rows": lambda t, x, i, m: x.view(*x.shape[:2], 4, 16).transpose(1, 2).reshape(
        x.shape[0] * 4, -1, 16
    ).view(x.shape[0], 4, -1, 16).transpose(1, 2).reshape(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_keeps_tokens_apart_is_packed(name, dynamic):
    graph, _, alone = run(Toy(mix=RIGHT[name]), dynamic=dynamic)
    assert graph.rewritten, graph.reason
    assert graph.last.layout == "varlen", graph.last.reason
    assert alone < 5e-5


NUMBERS = {
    "L - 1": lambda t, x, i, m: x * (x.shape[1] - 1) / 40,
    "L + 1": lambda t, x, i, m: x / (x.shape[1] + 1) * 40,
    "the root of L": lambda t, x, i, m: x * math.sqrt(x.shape[1]),
    "1 / L": lambda t, x, i, m: x * (1.0 / x.shape[1]),
    "B - 1": lambda t, x, i, m: x * (x.shape[0] - 1),
    "how many": lambda t, x, i, m: x * (x.numel() / 9000),
    "a filled L": lambda t, x, i, m: x * torch.full((1,), x.shape[1]),
    "a table's mean": lambda t, x, i, m: x + t.place[: x.shape[1]].mean(0),
    "half of L": lambda t, x, i, m: x * (x.shape[1] // 2),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_used_as_numbers(name, dynamic):
    # A literal that was L at capture stays what it was, so the result is that of the padded batch.
    graph, padded, _ = run(Toy(mix=NUMBERS[name]), dynamic=dynamic)
    assert padded < 1e-3 if graph.rewritten else padded == 0
    if dynamic:
        assert not graph.rewritten and ("number" in graph.reason or "mean" in graph.reason)


# -- inputs --------------------------------------------------------------------------------------


def test_one_number_a_row_is_refused():
    class Tempered(Toy):
        def forward(self, ids, attention_mask, temperature):
            return super().forward(ids, attention_mask) / temperature[:, None, None]

    graph, padded, _ = run(Tempered(), extra={"temperature": torch.tensor([1.0, 2, 3, 4])})
    assert not graph.rewritten and "one entry a row" in graph.reason and padded == 0


def test_one_number_a_column_is_refused():
    class Weighted(Toy):
        def forward(self, ids, attention_mask, weights):
            return super().forward(ids, attention_mask) * weights[:, None]

    graph, padded, _ = run(Weighted(), extra={"weights": torch.arange(1.0, LENGTH + 1)})
    assert not graph.rewritten and "one entry a column" in graph.reason and padded == 0


def test_padding_is_never_guessed_from_ids():
    class Guessing(Toy):
        def forward(self, ids, attention_mask):
            return super().forward(ids, ids != 0)

    graph, padded, _ = run(Guessing())
    assert not graph.rewritten and "never guessed" in graph.reason and padded == 0


LLAMA = dict(num_hidden_layers=1)


def llama_run(ids, mask, **extra):
    model = tiny.build("llama", **LLAMA)
    extra = {"use_cache": False} | extra
    with torch.no_grad():
        got = packing.pack(model)(ids, attention_mask=mask, **extra).logits
        want = model(ids, attention_mask=mask, **extra).logits
    return fx_packing.report().graphs[-1], got, want


def test_full_rows_and_no_mask():
    ids, mask = tiny.batch("none")
    graph, got, want = llama_run(ids, mask)
    assert graph.last.layout != "padded"
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    torch._dynamo.reset()
    graph, got, want = llama_run(ids, None)
    assert graph.last.layout != "padded"
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("empty", [[1], [0, 1, 2, 3]])
def test_rows_without_a_real_token(empty):
    ids, mask = tiny.batch("left")
    mask[empty] = 0
    graph, got, _ = llama_run(ids, mask)
    assert graph.rewritten and got.isfinite().all()
    if len(empty) < 4:
        assert not got[1].any()


def test_holes():
    ids, mask = tiny.batch("holes")
    graph, got, _ = llama_run(ids, mask)
    want = tiny.per_row(tiny.build("llama", **LLAMA), ids, mask)
    assert graph.last.layout != "padded"
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_mask_with_other_numbers_runs_padded():
    ids, mask = tiny.batch("left")
    graph, got, want = llama_run(ids, mask * 2)
    assert graph.last.layout == "padded" and "0 and 1" in graph.last.reason
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["4-D", "float"])
def test_other_masks_are_refused(kind):
    ids, mask = tiny.batch("left")
    if kind == "4-D":
        allowed = torch.ones(24, 24, dtype=torch.bool).tril() & mask[:, None, None].bool()
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    else:
        mask = mask.float()
    graph, got, want = llama_run(ids, mask)
    assert not graph.rewritten and "attention_mask" in graph.reason
    assert torch.equal(got, want)


def test_labels_and_cache_are_refused_with_the_remedy():
    ids, mask = tiny.batch("left")
    graph, got, want = llama_run(ids, mask, labels=ids)
    assert not graph.rewritten and "labels" in graph.reason and torch.equal(got, want)
    torch._dynamo.reset()
    graph, got, want = llama_run(ids, mask, use_cache=True)
    assert not graph.rewritten and "use_cache=False" in graph.reason and torch.equal(got, want)


def test_a_bad_token_id_raises_as_the_model_does():
    ids, mask = tiny.batch("left")
    ids[0, -1] = tiny.VOCAB + 5
    model = tiny.build("llama", **LLAMA)
    with torch.no_grad(), pytest.raises(IndexError):
        packing.pack(model)(ids, attention_mask=mask, use_cache=False)


def configured(kind):
    import transformers as tf

    common = dict(vocab_size=128, hidden_size=64, num_hidden_layers=1, pad_token_id=0)
    heads = dict(num_attention_heads=4, intermediate_size=96)
    if kind == "mamba":
        return tf.MambaForCausalLM(tf.MambaConfig(**common, state_size=4))
    if kind == "lfm2":
        layers = dict(layer_types=["conv"], num_key_value_heads=2)
        return tf.Lfm2ForCausalLM(tf.Lfm2Config(**common, **heads, **layers))
    if kind == "bert":
        return tf.BertModel(tf.BertConfig(**common, **heads))
    if kind == "opt":
        return tf.OPTForCausalLM(
            tf.OPTConfig(vocab_size=128, hidden_size=64, num_hidden_layers=1, ffn_dim=96,
                         num_attention_heads=4, word_embed_proj_dim=64, max_position_embeddings=64)
        )  # fmt: skip
    return tiny.build("mixtral", num_hidden_layers=1)


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("mamba", "recurrent, convolutional"),
        ("lfm2", "recurrent, convolutional"),
        ("bert", "bidirectional"),
        ("opt", "position_ids"),
        ("mixtral", "mixture-of-experts"),
    ],
)
def test_kinds_of_models_that_are_refused(kind, reason):
    model = configured(kind).eval()
    ids, mask = tiny.batch("left", length=20)
    extra = {} if kind == "bert" else {"use_cache": False}
    with torch.no_grad():
        got = packing.pack(model, fullgraph=False)(ids, attention_mask=mask, **extra)
        want = model(ids, attention_mask=mask, **extra)
    graphs = fx_packing.report().graphs
    assert graphs and not any(g.rewritten for g in graphs)
    assert any(reason in g.reason for g in graphs), [g.reason for g in graphs]
    torch.testing.assert_close(tiny.logits_of(got), tiny.logits_of(want), atol=1e-5, rtol=1e-5)
