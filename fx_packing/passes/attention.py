"""Find every attention of the graph, and what it means.

An attention is a `scaled_dot_product_attention` node, or the region between two matrix products that
forms a token-by-token matrix (eager attention). Code differs endlessly, so the meaning is measured:
the mask and the region between the products are run on small probes, and what comes out is named.

    sdpa:    q, repeat(k), repeat(v), mask  ->  Attention(q, k, v, scale, window)
    eager:   q @ k^T -> * scale -> tanh -> + mask -> softmax -> @ v  ->  the same record
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..capture import Capture, Input
from ..errors import Refused, where
from .evaluate import ancestors, evaluate, probe_inputs
from .roles import Roles, Size

SDPA = torch.nn.functional.scaled_dot_product_attention
_PRODUCTS = {torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm"}
_PROBE_LENGTH = 24
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.lt, operator.le,
    operator.gt, operator.ge, operator.eq, operator.ne, operator.truediv, operator.iadd, operator.isub,
    torch.add, torch.sub, torch.mul, torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne, "add",
    "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne",
}  # fmt: skip


@dataclass
class Attention:
    """One attention: ``softmax(softcap(q k^T scale) + mask) v`` with q [B, H, L, D], k, v [B, KV, L, D].

    `node` computes its output [B, H, L, Dv]; `key_transposed` says that `key` is [B, KV, D, L].
    `window` w keeps ``q - k < w``; `mask` is the [B, L] input that says which tokens are real.
    """

    node: Node
    kind: str
    query: Node
    key: Node
    value: Node
    scale: float
    window: int | None
    softcap: float | None
    mask: Input | None
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    key_transposed: bool = False


def find_attention(capture: Capture, roles: Roles) -> list[Attention]:
    """Every attention in the graph, in order. Raises `Refused` where one is not understood."""
    found = []
    with compat.real_tensors():
        for node in capture.nodes:
            if node.target is SDPA:
                found.append(_sdpa(capture, roles, node))
            elif node.target in _PRODUCTS and _is_exit(capture, roles, node):
                found.append(_eager(capture, roles, node))
    masks = {a.mask.index for a in found if a.mask is not None}
    if len(masks) > 1:
        names = ", ".join(sorted(a.mask.source for a in found if a.mask is not None))
        raise Refused(f"attention reads more than one padding mask: {names}")
    if masks and any(a.mask is None for a in found):
        bare = next(a.node for a in found if a.mask is None)
        raise Refused(f"one attention ignores the padding mask that others use, {where(bare)}")
    return found


def _sdpa(capture: Capture, roles: Roles, node: Node) -> Attention:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = (capture.resolve(given[n]) for n in names[:3])
    if _number(roles, given.get("dropout_p", 0.0)):
        raise Refused(_DROPOUT.format(where(node)))
    mask, causal = capture.resolve(given.get("attn_mask")), given.get("is_causal", False)
    scale = given.get("scale")
    scale = roles.values[query].shape[-1] ** -0.5 if scale is None else float(_number(roles, scale))
    if mask is None and not causal:
        raise Refused(_BIDIRECTIONAL.format(where(node)))
    window, padding = None, None
    if mask is not None:
        if causal:
            raise Refused(f"attention with both a mask and is_causal=True, {where(node)}")

        def keep(mask_value: torch.Tensor, length: int, literal: Any) -> torch.Tensor:
            (value,) = _probe(capture, roles, [mask], {}, mask_value, padding, length, literal)
            return _kept(value, node)

        padding = _padding_input(capture, roles, [mask], node)
        window = _meaning(capture, roles, [mask], keep, padding, node)
    return _record(
        capture, roles, node, "sdpa", query, key, value, scale, window, None, padding
    )


def _is_exit(capture: Capture, roles: Roles, node: Node) -> bool:
    """Whether a product takes a token-by-token matrix and returns one row a token."""
    left, right = (capture.resolve(a) for a in node.args[:2])
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return False
    shapes = [roles.values.get(left), roles.values.get(right)]
    if not all(isinstance(s, torch.Tensor) and s.dim() == 4 for s in shapes):
        return False
    return _is_square(roles, left) and not _is_square(roles, right)


def _is_square(roles: Roles, node: Node) -> bool:
    value = roles.values.get(node)
    line = Size(1, ("L",))
    return (
        isinstance(value, torch.Tensor)
        and value.dim() >= 2
        and roles.shape(node)[-1] == roles.shape(node)[-2] == line
    )


def _eager(capture: Capture, roles: Roles, node: Node) -> Attention:
    weights, value = (capture.resolve(a) for a in node.args[:2])
    region = [n for n in ancestors(capture, [weights]) if _is_square(roles, n)]
    scores = [
        n
        for n in region
        if n.target in _PRODUCTS and not any(_is_square(roles, o) for o in capture.operands(n))
    ]
    if len(scores) != 1:
        raise Refused(
            f"a token-by-token matrix with {len(scores)} products behind it is not understood as "
            f"attention, {where(node)}"
        )
    (score,) = scores
    query, key = (capture.resolve(a) for a in score.args[:2])
    for inner in ancestors(capture, [weights], [score]):
        if inner.target is torch.nn.functional.dropout and _active_dropout(roles, inner):
            raise Refused(_DROPOUT.format(where(inner)))
    padding = _padding_input(capture, roles, [weights], node, stop=[score])
    heads = roles.values[query].shape[1]
    dtype = torch.float32

    def attend(scores: torch.Tensor, mask: torch.Tensor, literal: Any = None) -> torch.Tensor:
        feeds = {score: scores.to(dtype)}
        length = scores.shape[-1]
        (value,) = _probe(capture, roles, [weights], feeds, mask, padding, length, literal)
        return value.double()

    def keep(mask: torch.Tensor, length: int, literal: Any) -> torch.Tensor:
        rows = mask.shape[0]
        zeros = torch.zeros(rows, heads, length, length, device=mask.device)
        weights_at_zero = attend(zeros, mask, literal)
        kept = weights_at_zero > 0
        total = weights_at_zero.sum(-1)
        if not torch.allclose(total, torch.ones_like(total), atol=1e-2):
            raise Refused(
                f"attention weights do not sum to 1 (attention sinks?), which is not supported, "
                f"{where(node)}"
            )
        even = kept / kept.sum(-1, keepdim=True)
        if not torch.allclose(weights_at_zero, even.double(), rtol=2e-2, atol=1e-4):
            raise Refused(_BIAS.format(where(node)))
        return kept

    window = _meaning(capture, roles, [weights], keep, padding, node, stop=[score])
    scale, softcap = _score_function(capture, roles, attend, score, weights, heads, node)
    transposed = True
    if key.op == "call_method" and key.target == "transpose":
        dims = {d % 4 for d in key.args[1:3]}
        if dims == {2, 3}:
            key, transposed = capture.resolve(key.args[0]), False
    return _record(
        capture, roles, node, "eager", query, key, value, scale, window, softcap, padding, transposed
    )


def _score_function(
    capture: Capture,
    roles: Roles,
    attend: Callable[..., torch.Tensor],
    score: Node,
    weights: Node,
    heads: int,
    node: Node,
) -> tuple[float, float | None]:
    """(scale, softcap) of the region between scores and weights, found among its own constants."""
    numbers = {1.0}
    for inner in ancestors(capture, [weights], [score]):
        for arg in _numbers((inner.args, inner.kwargs)):
            numbers.add(abs(float(arg)))
        if inner in roles.pinned:
            numbers.add(abs(roles.pinned[inner]))
    numbers = {n for n in numbers if 1e-4 < n < 1e4}
    scales = {n for n in numbers} | {1 / n for n in numbers}
    scales |= {a * b for a in numbers for b in numbers} | {a / b for a in numbers for b in numbers}
    rows = 2 if "B" in roles.primes else 1
    mask = torch.ones(rows, _PROBE_LENGTH, dtype=torch.int64, device=_device(capture))
    measured = {}
    for x in (0.5, -0.5, 2.0, 8.0, 32.0, 100.0):
        probe = torch.zeros(rows, heads, _PROBE_LENGTH, _PROBE_LENGTH, device=mask.device)
        probe[..., -2] = x
        last = attend(probe, mask)[..., -1, :]
        ratio = (last[..., -2] / last[..., -1]).log()
        if not torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio)):
            raise Refused(f"attention differs between rows or heads, {where(node)}")
        measured[x] = float(ratio.flatten()[0])

    def error(scale: float, cap: float | None) -> float:
        worst = 0.0
        for x, got in measured.items():
            want = scale * x if cap is None else cap * float(torch.tanh(torch.tensor(scale * x / cap)))
            if abs(want) < 60 or abs(got) < 60:  # beyond, a weight is 0 in float32 and tells nothing
                worst = max(worst, abs(got - want) / max(abs(want), 1e-2))
        return worst

    best = min(
        ((error(s, c), c is not None, s, c) for s in scales for c in (None, *numbers)),
        key=lambda t: t[:2],
    )
    exact = roles.values[weights].dtype in (torch.float32, torch.float64)
    if best[0] > (1e-3 if exact else 3e-2):
        raise Refused(
            "what is done to the attention scores before the softmax is neither a scale nor a soft "
            f"cap, {where(node)}"
        )
    return best[2], best[3]


_DROPOUT = (
    "attention dropout is active: a packed row would sample other weights. Set the model's attention "
    "dropout to 0, or call model.eval(), {}"
)
_BIDIRECTIONAL = "attention is bidirectional (each token sees later ones), {}"
_BIAS = "attention adds a bias to the scores (ALiBi, relative positions), which is not supported, {}"


def _record(
    capture: Capture,
    roles: Roles,
    node: Node,
    kind: str,
    query: Node,
    key: Node,
    value: Node,
    scale: float,
    window: int | None,
    softcap: float | None,
    padding: Input | None,
    transposed: bool = False,
) -> Attention:
    if not transposed:
        key, times = _unrepeat(capture, roles, key)
        bare, value_times = _unrepeat(capture, roles, value)
        if times != value_times:
            raise Refused(f"keys and values are repeated differently, {where(node)}")
        value = bare
    shapes = [roles.shape(n) for n in (query, key, value)]
    row = Size(1, ("B",)) if "B" in roles.primes else Size(1)
    line = Size(1, ("L",))
    order = (0, 1, 3, 2) if transposed else (0, 1, 2, 3)
    if any(len(s) != 4 for s in shapes):
        raise Refused(f"attention over tensors that are not [B, H, L, D], {where(node)}")
    shapes[1] = tuple(shapes[1][i] for i in order)
    plain = all(not s[i].symbols for s in shapes for i in (1, 3))
    if not plain or any(s[0] != row or s[2] != line for s in shapes):
        text = ["[" + ", ".join(map(str, s)) + "]" for s in shapes]
        raise Refused(
            f"attention over {', '.join(text)}, expected [B, H, L, D]: cross attention, a KV cache, or "
            f"attention over another axis, {where(node)}"
        )
    heads, kv_heads = shapes[0][1].coefficient, shapes[1][1].coefficient
    if shapes[2][1].coefficient != kv_heads or heads % kv_heads:
        raise Refused(f"attention with {heads} query and {kv_heads} key heads, {where(node)}")
    return Attention(
        node, kind, query, key, value, scale, window, softcap, padding, heads, kv_heads,
        shapes[0][3].coefficient, shapes[2][3].coefficient, transposed,
    )  # fmt: skip


def _unrepeat(capture: Capture, roles: Roles, node: Node) -> tuple[Node, int]:
    """Keys or values before they were repeated to the query heads, and how many times they were."""
    chain, at = [], node
    for _ in range(3):
        at = capture.resolve(at.args[0]) if at.args and isinstance(at.args[0], Node) else None
        if at is None:
            return node, 1
        chain.append(at)
    expand, insert, base = chain
    if node.target in ("reshape", "view", torch.reshape) and expand.target == "expand":
        full, wide, bare = (roles.shape(n) for n in (node, expand, base))
        inserted = insert.target in (operator.getitem, "unsqueeze")
        if inserted and len(full) == len(bare) == 4 and len(wide) == 5:
            thin = roles.shape(insert)
            if (
                wide[:2] + wide[3:] == bare
                and thin == bare[:2] + (Size(1),) + bare[2:]
                and full == (bare[0], Size(bare[1].coefficient * wide[2].coefficient)) + bare[2:]
            ):
                return base, wide[2].coefficient
    return node, 1


# -- what a mask means ---------------------------------------------------------------------------


def _padding_input(
    capture: Capture, roles: Roles, targets: list[Node], node: Node, stop: list[Node] | None = None
) -> Input | None:
    """The [B, L] input that a mask is made from."""
    found = [
        capture.by_node[n]
        for n in ancestors(capture, targets, stop or [])
        if n in capture.by_node and capture.by_node[n].kind == "user"
    ]
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(i.source for i in found)
        raise Refused(
            f"the attention mask depends on several inputs ({names}): with position_ids alone the model "
            f"guesses packed sequences; pass attention_mask as well, {where(node)}"
        )
    (padding,) = found
    if padding.shape != (capture.rows, capture.columns):
        shape = list(padding.shape)
        raise Refused(
            f"the attention mask is an input of shape {shape} ({padding.source}); only padding masks "
            f"[B, L] can be read, {where(node)}"
        )
    if padding.example.is_floating_point():
        raise Refused(f"the padding mask {padding.source} is a float tensor, {where(node)}")
    return padding


def _probe(
    capture: Capture,
    roles: Roles,
    targets: list[Node],
    feeds: dict[Node, Any],
    mask: torch.Tensor,
    padding: Input | None,
    length: int,
    literal: Any,
) -> list[Any]:
    sizes = {s: length for s in roles.primes} | {"L": length, "B": mask.shape[0]}
    feeds = {**probe_inputs(capture), **feeds}
    if padding is not None:
        feeds[padding.node] = mask.to(padding.example.dtype)
    values = evaluate(capture, roles, targets, sizes, feeds, literal=literal)
    return [values[t] for t in targets]


def _kept(value: torch.Tensor, node: Node) -> torch.Tensor:
    if value.dtype == torch.bool:
        return value
    if not value.is_floating_point():
        raise Refused(f"an attention mask of dtype {value.dtype}, {where(node)}")
    zero, far = value == 0, value <= -1e4
    if not bool((zero | far).all()):
        raise Refused(_BIAS.format(where(node)))
    return zero


def _meaning(
    capture: Capture,
    roles: Roles,
    targets: list[Node],
    keep: Callable[[torch.Tensor, int, Any], torch.Tensor],
    padding: Input | None,
    node: Node,
    stop: list[Node] | None = None,
) -> int | None:
    """The window of a causal mask (None without one). Raises `Refused` for any other mask."""
    behind = [n for n in ancestors(capture, targets, stop or []) if n.op != "placeholder"]
    numbers = sorted({n for inner in behind if inner.target in _ARITHMETIC for n in _ints(roles, inner)})
    hidden = [n for inner in behind if inner.target not in _ARITHMETIC for n in _ints(roles, inner)]
    if max(hidden, default=0) > _PROBE_LENGTH // 2:
        raise Refused(
            f"the attention mask is made with the number {max(hidden)}, which may be a window that is "
            f"not understood, {where(node)}"
        )
    small = {n: 5 + 2 * i for i, n in enumerate(numbers)}
    other = {n: 6 + 2 * i for i, n in enumerate(numbers)}
    try:
        first = _window(capture, keep, padding, node, small)
        if first is None:
            # Shrinking a number may have hidden a window; as written, nothing may differ.
            if numbers and _window(capture, keep, padding, node, {}) is not None:
                raise Refused(_OTHER_MASK.format(where(node)))
            return None
        second = _window(capture, keep, padding, node, other)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"the attention mask cannot be evaluated on its own ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:160]}), {where(node)}"
        ) from error
    for number in numbers:
        shift = first - small[number]
        if second is not None and second - other[number] == shift and abs(shift) <= 1:
            return number + shift
    if first == second:  # a window that no number in the graph gives
        return first
    raise Refused(_OTHER_MASK.format(where(node)))


_OTHER_MASK = (
    "the attention mask is neither causal nor a causal window (chunked, block or data-dependent?), {}"
)


def _window(
    capture: Capture,
    keep: Callable[[torch.Tensor, int, Any], torch.Tensor],
    padding: Input | None,
    node: Node,
    shrunk: dict[int, int],
) -> int | None:
    """The window with the numbers of the mask's graph shrunk, on a probe longer than any of them."""

    def literal(inner: Node, args: Any) -> Any:
        if inner.target not in _ARITHMETIC:
            return args
        return _replace(args, lambda n: (1 if n > 0 else -1) * shrunk.get(abs(n), abs(n)))

    length = max([_PROBE_LENGTH, *(2 * v + 3 for v in shrunk.values())])
    rows = 3 if capture.rows > 1 else 1
    device = _device(capture)
    masks = [torch.ones(rows, length, dtype=torch.int64, device=device)]
    if padding is not None:
        for shape in ("left", "right", "both", "holes"):
            mask = torch.ones_like(masks[0])
            for row in range(rows):
                if shape in ("left", "both"):
                    mask[row, : 2 + 3 * row] = 0
                if shape in ("right", "both"):
                    mask[row, length - 1 - 2 * row :] = 0
                if shape == "holes":
                    mask[row, row + 1 :: 4 + row] = 0
            masks.append(mask)
    q = torch.arange(length, device=device)[:, None]
    k = torch.arange(length, device=device)[None, :]
    window: int | None = None
    for index, mask in enumerate(masks):
        kept = keep(mask, length, literal)
        while kept.dim() < 4:
            kept = kept.unsqueeze(0)
        kept = kept.expand(rows, kept.shape[1], length, length)
        if not bool((kept == kept[:, :1]).all()):
            raise Refused(f"attention heads have different masks, {where(node)}")
        kept = kept[:, 0]
        if index == 0:
            if bool(kept.all()):
                raise Refused(_BIDIRECTIONAL.format(where(node)))
            width = int(kept[0, -1].sum())
            window = None if width >= length else width
        expected = (k <= q) & (q - k < (window or length)) & mask.bool()[:, None, :]
        real = mask.bool()
        if not bool((kept == expected)[real].all()):
            raise Refused(_OTHER_MASK.format(where(node)))
    return window


def _device(capture: Capture) -> torch.device:
    return next(i.example.device for i in capture.inputs if i.kind == "user" and i.shape)


def _number(roles: Roles, value: Any) -> Any:
    return roles.values[value] if isinstance(value, Node) else value


def _active_dropout(roles: Roles, node: Node) -> bool:
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True} | dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(_number(roles, given["p"])) and bool(given["training"])


def _numbers(args: Any) -> list[float]:
    if isinstance(args, (int, float)) and not isinstance(args, bool):
        return [args]
    if isinstance(args, (tuple, list)):
        return [n for a in args for n in _numbers(a)]
    if isinstance(args, dict):
        return [n for a in args.values() for n in _numbers(a)]
    return []


def _ints(roles: Roles, node: Node) -> list[int]:
    """The numbers >= 2 among a node's arguments, sizes that were read as B or L left out."""
    numbers = _numbers(roles.args[node])
    return [abs(n) for n in numbers if type(n) is int and 2 <= abs(n) < 2**31]


def _replace(args: Any, fn: Callable[[int], int]) -> Any:
    """Replace the plain numbers (not sizes, dims or slices) of arithmetic arguments."""
    if type(args) is int and abs(args) >= 2:
        return fn(args)
    if type(args) in (tuple, list):
        return type(args)(_replace(a, fn) for a in args)
    return args if not isinstance(args, dict) else {k: _replace(v, fn) for k, v in args.items()}
