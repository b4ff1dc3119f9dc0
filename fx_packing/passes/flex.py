"""Write one attention of the flat graph as FlexAttention nodes.

    plan                               nodes
    end, depth [T]                     mask_mod = partial(self.mask_mod, end=end)
    kv_num_blocks, kv_indices, ...     block_mask = (T, T, kv_num_blocks, ..., 128, 128, mask_mod)
    q, k, v                            flex_attention(q, k, v, self.score_mod, block_mask, scale, ...)[0]

    self.mask_mod(b, h, q, kv, end)            (kv <= q) & (q < end[kv])
        and, with a window,                    & (depth[q] - depth[kv] < window)
    self.score_mod(score, b, h, q, kv)         score, or softcap * tanh(score / softcap)

K and V are not repeated to the query heads. All layers of a graph share its bodies. `end` is bound by a
`partial` and not passed along: Dynamo, which traces the flat graph once more, takes this operator only
without buffers, and collects them itself from what the bodies close over.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy

from .. import compat
from ..attention import flex
from ..masks import BLOCK, BlockTensors, mask_mod

if TYPE_CHECKING:
    from .flatten import Scope

_INDICES = ("b", "h", "q", "kv")


def flex_attention(
    scope: Scope,
    q: Node,
    k: Node,
    v: Node,
    plan: Callable[[str], Node],
    length: Node,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    options: dict[str, Any],
) -> Node:
    """The node of ``[1, H, T, Dv]``, from q ``[1, H, T, D]``, k ``[1, KV, T, D]``, v ``[1, KV, T, Dv]``.

    `plan` gives the node of one of the tensors of `attention.flex.inputs` by its name, per-token ones
    as ``[T]``; `length` is T; `options` are the operator's own.
    """
    blocks = {name: plan(name) for name in BlockTensors._fields}
    block_mask = compat.flex_block_mask(length, blocks, BLOCK, _mask(scope, plan, window))
    arguments = (q, k, v, _score(scope, softcap), block_mask, scale, options)
    call = scope.graph.call_function(compat.FLEX_ATTENTION, arguments)
    return scope.graph.call_function(operator.getitem, (call, 0))


def options(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> dict[str, Any]:
    """The operator's options for q, k and v like these."""
    return compat.flex_options(device, flex.tiles(device, dtype, head_dim, v_head_dim))


def _mask(scope: Scope, plan: Callable[[str], Node], window: int | None) -> Node:
    """The mask of this batch, written once a graph and window."""

    def keep(b: Proxy, h: Proxy, q: Proxy, kv: Proxy, *per_token: Proxy) -> Proxy:
        return mask_mod(*per_token, window=window)(b, h, q, kv)

    key = ("mask", window)
    if key not in scope.values:
        read = flex.PER_TOKEN if window is not None else ("end",)
        suffix = "" if window is None else f"_window_{window}"
        body = _body(scope, f"mask_mod{suffix}", (*_INDICES, *read), keep)
        scope.values[key] = scope.graph.create_node(
            "call_function", functools.partial, (body,), {n: plan(n) for n in read}, name=f"mask{suffix}"
        )
    return scope.values[key]


def _score(scope: Scope, softcap: float | None) -> Node:
    """What is done to each score, written once a graph and soft cap."""

    def score(score: Proxy, *_: Proxy) -> Proxy:
        return score if softcap is None else flex.cap(score, softcap)

    key = ("score", softcap)
    if key not in scope.values:
        suffix = "" if softcap is None else re.sub(r"\W", "_", f"_softcap_{softcap}")
        scope.values[key] = _body(scope, f"score_mod{suffix}", ("score", *_INDICES), score)
    return scope.values[key]


def _body(scope: Scope, name: str, arguments: Sequence[str], function: Callable[..., Proxy]) -> Node:
    """The ``get_attr`` node of a sub-graph of what `function` does to its arguments."""
    graph = Graph()
    result = function(*(Proxy(graph.placeholder(argument)) for argument in arguments))
    graph.output(result.node)
    scope.modules.add_module(name, GraphModule(torch.nn.Module(), graph))
    return scope.graph.get_attr(name)
