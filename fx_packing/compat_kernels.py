"""torch's own flash attention over chains: the private operators behind ``varlen_attn``.

``torch.nn.attention.varlen.varlen_attn`` takes the longest length as a Python int, which a
compiled graph would specialise on, and only from 2.13 on admits fewer key heads than query
heads, which the operators below always did. Their arguments are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention within each chain: out ``[T, H, D]``, log-sum-exp ``[H, T]`` float32.

    q ``[T, H, D]``, k and v ``[T, KV, D]`` half precision, ``bounds`` ``[N + 1]`` int32.
    Raises RuntimeError when the backward's 32-bit offsets could not address so many tokens.
    """
    tokens, heads, head_dim = q.shape
    width = -(-head_dim // 32) * 32
    if (tokens + 128 * len(bounds)) * heads * width >= 2**31:
        raise RuntimeError(
            f"{tokens} tokens of {heads} x {head_dim} exceed the 32-bit offsets of "
            "FlashAttention's backward: use fewer tokens at once (option max_tokens), or "
            "attention='flex'"
        )
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _dense(q),
        _dense(k),
        _dense(v),
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scale,
        **_window(window),
    )
    return out, lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for the gradient ``[T, H, D]`` of ``flash_forward``'s output."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the dropout's, which is unused
    return torch.ops.aten._flash_attention_backward(
        _dense(grad),
        _dense(q),
        _dense(k),
        _dense(v),
        out,
        lse,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        window is None,
        state,
        torch.empty(0, device=q.device),
        scale=scale,
        **_window(window),
    )


def _window(window: int | None) -> dict[str, int]:
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _dense(x: Tensor) -> Tensor:
    """The kernels take any strides but the last dimension's."""
    return x if x.stride(-1) == 1 else x.contiguous()
