"""A small decoder with holes in it: tests put into them what a model may do to its tokens."""

from __future__ import annotations

from collections.abc import Callable

import packing
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx_packing
from fx_packing.report import GraphReport


class Toy(nn.Module):
    """Embedding, `mix(toy, x, ids, mask)`, one attention (`attend(toy, q, k, v, mask, x)`), head."""

    def __init__(self, mix: Callable | None = None, attend: Callable | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(tiny.VOCAB, 64)
            self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
            self.conv = nn.Conv1d(64, 64, 3, padding=1)
            self.batch_norm = nn.BatchNorm1d(64)
            self.place = nn.Parameter(torch.randn(512, 64))
            self.temperature = nn.Parameter(torch.ones(4, 1, 1))
            self.bias = nn.Parameter(torch.zeros(4, 1, 1))
            for w in (self.q.weight, self.k.weight):
                nn.init.normal_(w, std=0.3)
        band = torch.ones(64, 64, dtype=torch.bool).tril()
        self.register_buffer("band", band & ~band.tril(-30))
        self.register_buffer("wide", torch.ones(4096, 4096, dtype=torch.bool).tril())
        self.register_buffer("thirty", torch.tensor(30))
        self.register_buffer("calls", torch.zeros(()))
        self.mix, self.attend = mix, attend
        self.eval()

    def forward(self, ids: Tensor, attention_mask: Tensor, **extra: Tensor) -> Tensor:
        b, length = ids.shape
        x = self.embed(ids)
        if self.mix is not None:
            x = self.mix(self, x, ids, attention_mask, **extra)
        q, k, v = (f(x).view(b, length, 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.attend is not None:
            y = self.attend(self, q, k, v, attention_mask, x)
        else:
            allowed = causal(length) & real(attention_mask)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o(y.transpose(1, 2).reshape(b, length, -1))
        return F.linear(x, self.embed.weight)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def real(mask: Tensor) -> Tensor:
    return mask[:, None, None, :].bool()


def places(length: int) -> tuple[Tensor, Tensor]:
    """The positions of queries and of keys."""
    place = torch.arange(length)
    return place[:, None], place[None, :]


def sdpa(allowed: Callable[[Toy, int, Tensor], Tensor], **options) -> Callable:
    """Attention with a mask made by `allowed(toy, length, attention_mask)`."""

    def attend(toy, q, k, v, mask, x):
        mask = allowed(toy, q.shape[2], mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    return attend


def eager(
    scores: Callable | None = None, weights: Callable | None = None, scale: float = 0.25
) -> Callable:
    """Attention spelled out, with `scores(toy, s, x)` before and `weights(toy, w, x)` after softmax."""

    def attend(toy, q, k, v, mask, x):
        s = q @ k.transpose(2, 3) * scale
        s = scores(toy, s, x) if scores else s
        allowed = causal(q.shape[2]) & real(mask)
        w = s.masked_fill(~allowed, torch.finfo(s.dtype).min).softmax(-1)
        return (weights(toy, w, x) if weights else w) @ v

    return attend


def run(
    model: nn.Module, *, dynamic: bool | None = None, length: int = 48, padding: str = "left",
    lengths: tuple[int, ...] = (47, 40, 31, 9), fullgraph: bool = True, extra: dict | None = None,
    **options,
) -> tuple[GraphReport, float, float]:  # fmt: skip
    """(report, largest distance to the captured padded result, and to the rows alone), of real tokens.

    Nothing is verified at run time: what is wrong here was proven wrongly at compile time.
    """
    extra = extra or {}
    ids, mask = tiny.batch(padding, lengths=list(lengths), length=length, seed=1)
    options = {"verify": "never", "layout": "varlen"} | options
    packed = packing.pack(model, dynamic=dynamic, fullgraph=fullgraph, **options)
    with torch.no_grad():
        got = packed(ids, mask, **extra)
        padded = model(ids, mask, **extra)
        alone = tiny.per_row(model, ids, mask) if not extra else padded
    chosen = (
        mask.bool() if got.shape[:2] == ids.shape else torch.ones(got.shape[0], dtype=torch.bool)
    )
    assert not got.isnan().any()
    distances = [float((got - want)[chosen].abs().max()) for want in (padded, alone)]
    return fx_packing.report().graphs[-1], *distances
