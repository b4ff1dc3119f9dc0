"""Exact attention over a forest on any device and dtype, forward and backward.

One softmax attention per unbranched run of the forest, over its path (the runs above it and
itself)::

    a -- b -- c            run 0: a b     attends  a b
         `--- d            run 1: c       attends  a b c
                           run 2: d       attends  a b d

Along a path the depths are 0, 1, 2, ..., so causality and a sliding window are comparisons of
offsets. The structure of the forest is data (``Plan.segments``), never code: a compiled graph
serves every forest. Made for exactness and for CPUs; its cost grows with the number of runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forest import Plan

# Scores kept at once by the paths that spell the softmax out, in elements.
_SCORES = 2**24

NAMES = ("structure",)  # of the tensors that `inputs` returns


def why_not(**facts: object) -> str | None:
    """None: every mask, dtype and device is supported."""
    return None


def inputs(plan: Plan, window: int | None) -> tuple[Tensor, ...]:
    """``(structure,)``: ``[2 + 3 * N]`` int64 on the CPU, whose size varies from plan to plan."""
    structure = plan.segments()
    torch._dynamo.maybe_mark_dynamic(structure, 0)
    return (structure,)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    structure: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``[1, H, T, Dv]`` in the dtype of ``v``, from q ``[1, H, T, D]``, k ``[1, KV, T, D]`` and
    v ``[1, KV, T, Dv]``, KV a divisor of H. Tokens outside the forest (pads) yield zeros.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    return _forward(q, k, v, structure, float(scale), window, softcap)


@torch.library.custom_op("fx_packing::segments", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    structure: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    with _plain(q):
        for start, stop, path in _runs(structure):
            own, keys, values = q[:, :, start:stop], _take(k, path), _take(v, path)
            if softcap is None:
                size, length = stop - start, keys.shape[2]
                whole = size == length and (window is None or window >= length)
                out[:, :, start:stop] = F.scaled_dot_product_attention(
                    own,
                    keys,
                    values,
                    attn_mask=None if whole else _mask(0, size, size, length, window, q.device),
                    is_causal=whole,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            else:
                for low, high, part in _parts(own, keys):
                    mask = _mask(low, high, stop - start, keys.shape[2], window, q.device)
                    weights, _ = _softmax(part, keys, mask, scale, softcap)
                    result = weights @ values[0].to(weights.dtype)
                    out[0, :, start + low : start + high] = result.reshape(-1, high - low, v.shape[-1])
    return out


@_forward.register_fake
def _(q, k, v, structure, scale, window, softcap):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("fx_packing::segments_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    structure: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Probabilities are recomputed. Sums over the runs that share a token are kept in at least
    # float32 and rounded once.
    dtype = torch.promote_types(q.dtype, torch.float32)
    grads = tuple(t.new_zeros(t.shape, dtype=dtype) for t in (q, k, v))
    grad_q, grad_k, grad_v = grads
    with _plain(q):
        for start, stop, path in _runs(structure):
            keys, values = _take(k, path).to(dtype), _take(v, path).to(dtype)
            grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
            for low, high, part in _parts(q[:, :, start:stop], keys):
                mask = _mask(low, high, stop - start, keys.shape[2], window, q.device)
                weights, slope = _softmax(part, keys, mask, scale, softcap)
                rows = grad[:, :, start + low : start + high].to(dtype).reshape(*part.shape[:-1], -1)
                grad_values[0] += weights.transpose(1, 2) @ rows
                change = rows @ values[0].transpose(1, 2)
                change = weights * (change - (change * weights).sum(-1, keepdim=True)) * slope
                grad_keys[0] += change.transpose(1, 2) @ part.to(dtype)
                change = (change @ keys[0]).reshape(-1, high - low, q.shape[-1])
                grad_q[0, :, start + low : start + high] = change
            _give(grad_k, path, grad_keys)
            _give(grad_v, path, grad_values)
    return tuple(g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=True))


@_backward.register_fake
def _(grad, q, k, v, structure, scale, window, softcap):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _derivative(ctx, grad):
    grads = _backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window, ctx.softcap)
    return (*grads, None, None, None, None)


_forward.register_autograd(_derivative, setup_context=_setup)


def _plain(q: Tensor) -> torch.autocast:
    """A region whose products keep the dtype of their operands."""
    return torch.autocast(q.device.type, enabled=False)


def _runs(structure: Tensor) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """``(start, stop, path)`` of each run; the path is the ``(start, stop)`` pieces it attends."""
    flat, runs = structure.tolist(), []
    for at in range(2, 2 + 3 * flat[0], 3):
        start, stop, parent = flat[at : at + 3]
        path = list(runs[parent][2]) if parent >= 0 else []
        if path and path[-1][1] == start:  # a first child lies right behind its parent
            path[-1] = (path[-1][0], stop)
        else:
            path.append((start, stop))
        runs.append((start, stop, path))
    return runs


def _take(x: Tensor, path: list[tuple[int, int]]) -> Tensor:
    pieces = [x[:, :, start:stop] for start, stop in path]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _give(x: Tensor, path: list[tuple[int, int]], parts: Tensor) -> None:
    sizes = [stop - start for start, stop in path]
    for (start, stop), part in zip(path, parts.split(sizes, dim=2), strict=True):
        x[:, :, start:stop] += part


def _mask(low: int, high: int, size: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """``[high - low, length]`` bool: what queries ``low..high`` of a run of ``size`` tokens, the
    last ones of a path of ``length``, may see.
    """
    query = torch.arange(length - size + low, length - size + high, device=device)[:, None]
    offset = query - torch.arange(length, device=device)
    return offset >= 0 if window is None else (offset >= 0) & (offset < window)


def _parts(q: Tensor, keys: Tensor):
    """Pieces of the queries small enough for their scores: ``low, high, [KV, G * (high-low), D]``.

    The G query heads of a key head are folded into its rows, so keys are never repeated.
    """
    heads, size, groups = q.shape[1], q.shape[2], keys.shape[1]
    step = max(1, _SCORES // max(1, heads * keys.shape[2]))
    for low in range(0, size, step):
        high = min(low + step, size)
        yield low, high, q[0, :, low:high].reshape(groups, -1, q.shape[-1])


def _softmax(
    q: Tensor, keys: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | float]:
    """Probabilities ``[KV, G * n, P]`` of ``_parts``, in at least float32, and the derivative of
    the capped scores by the plain products.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) @ keys[0].to(dtype).transpose(1, 2)) * scale
    slope: Tensor | float = scale
    if softcap is not None:
        squashed = (scores / softcap).tanh()
        scores, slope = squashed * softcap, (1 - squashed * squashed) * scale
    scores = scores.unflatten(1, (-1, len(mask))).masked_fill(~mask, -torch.inf).flatten(1, 2)
    return scores.softmax(-1), slope
