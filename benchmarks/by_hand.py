"""The yardstick: what one would write by hand for this model and these batches, to compare with.

It knows what the backend has to find out: where the prompts end, and which rows share one. Each prompt
is stored once, its completions behind it; attention is one FlexAttention call a layer under a mask
for exactly this tree; everything that depends on the batch alone is made before the time is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from transformers import AttentionInterface

BLOCK = 128


@dataclass
class Tree:
    """One batch as stored: ``T`` tokens, filled up to whole blocks."""

    ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    mask: BlockMask
    read: Tensor  # [N] the token whose hidden state predicts each completion token, row by row
    targets: Tensor  # [N]
    tokens: int


def build_tree(ids: Tensor, mask: Tensor, keep: int, group: int) -> Tree:
    """Store rows ``[B, L]`` whose first ``L - keep`` columns are prompts, `group` rows to each."""
    device, stored, positions, prompt_of, row_of, read, targets = ids.device, [], [], [], [], [], []
    total = 0
    for b in range(len(ids)):
        prompt = ids[b, :-keep][mask[b, :-keep].bool()]
        completion = ids[b, -keep:][mask[b, -keep:].bool()]
        if b % group == 0:
            last = total + len(prompt) - 1
            stored.append(prompt)
            positions.append(torch.arange(len(prompt), device=device))
            prompt_of.append(torch.full((len(prompt),), b // group, device=device))
            row_of.append(torch.full((len(prompt),), -1, device=device))
            total += len(prompt)
        own = torch.arange(total, total + len(completion), device=device)
        stored.append(completion)
        positions.append(torch.arange(len(prompt), len(prompt) + len(completion), device=device))
        prompt_of.append(torch.full((len(completion),), b // group, device=device))
        row_of.append(torch.full((len(completion),), b, device=device))
        read.append(torch.cat([own.new_tensor([last]), own[:-1]]))
        targets.append(completion)
        total += len(completion)
    pad = -total % BLOCK
    fill = lambda parts, value: torch.cat([*parts, parts[0].new_full((pad,), value)])  # noqa: E731
    prompt, row = fill(prompt_of, -1), fill(row_of, -2)

    def visible(b, h, q, k):
        return (k <= q) & (prompt[q] == prompt[k]) & ((row[k] == -1) | (row[k] == row[q]))

    size = total + pad
    return Tree(
        fill(stored, 0)[None], fill(positions, 0)[None],
        create_block_mask(visible, None, None, size, size, device=device),
        torch.cat(read), torch.cat(targets), total,
    )  # fmt: skip


def attend(module, query, key, value, attention_mask, scaling=None, **unused):
    """An attention function of transformers: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    if query.device.type == "cpu":  # to try the script: FlexAttention has no backward there
        sees = create_mask(attention_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], device="cpu")
        out = F.scaled_dot_product_attention(query, key, value, sees, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    out = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("by_hand", attend)
