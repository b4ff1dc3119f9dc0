"""Evaluate a half-precision graph in float32: what its rounding is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


class Widened:
    """Casts the operands of each operation, and the dtypes that it asks for, to float32.

    Casts of the model's weights are not kept for the backward, which casts them again: in all, one
    weight at a time is held twice.
    """

    def __init__(self) -> None:
        self._casts: dict[int, Tensor] = {}  # address of a cast -> what it was made of

    def __call__(self, value: Any) -> Any:
        """An operand, or an argument, as float32."""
        if isinstance(value, torch.dtype):
            return torch.float32 if value in HALF else value
        if not isinstance(value, Tensor) or value.dtype not in HALF:
            return value
        cast = value.float()
        self._casts[cast.data_ptr()] = value
        return cast

    def method(self, name: str) -> str:
        """The name of a method that does not narrow."""
        return "float" if name in ("half", "bfloat16") else name

    def done(self) -> None:
        """An operation is over: the addresses of its casts may be used again."""
        self._casts.clear()

    @contextmanager
    def active(self, device: str) -> Iterator[None]:
        """Autocast off, and weights saved for the backward as they are."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with torch.autocast(device, enabled=False), hooks:
            yield

    def _pack(self, saved: Tensor) -> Any:
        source = self._casts.get(saved.data_ptr()) if saved.dtype == torch.float32 else None
        if source is None:
            return saved
        return source.detach(), saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        source, *layout = packed
        return source.float().as_strided(*layout)
