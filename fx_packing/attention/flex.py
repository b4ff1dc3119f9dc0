"""FlexAttention over a forest: every mask of every layout, lowered by Inductor.

The block mask comes in as tensors, so one compiled graph serves every forest. `passes/flex.py` writes
this attention as nodes of the flat graph; `attend` is the same on tensors. Eager FlexAttention would
build ``[T, T]``: compile it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..forest import Plan
from ..masks import BLOCK, BlockTensors, block_tensors, mask_mod

_HALF = (torch.float16, torch.bfloat16)

PER_TOKEN = ("end", "depth")  # what a mask reads
NAMES = (*PER_TOKEN, *BlockTensors._fields)  # of the tensors that `inputs` returns


def why_not(
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    **facts: object,
) -> str | None:
    """None if this attention is supported, else the reason."""
    kind = torch.device(device).type
    if kind != "cuda":
        # On CPUs torch has no backward, and its C++ template takes some names of sizes for its own.
        return f"FlexAttention is not used on {kind} devices"
    if dtype not in (*_HALF, torch.float32):
        return f"FlexAttention does not support {dtype}"
    if min(head_dim, v_head_dim) < 16:
        return f"FlexAttention needs head sizes of at least 16, got {min(head_dim, v_head_dim)}"
    if max(head_dim, v_head_dim) > 256:
        return f"head size {max(head_dim, v_head_dim)} exceeds the GPU's shared memory"
    return None


def inputs(plan: Plan, window: int | None) -> tuple[Tensor, ...]:
    """``end`` and ``depth`` as int32 ``[T_pad / 128, 128]``, then the eight block tensors.

    The sizes that vary from plan to plan are marked dynamic. Built once per plan and window.
    """
    per_token = plan.remember("flex", lambda: _per_token(plan))
    return per_token + plan.remember(("flex", window), lambda: _blocks(plan, window))


def _per_token(plan: Plan) -> tuple[Tensor, ...]:
    # int32 is what the kernel's own indices are, and half the memory traffic.
    tensors = tuple(x.view(-1, BLOCK).int() for x in (plan.end, plan.depth))
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


def _blocks(plan: Plan, window: int | None) -> tuple[Tensor, ...]:
    tensors = tuple(block_tensors(plan.end, plan.depth, window))
    for tensor in tensors:
        for dim in range(2, tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensors


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    end: Tensor,
    depth: Tensor,
    *blocks: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``[1, H, T_pad, Dv]`` in the dtype of ``v``, from q ``[1, H, T_pad, D]``, k
    ``[1, KV, T_pad, D]`` and v ``[1, KV, T_pad, Dv]``, KV a divisor of H, T_pad whole blocks.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    end, depth = end.view(q.shape[2]), depth.view(q.shape[2])
    mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        **BlockTensors(*blocks)._asdict(),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod(end, depth, window),
    )

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cap(score, softcap)

    return flex_attention(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=tiles(q.device, q.dtype, q.shape[-1], v.shape[-1]),
    )


def cap(score: Tensor, softcap: float) -> Tensor:
    """The soft cap of a score."""
    return softcap * torch.tanh(score / softcap)


def tiles(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> dict[str, int] | None:
    """Smaller tiles where torch's choice, made by q's head size alone, can exceed shared memory."""
    width = max(head_dim, v_head_dim)
    if device.type == "cpu" or width <= (128 if dtype in _HALF else 64):
        return None
    if dtype not in _HALF:
        return {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 4}
    return {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 32,
        "fwd_num_stages": 2,
        "fwd_num_warps": 4,
        "bwd_BLOCK_M1": 32,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 32,
        "bwd_num_stages": 1,
        "bwd_num_warps": 4,
    }
