"""torch's FlashAttention over chains, on CUDA in half precision, forward and backward.

The pads form one more chain, so every token is computed by the kernel and is finite. Lengths are
data (a CPU tensor read inside the operator): a longer row compiles nothing.
"""

import torch
from torch import Tensor

from ..compat_kernels import flash_backward, flash_forward
from ..forest import Plan

NAMES = ("bounds", "longest")  # of the tensors that `inputs` returns


def why_not(
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    softcap: float | None,
    layout: str,
    **facts: object,
) -> str | None:
    """None if this attention is supported, else the reason."""
    device = torch.device(device)
    if layout != "varlen":
        return "FlashAttention's varlen kernel needs chains; shared prefixes branch"
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return "FlashAttention needs a CUDA device and a torch built with it"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashAttention needs compute capability 8.0 or later"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention needs half precision, got {dtype}"
    if softcap is not None:
        return "FlashAttention's varlen kernel has no softcap"
    if head_dim != v_head_dim:
        return f"FlashAttention needs equal head sizes, got {head_dim} and {v_head_dim}"
    if head_dim % 8 or head_dim > 256:
        return f"FlashAttention needs a head size that 8 divides, at most 256, got {head_dim}"
    return None


def inputs(plan: Plan, window: int | None) -> tuple[Tensor, ...]:
    """``(bounds, longest)``: ``Plan.cu_seqlens``, whose size varies with the rows, and an int64
    scalar on the CPU. Raises ValueError for a plan that is no chains.
    """

    def build() -> tuple[Tensor, ...]:
        # At least 2: a longest length of 1 selects a decoding path that empty rows break.
        longest = max(plan.longest, plan.length - plan.run_tokens, 2)
        torch._dynamo.maybe_mark_dynamic(plan.cu_seqlens, 0)
        return plan.cu_seqlens, torch.tensor(longest)

    return plan.remember("varlen", build)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``[1, H, T_pad, D]`` in the dtype of ``v``, from q ``[1, H, T_pad, D]``, k and v
    ``[1, KV, T_pad, D]``, KV a divisor of H. Raises ValueError for a softcap.
    """
    if softcap is not None:
        raise ValueError("the varlen kernel has no softcap")
    q, k, v = (x.to(v.dtype)[0].transpose(0, 1) for x in (q, k, v))
    out, _ = _forward(q, k, v, bounds, longest, float(scale), window)
    return out.transpose(0, 1)[None]


@torch.library.custom_op("fx_packing::varlen", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    out, lse = flash_forward(q, k, v, bounds, int(longest), scale, window)
    return out.contiguous(), lse


@_forward.register_fake
def _(q, k, v, bounds, longest, scale, window):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("fx_packing::varlen_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = flash_backward(grad, q, k, v, out, lse, bounds, int(longest), scale, window)
    return tuple(g.contiguous() for g in grads)


@_backward.register_fake
def _(grad, q, k, v, out, lse, bounds, longest, scale, window):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, bounds, longest, ctx.scale, ctx.window = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, bounds, longest)


def _derivative(ctx, grad, _):
    grads = _backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*grads, None, None, None, None)


_forward.register_autograd(_derivative, setup_context=_setup)
