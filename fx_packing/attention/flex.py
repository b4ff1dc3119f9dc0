"""FlexAttention over a forest: every mask of every layout, lowered by Inductor.

The block mask comes in as tensors and is only wrapped inside the traced function, so one
compiled graph serves every forest. Eager FlexAttention would build ``[T, T]``: compile it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..forest import Plan
from ..masks import BLOCK, BlockTensors, block_tensors, mask_mod

_HALF = (torch.float16, torch.bfloat16)

INPUTS = 9  # how many tensors `inputs` returns


def why_not(
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    training: bool,
    **facts: object,
) -> str | None:
    """None if this attention is supported, else the reason."""
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        return f"FlexAttention is not used on {kind} devices"
    if dtype not in (*_HALF, torch.float32):
        return f"FlexAttention does not support {dtype}"
    if kind == "cpu" and training:
        return "FlexAttention has no backward on CPUs"
    if kind == "cuda" and min(head_dim, v_head_dim) < 16:
        return f"FlexAttention needs head sizes of at least 16, got {min(head_dim, v_head_dim)}"
    if kind == "cuda" and max(head_dim, v_head_dim) > 256:
        return f"head size {max(head_dim, v_head_dim)} exceeds the GPU's shared memory"
    return None


def inputs(plan: Plan, window: int | None) -> tuple[Tensor, ...]:
    """``end`` and ``depth`` as one int32 ``[2, T_pad]``, then the eight block tensors.

    The sizes that vary from plan to plan are marked dynamic. Built once per plan and window.
    """
    return plan.remember(("flex", window), lambda: _inputs(plan, window))


def _inputs(plan: Plan, window: int | None) -> tuple[Tensor, ...]:
    # int32 is what the kernel's own indices are, and half the memory traffic.
    per_token = torch.stack((plan.end, plan.depth)).int()
    tensors = (per_token, *block_tensors(plan.end, plan.depth, window))
    torch._dynamo.maybe_mark_dynamic(per_token, 1)
    for tensor in tensors[1:]:
        for dim in range(2, tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensors


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    per_token: Tensor,
    *blocks: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``[1, H, T_pad, Dv]`` in the dtype of ``v``, from q ``[1, H, T_pad, D]``, k
    ``[1, KV, T_pad, D]`` and v ``[1, KV, T_pad, Dv]``, KV a divisor of H, T_pad whole blocks.
    """
    # Views that spell the length as 128 * n let the compiler see that it is whole blocks, which
    # spares the kernel its bounds checks.
    q, k, v = (_in_blocks(x.to(v.dtype)) for x in (q, k, v))
    length = q.shape[2]
    # The same length under one symbol: fewer of them to guard and to pass to the kernels.
    torch._check(per_token.shape[1] == length)
    mask = BlockMask(
        seq_lengths=(length, length),
        **BlockTensors(*blocks)._asdict(),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod(*per_token, window),
    )

    def cap(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return flex_attention(
        q,
        k,
        v,
        score_mod=None if softcap is None else cap,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=_kernel_options(q, v),
    )


def _in_blocks(x: Tensor) -> Tensor:
    return x.unflatten(2, (x.shape[2] // BLOCK, BLOCK)).flatten(2, 3)


def _kernel_options(q: Tensor, v: Tensor) -> dict[str, int] | None:
    """Smaller tiles where torch's choice, made by q's head size alone, can exceed shared memory."""
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cpu" or width <= (128 if q.dtype in _HALF else 64):
        return None
    if q.dtype not in _HALF:
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
