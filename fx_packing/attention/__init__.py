"""Attention of the flat graph: one interface, three kernels.

Each kernel is a module with

``attend(q, k, v, *inputs, scale, window, softcap)``
    ``[1, H, T_pad, Dv]`` from q ``[1, H, T_pad, D]``, k ``[1, KV, T_pad, D]`` and v
    ``[1, KV, T_pad, Dv]``, with K and V not repeated to the H query heads. A plain function,
    made to be the target of an FX node; ``scale``, ``window`` (a number of tokens or None) and
    ``softcap`` are constants. What it yields at pads is finite and means nothing.
``inputs(plan, window)``
    the tensors that say how one batch is stored: the node's further arguments, and placeholders
    of the flat graph. Their varying sizes are marked dynamic. Nodes with equal windows share them.
``why_not(*, device, dtype, head_dim, v_head_dim, window, softcap, layout, training)``
    None if the kernel supports this attention, else the reason in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from . import flex, segments, varlen

KERNELS: dict[str, ModuleType] = {"segments": segments, "varlen": varlen, "flex": flex}


def choose(requested: str, **facts: Any) -> tuple[str, str]:
    """The name of the kernel to use, and why, for the option value ``requested``.

    ``facts`` are the arguments of ``why_not``. "auto", and a requested kernel that does not
    support this attention, take the first that does: on CUDA varlen (chains in half precision),
    then flex, then segments; elsewhere segments, which supports everything.

    Raises ValueError for an unknown name.
    """
    if requested != "auto" and requested not in KERNELS:
        names = ", ".join(("auto", *KERNELS))
        raise ValueError(f"unknown attention {requested!r}: expected one of {names}")
    on_cuda = torch.device(facts["device"]).type == "cuda"
    automatic = ("varlen", "flex", "segments") if on_cuda else ("segments",)
    order = automatic if requested == "auto" else (requested, *automatic)
    refused: list[str] = []
    for name in order:
        reason = KERNELS[name].why_not(**facts)
        if reason is None:
            why = "requested" if name == requested else f"first choice on {facts['device']}"
            return name, "; ".join(refused) or why
        refused.append(f"not {name}: {reason}")
    raise AssertionError("segments supports every attention")


_MOST_ELEMENTS = 2**30  # kernels index with int32, and backwards pad their buffers
_MOST_BLOCKS = 4096  # a BlockMask has a few int32 tables of blocks x blocks


def most_tokens(kernel: str, attention: Sequence[Any]) -> int | None:
    """How many tokens one call of a kernel can index, for `attention` nodes with ``heads``,
    ``head_dim`` and ``v_head_dim``; None if any number."""
    if kernel == "segments":
        return None
    widest = max(a.heads * max(a.head_dim, a.v_head_dim) for a in attention)
    most = _MOST_ELEMENTS // widest
    return min(most, _MOST_BLOCKS * flex.BLOCK) if kernel == "flex" else most
