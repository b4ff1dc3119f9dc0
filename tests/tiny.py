"""Small models, random padded batches and a row-by-row oracle: `import tiny` from any test.

Nothing here reads or moves the global random state, and nothing depends on fx_packing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 128
PAD = 0

# ------------------------------------------------------------------------------------------------
# Models of transformers, with random weights

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    # The default spread of 0.02 leaves attention close to uniform: too weak to show a wrong mask.
    "initializer_range": 0.2,
}
_OWN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    # Layer 0 has the window, layer 1 sees everything; both soft-cap their scores.
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "initializer_range": 0.2,
}

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "mixtral")
#: Left padding moves their numbers: positions are learned, and counted from the first column.
ABSOLUTE = ("gpt2",)


def build(family: str, *, seed: int = 0, attn_implementation: str | None = None, **overrides):
    """A two-layer causal LM of `family`, float32, in eval mode; `overrides` go to its config.

    Attention is SDPA unless said otherwise; Gemma 2 alone must spell out matmul and softmax.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = _GPT2 if family == "gpt2" else _COMMON | _OWN.get(family, {})
    config = AutoConfig.for_model(family, **settings | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        )
    return model.eval()


# ------------------------------------------------------------------------------------------------
# Batches


class Batch(NamedTuple):
    ids: Tensor  #  [B, L] int64
    mask: Tensor  # [B, L] int64, 1 where a token is real


PADDINGS = ("left", "right", "both", "none", "holes")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(
    padding: str = "left",
    *,
    rows: int = 4,
    length: int = 24,
    seed: int | torch.Generator = 0,
    lengths: list[int] | None = None,
    vocab: int = VOCAB,
    pad: int = PAD,
) -> Batch:
    """Random rows. `lengths` are the numbers of real tokens; drawn, from 2 up, if not given.

    Real tokens are drawn from the whole vocabulary, so the pad id occurs among them too: padding
    is what the mask says, never what an id looks like. "both" pads left and right, "holes" puts
    the real tokens anywhere.
    """
    if padding not in PADDINGS:
        raise ValueError(f"padding is one of {PADDINGS}, not {padding!r}")
    g = seed if isinstance(seed, torch.Generator) else generator(seed)

    def draw(low: int, high: int) -> int:  # both included
        return int(torch.randint(low, high + 1, (), generator=g))

    if lengths is None:
        lengths = [length if padding == "none" else draw(2, length - 1) for _ in range(rows)]
    mask = torch.zeros(len(lengths), length, dtype=torch.int64)
    for row, n in zip(mask, lengths, strict=True):
        free = length - n
        if padding == "holes":
            row[torch.randperm(length, generator=g)[:n]] = 1
        else:
            start = {"left": free, "right": 0, "both": draw(0, free), "none": 0}[padding]
            row[start : start + n] = 1
    if padding == "none" and not mask.all():
        raise ValueError("padding='none' means that every row is full")
    ids = torch.randint(0, vocab, mask.shape, generator=g)
    return Batch(ids.where(mask.bool(), pad), mask)


class GroupBatch(NamedTuple):
    ids: Tensor
    mask: Tensor
    keep: int  # the completion columns at the end


def group_batch(
    prompts: list[int] = (5, 9),
    group: int = 3,
    completion: int = 8,
    *,
    seed: int | torch.Generator = 0,
    vocab: int = VOCAB,
    pad: int = PAD,
) -> GroupBatch:
    """A trainer's batch: left-padded prompts of these lengths, each with `group` right-padded
    completions of 1 to `completion` tokens. The last completion of each group is full."""
    g = seed if isinstance(seed, torch.Generator) else generator(seed)
    width = max(prompts)
    ids, mask = [], []
    for n in prompts:
        prompt = torch.randint(0, vocab, (n,), generator=g)
        for i in range(group):
            m = int(torch.randint(1, completion + 1, (), generator=g))
            m = completion if i == group - 1 else m
            real = torch.cat([prompt, torch.randint(0, vocab, (m,), generator=g)])
            ids.append(F.pad(real, (width - n, completion - m), value=pad))
            mask.append(F.pad(torch.ones_like(real), (width - n, completion - m)))
    return GroupBatch(torch.stack(ids), torch.stack(mask), completion)


# ------------------------------------------------------------------------------------------------
# The oracle


def logits_of(output) -> Tensor:
    """The tensor that matters in whatever a model returns."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def per_row(model, ids: Tensor, mask: Tensor, *, logits_to_keep: int = 0, **kw) -> Tensor:
    """What each row gives when it runs alone: real tokens only, positions from 0.

    Returns `[B, L, ...]`, each value in the column where its token stands, zeros where there is
    no token; with `logits_to_keep` the last columns only. Differentiable. A `position_ids` of
    `[B, L]` is taken along: the row then runs with the positions of its real tokens.
    """
    if hasattr(model, "config"):
        kw.setdefault("use_cache", False)
    positions = kw.pop("position_ids", None)
    rows: list[Tensor | None] = []
    for b in range(ids.shape[0]):
        real = mask[b].nonzero().squeeze(-1)
        if len(real) == 0:
            rows.append(None)
            continue
        alone = ids[b, real][None]
        if positions is not None:
            kw["position_ids"] = positions[b, real][None]
        out = logits_of(model(alone, attention_mask=torch.ones_like(alone), **kw))[0]
        rows.append(out.new_zeros(ids.shape[1], *out.shape[1:]).index_copy(0, real, out))
    like = next(row for row in rows if row is not None)
    whole = torch.stack([torch.zeros_like(like) if row is None else row for row in rows])
    return whole[:, -logits_to_keep:] if logits_to_keep else whole


# ------------------------------------------------------------------------------------------------
# A decoder of our own, for spellings that transformers does not use


class PlainDecoder(nn.Module):
    """A decoder-only transformer in plain torch, which computes in the dtype of its weights.

    positions     "rotary" or "learned"
    table         how the table of positions is read when the caller gives none: "slice" for
                  `table[:L]`, "arange" for `table[arange(L)]`
    attention     "causal" for `is_causal=True` (blind to the attention mask: pad right only),
                  "mask" for a boolean mask
    kv_heads      fewer than `heads` means grouped queries
    enable_gqa    grouped queries by SDPA's own flag instead of `repeat_interleave`
    """

    def __init__(
        self,
        *,
        positions: str = "rotary",
        table: str = "slice",
        attention: str = "mask",
        kv_heads: int = 4,
        enable_gqa: bool = False,
        vocab: int = VOCAB,
        hidden: int = 64,
        heads: int = 4,
        layers: int = 2,
        max_length: int = 512,
        seed: int = 0,
    ):
        super().__init__()
        for name, value, known in (
            ("positions", positions, ("rotary", "learned")),
            ("table", table, ("slice", "arange")),
            ("attention", attention, ("causal", "mask")),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {known}, not {value!r}")
        self.positions, self.table, self.attention = positions, table, attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocab, hidden)
            if positions == "learned":
                self.place = nn.Embedding(max_length, hidden)
            self.layers = nn.ModuleList(
                _Layer(hidden, heads, kv_heads, enable_gqa) for _ in range(layers)
            )
        self.norm = _Norm(hidden)
        if positions == "rotary":
            d = hidden // heads
            speed = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
            angle = torch.arange(max_length, dtype=torch.float64)[:, None] * speed
            angle = torch.cat([angle, angle], dim=-1)
            # Kept in float64, so that `.double()` is exact to the last digits.
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)
        self.eval()

    def _look_up(self, table: Tensor, position_ids: Tensor | None, length: int) -> Tensor:
        if position_ids is not None:
            return F.embedding(position_ids, table)  # [B, L, .]
        if self.table == "slice":
            return table[:length]
        return F.embedding(torch.arange(length, device=table.device), table)

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, position_ids=None):
        length = input_ids.shape[1]
        x = self.embed(input_ids)
        rotary = None
        if self.positions == "learned":
            x = x + self._look_up(self.place.weight, position_ids, length)
        else:
            rotary = [self._look_up(t, position_ids, length) for t in (self.cos, self.sin)]
            rotary = [t.to(x.dtype) for t in rotary]
            if position_ids is not None:
                rotary = [t.unsqueeze(1) for t in rotary]  # over the heads
        allowed = None
        if self.attention == "mask":
            allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            if attention_mask is not None:
                allowed = allowed & attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, rotary, allowed)
        x = self.norm(x)
        if logits_to_keep:
            x = x[:, -logits_to_keep:, :]
        return F.linear(x, self.embed.weight)


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, enable_gqa: bool):
        super().__init__()
        self.heads, self.kv_heads, self.enable_gqa = heads, kv_heads, enable_gqa
        d = hidden // heads
        self.norm1, self.norm2 = _Norm(hidden), _Norm(hidden)
        self.q = nn.Linear(hidden, heads * d, bias=False)
        self.k = nn.Linear(hidden, kv_heads * d, bias=False)
        self.v = nn.Linear(hidden, kv_heads * d, bias=False)
        self.o = nn.Linear(heads * d, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 96), nn.Linear(96, hidden)
        for w in (self.q.weight, self.k.weight):  # sharp attention, so that a wrong mask shows
            nn.init.normal_(w, std=0.3)

    def forward(self, x: Tensor, rotary: list[Tensor] | None, allowed: Tensor | None) -> Tensor:
        b, length, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, length, self.heads, -1).transpose(1, 2)
        k = self.k(h).view(b, length, self.kv_heads, -1).transpose(1, 2)
        v = self.v(h).view(b, length, self.kv_heads, -1).transpose(1, 2)
        if rotary is not None:
            q, k = _rotate(q, *rotary), _rotate(k, *rotary)
        gqa = {}
        if self.kv_heads != self.heads:
            if self.enable_gqa:
                gqa = {"enable_gqa": True}
            else:
                k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
                v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, **gqa
        )
        x = x + self.o(y.transpose(1, 2).reshape(b, length, -1))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class _Norm(nn.Module):
    """RMSNorm without a detour through float32."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
