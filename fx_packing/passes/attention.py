"""Find every attention of the graph, and what it means.

An attention is a `scaled_dot_product_attention` node, or the region between two matrix products
that forms a token-by-token matrix (eager attention). Code differs endlessly, so the meaning is
measured: the mask and the region between the products are run on small probes, and what comes out
is named.

    sdpa:    q, repeat(k), repeat(v), mask  ->  Attention(q, k, v, scale, window)
    eager:   q @ k^T -> * scale -> tanh -> + mask -> softmax -> @ v  ->  the same record
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .. import compat
from ..capture import Capture, Input
from ..errors import Refused, where
from .evaluate import ancestors, evaluate, probe_inputs
from .roles import Roles, Size, as_sizes
from .widen import Widened

SDPA = torch.nn.functional.scaled_dot_product_attention
_ATTENDING = {SDPA, torch.nn.functional.softmax, torch.softmax, compat.FLEX_ATTENTION}
_PRODUCTS = {torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm"}
_PROBE_LENGTH = 24
_DETACHING = {"detach", "detach_", torch.detach}
_POWERS = {
    operator.pow, operator.lshift, operator.rshift, torch.pow, torch.bitwise_left_shift,
    torch.bitwise_right_shift, "pow", "bitwise_left_shift", "bitwise_right_shift", "__lshift__",
    "__rshift__", "__rpow__",
}  # fmt: skip
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.lt,
    operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.truediv,
    operator.iadd, operator.isub, torch.add, torch.sub, torch.mul, torch.lt, torch.le,
    torch.gt, torch.ge, torch.eq, torch.ne, "add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne",
}  # fmt: skip


@dataclass
class Attention:
    """One attention: ``softmax(softcap(q k^T scale) + mask) v`` with q [B, H, L, D], k, v [B, KV,
    L, D].

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


def has_attention(gm: GraphModule) -> bool:
    """Whether attention is in the graph, at any depth: a model, not a piece of one."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)]
    return any(n.target in _ATTENDING for g in graphs for n in g.nodes)


def find_attention(capture: Capture, roles: Roles) -> list[Attention]:
    """Every attention in the graph, in order. Raises `Refused` where one is not understood."""
    found = []
    reader = _MaskReader(capture, roles)
    with compat.real_tensors():
        for node in capture.nodes:
            if node.target is SDPA:
                found.append(_sdpa(capture, roles, reader, node))
            elif node.target in _PRODUCTS and _is_exit(capture, roles, node):
                found.append(_eager(capture, roles, reader, node))
    masks = {a.mask.index for a in found if a.mask is not None}
    if len(masks) > 1:
        names = ", ".join(sorted({a.mask.source for a in found if a.mask is not None}))
        raise Refused(f"attention reads more than one padding mask: {names}")
    if masks and any(a.mask is None for a in found):
        bare = next(a.node for a in found if a.mask is None)
        raise Refused(f"one attention ignores the padding mask that others use, {where(bare)}")
    return found


def _sdpa(capture: Capture, roles: Roles, reader: _MaskReader, node: Node) -> Attention:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = (capture.resolve(given[n]) for n in names[:3])
    if _number(roles, given.get("dropout_p", 0.0)):
        raise Refused(_DROPOUT.format(where(node)))
    mask, causal = capture.resolve(given.get("attn_mask")), given.get("is_causal", False)
    scale = given.get("scale")
    if isinstance(scale, Node) and capture.resolve(scale) in roles.varying:
        raise Refused(f"the scale of attention is made from the batch's sizes, {where(node)}")
    scale = roles.values[query].shape[-1] ** -0.5 if scale is None else float(_number(roles, scale))
    if mask is None and not causal:
        raise Refused(_BIDIRECTIONAL.format(where(node)))
    window, padding = None, None
    if mask is not None:
        if causal:
            raise Refused(f"attention with both a mask and is_causal=True, {where(node)}")
        window, padding = reader.read_mask(mask, node)
    return _record(capture, roles, node, "sdpa", query, key, value, scale, window, None, padding)


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


def _eager(capture: Capture, roles: Roles, reader: _MaskReader, node: Node) -> Attention:
    weights, value = (capture.resolve(a) for a in node.args[:2])
    region, todo = [], [weights]  # the token-by-token matrices from the scores to the weights
    while todo:
        inner = todo.pop()
        if inner not in region:
            region.append(inner)
            todo += [o for o in capture.operands(inner) if _is_square(roles, o)]
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
    between = ancestors(capture, roles, [weights], [score])
    for inner in between:
        if inner.target is torch.nn.functional.dropout and active_dropout(roles, inner):
            raise Refused(_DROPOUT.format(where(inner)))
        if inner.target in _DETACHING:
            raise Refused(f"attention weights are detached from the gradient, {where(inner)}")
    modes, scored = _gradient_modes(capture), {score}  # a mask has no gradient, whatever the mode
    region = {*between, node}
    for inner in (n for n in capture.nodes if n in region):
        if not scored.isdisjoint(capture.operands(inner)):
            scored.add(inner)
    if len({modes[n] for n in scored}) > 1:
        raise Refused(f"a part of attention runs under no_grad, {where(node)}")
    window, scale, softcap, padding = reader.read_eager(score, weights, between, node)
    transposed = True
    if key.op == "call_method" and key.target == "transpose":
        dims = {d % 4 for d in key.args[1:3]}
        if dims == {2, 3}:
            key, transposed = capture.resolve(key.args[0]), False
    return _record(
        capture,
        roles,
        node,
        "eager",
        query,
        key,
        value,
        scale,
        window,
        softcap,
        padding,
        transposed,
    )


def _score_function(
    capture: Capture,
    roles: Roles,
    attend: Callable[..., torch.Tensor],
    score: Node,
    weights: Node,
    node: Node,
) -> tuple[float, float | None]:
    """(scale, softcap) of the region between scores and weights, found among its own constants."""
    numbers = {1.0}
    for inner in ancestors(capture, roles, [weights], [score]):
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
        heads = roles.values[score].shape[1]
        probe = torch.zeros(rows, heads, _PROBE_LENGTH, _PROBE_LENGTH, device=mask.device)
        probe[..., -2] = x
        last = attend(probe, mask, None)[..., -1, :]
        ratio = (last[..., -2] / last[..., -1]).log()
        if not torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio)):
            raise Refused(f"attention differs between rows or heads, {where(node)}")
        measured[x] = float(ratio.flatten()[0])

    def error(scale: float, cap: float | None) -> float:
        worst = 0.0
        for x, got in measured.items():
            want = (
                scale * x if cap is None else cap * float(torch.tanh(torch.tensor(scale * x / cap)))
            )
            if (
                abs(want) < 60 or abs(got) < 60
            ):  # beyond, a weight is 0 in float32 and tells nothing
                worst = max(worst, abs(got - want) / max(abs(want), 1e-2))
        return worst

    best = min(
        ((error(s, c), c is not None, s, c) for s in scales for c in (None, *numbers)),
        key=lambda t: t[:2],
    )
    exact = roles.values[weights].dtype in (torch.float32, torch.float64)
    if best[0] > (1e-3 if exact else 3e-2):
        raise Refused(_SCORES.format(where(node)))
    return best[2], best[3]


_DROPOUT = (
    "attention dropout is active: a packed row would sample other weights. Set the model's "
    "attention dropout to 0, or call model.eval(), {}"
)
_BIDIRECTIONAL = (
    "attention is bidirectional (each token sees later ones); only causal models can be packed, {}"
)
_SCORES = (
    "what is done to the attention scores on the way to the weights is more than a scale, a soft "
    "cap, a mask and a softmax, {}"
)
_BIAS = (
    "attention adds a bias to the scores (ALiBi, relative positions), which is not supported, {}"
)


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
            f"attention over {', '.join(text)}, expected [B, H, L, D]: cross attention, a KV "
            f"cache, or attention over another axis, {where(node)}"
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
        inserted = insert.target == "unsqueeze" or (
            insert.target is operator.getitem
            and isinstance(insert.args[1], tuple)
            and all(i in (slice(None), None, Ellipsis) for i in insert.args[1])
        )
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


Keep = Callable[
    [torch.Tensor, int, Any], torch.Tensor
]  # (mask, length, literal) -> which pairs are kept


class _MaskReader:
    """Names masks by running them on probes; equal masks are read once.

    Numbers of the mask's graph are made small, so that a window shows on a short probe, and once
    more left as they are, on a probe longer than every number that could not be made small.
    """

    def __init__(self, capture: Capture, roles: Roles) -> None:
        self.capture, self.roles = capture, roles
        self.known: dict[Node, tuple[int | None, Input | None]] = {}
        self.regions: dict[str, tuple[int | None, float, float | None, Input | None]] = {}
        self.order = {n: i for i, n in enumerate(capture.nodes)}

    # -- the two kinds -----------------------------------------------------------------------------

    def read_mask(self, mask: Node, node: Node) -> tuple[int | None, Input | None]:
        """The window and the padding mask of what SDPA is given as its mask."""
        self._not_changed_later([mask], [], node)
        if mask not in self.known:
            padding = self.padding([mask], [], node)

            def keep(given: torch.Tensor, length: int, literal: Any) -> torch.Tensor:
                return _kept(self._probe(mask, {}, given, padding, length, literal), node)

            self.known[mask] = self._meaning([mask], [], keep, padding, 1, node), padding
        return self.known[mask]

    def read_eager(
        self, score: Node, weights: Node, between: list[Node], node: Node
    ) -> tuple[int | None, float, float | None, Input | None]:
        """The window, scale, softcap and padding mask of the region from the scores to the weights;
        equal regions (those of other layers) are read once."""
        self._not_changed_later([weights], [score], node)
        text = _text(self.capture, self.roles, between, score)
        if text not in self.regions:
            padding = self.padding([weights], [score], node)

            def attend(scores: torch.Tensor, mask: torch.Tensor, literal: Any) -> torch.Tensor:
                feeds = {score: scores.float().clone()}
                length = scores.shape[-1]
                return self._probe(weights, feeds, mask, padding, length, literal).double()

            window = self.read_weights(attend, padding, score, weights, node)
            scale, softcap = _score_function(self.capture, self.roles, attend, score, weights, node)
            self.confirm(attend, padding, score, between, scale, window, softcap, node)
            self.regions[text] = window, scale, softcap, padding
        return self.regions[text]

    def read_weights(
        self, attend: Callable[..., torch.Tensor], padding: Input | None, score: Node,
        weights: Node, node: Node,
    ) -> int | None:  # fmt: skip
        """The window of the region from scores to weights."""
        heads = self.roles.values[score].shape[1]

        def keep(mask: torch.Tensor, length: int, literal: Any) -> torch.Tensor:
            zeros = torch.zeros(mask.shape[0], heads, length, length, device=mask.device)
            found = attend(zeros, mask, literal)
            kept, total = found > 0, found.sum(-1)
            if not torch.allclose(total, torch.ones_like(total), atol=1e-2):
                raise Refused(
                    f"attention weights do not sum to 1 (attention sinks?), which is not "
                    f"supported, {where(node)}"
                )
            even = kept / kept.sum(-1, keepdim=True)
            if not torch.allclose(found, even.double(), rtol=2e-2, atol=1e-4):
                raise Refused(_BIAS.format(where(node)))
            return kept

        return self._meaning([weights], [score], keep, padding, heads, node)

    def confirm(
        self, attend: Callable[..., torch.Tensor], padding: Input | None, score: Node,
        between: list[Node], scale: float, window: int | None, softcap: float | None, node: Node,
    ) -> None:  # fmt: skip
        """The region as it was understood must give the weights of random scores."""
        generator = torch.Generator().manual_seed(0)
        heads = self.roles.values[score].shape[1]
        long = self._long_probe([n for n in between if n is not score], heads, node)
        masks = [(m, s) for m in self._masks(_PROBE_LENGTH, padding) for s in (2.0, 30.0)]
        masks.append((self._masks(long, None)[0][:1], 4.0))
        exact = torch.float32 in (self.roles.values[n].dtype for n in (node, score))
        for mask, spread in masks:
            scores = torch.randn(len(mask), heads, *[mask.shape[1]] * 2, generator=generator)
            scores = scores.to(mask.device) * spread / scale
            got = attend(scores, mask, None)
            want = scores.double() * scale
            want = want if softcap is None else softcap * (want / softcap).tanh()
            want = want.masked_fill(~_expected(mask, window)[:, None], -torch.inf).softmax(-1)
            error = (got - want)[mask.bool()[:, None, :].expand(-1, heads, -1)].abs().max()
            if not float(error) < (1e-3 if exact else 5e-2):
                raise Refused(_SCORES.format(where(node)))

    # -- reading -----------------------------------------------------------------------------------

    def padding(self, targets: list[Node], stop: list[Node], node: Node) -> Input | None:
        """The [B, L] input that a mask is made from; what else it reads must be constant."""
        behind = ancestors(self.capture, self.roles, targets, stop)
        inputs = [
            self.capture.by_node[n] for n in behind if n in self.capture.by_node and n not in stop
        ]
        for item in inputs:
            if isinstance(item.example, torch.nn.Parameter) or getattr(
                item.example, "requires_grad", False
            ):
                raise Refused(
                    f"attention adds or multiplies its scores by the parameter {item.source}, "
                    f"which is not supported, {where(node)}"
                )
        for n in behind:
            sizes = map(self.roles.size, as_sizes(self.roles.values.get(n)))
            callers = (
                {s for size in sizes for s in size.symbols} - {"B", "L"} - self.roles.lines
            )
            if callers:
                name = self.capture.by_node[n].source if n in self.capture.by_node else n.name
                raise Refused(
                    f"the attention mask depends on a number that the caller passes ({name}); "
                    f"make it a constant of the model, {where(node)}"
                )
        found = [i for i in inputs if i.kind == "user"]
        if not found:
            return None
        if len(found) > 1:
            names = ", ".join(i.source for i in found)
            raise Refused(
                f"the attention mask depends on several inputs ({names}): with position_ids alone "
                f"the model guesses packed sequences; pass attention_mask as well, {where(node)}"
            )
        (padding,) = found
        if padding in self.capture.ids:
            raise Refused(
                f"the attention mask is made from the token ids ({padding.source}); padding is "
                f"never guessed from ids: pass attention_mask, {where(node)}"
            )
        if padding.shape != (self.capture.rows, self.capture.columns):
            shape = list(padding.shape)
            raise Refused(
                f"the attention mask is an input of shape {shape} ({padding.source}); only "
                f"padding masks [B, L] can be read, {where(node)}"
            )
        if padding.example.is_floating_point():
            raise Refused(
                f"the padding mask {padding.source} is a float tensor; pass it as bool or int64, "
                f"{where(node)}"
            )
        return padding

    def _not_changed_later(self, targets: list[Node], stop: list[Node], node: Node) -> None:
        if not self.roles.mutations:
            return
        behind = set(ancestors(self.capture, self.roles, targets, stop))
        late = [m for m in self.roles.mutations if m in behind and self.order[m] > self.order[node]]
        if late:
            raise Refused(f"the attention mask is changed in place after its use, {where(late[0])}")

    def _probe(
        self, target: Node, feeds: dict[Node, Any], mask: torch.Tensor, padding: Input | None,
        length: int, literal: Any,
    ) -> torch.Tensor:  # fmt: skip
        sizes = {s: length for s in self.roles.primes} | {"L": length, "B": mask.shape[0]}
        feeds = {**probe_inputs(self.capture), **feeds}
        if padding is not None:
            feeds[padding.node] = mask.to(padding.example.dtype)
        # In float32: what is asked here is what a graph means, not how its dtype rounds.
        return evaluate(
            self.capture, self.roles, [target], sizes, feeds, literal=literal, widened=Widened()
        )[target]

    def _meaning(
        self, targets: list[Node], stop: list[Node], keep: Keep, padding: Input | None, heads: int,
        node: Node,
    ) -> int | None:  # fmt: skip
        """The window of a causal mask (None without one). Raises `Refused` for any other mask."""
        behind = [n for n in ancestors(self.capture, self.roles, targets, stop) if n not in stop]
        numbers = sorted({n for inner in behind for n in _shrinkable(self.roles, inner)})
        long = self._long_probe(behind, heads, node)
        try:
            if not numbers:
                return self._window(keep, padding, node, {}, long)
            small = {n: 5 + 2 * i for i, n in enumerate(numbers)}
            other = {n: 6 + 2 * i for i, n in enumerate(numbers)}
            length = 2 * max(other.values()) + 3
            first = self._window(keep, padding, node, small, max(length, _PROBE_LENGTH))
            second = self._window(keep, padding, node, other, max(length, _PROBE_LENGTH))
            as_written = self._window(keep, padding, node, {}, long)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"the attention mask cannot be evaluated on its own ({type(error).__name__}: "
                f"{str(error).splitlines()[0][:160]}), {where(node)}"
            ) from error
        if first is None or second is None:
            found = [None] if first is second else []
        elif first == second:  # a window that no number in the graph gives
            found = [first]
        else:
            shifts = [
                (n, first - small[n]) for n in numbers if first - small[n] == second - other[n]
            ]
            found = [int(math.ceil(n)) + shift for n, shift in shifts if abs(shift) <= 1]
        for window in found:
            if as_written == (window if window is not None and window < long else None):
                return window
        raise Refused(_OTHER_MASK.format(where(node)))

    def _long_probe(self, behind: list[Node], heads: int, node: Node) -> int:
        """A length at which every number that is not made small shows: those of operations that are
        no arithmetic, and the constants and tables that the mask is made from."""
        shows, tables = 48, []
        for inner in behind:
            for number in _hidden(self.roles, inner):
                shows = max(shows, 2 * number + 3)
            value = _constant(self.capture, inner)
            if value is None:
                continue
            if value.numel() == 1 and value.dtype != torch.bool:
                number = abs(float(value))
                shows = max(shows, 2 * number + 3 if 2 <= number < 1e4 else 0)
            elif value.numel() > 1:
                tables.append(max(value.shape))
        shows = max([shows, *tables])
        most = int(min(2048, (2**24 / heads) ** 0.5))
        if shows > most:
            raise Refused(
                f"the attention mask is made with the number {int(max(shows - 3, 0) // 2)}, or a "
                f"table of {int(shows)} entries, which may be a window that is not understood, "
                f"{where(node)}"
            )
        if tables:
            return int(shows)
        return int(max(shows, min((2**21 / heads) ** 0.5, self.capture.columns)))

    def _masks(self, length: int, padding: Input | None) -> list[torch.Tensor]:
        rows = 3 if self.capture.rows > 1 else 1
        masks = [torch.ones(rows, length, dtype=torch.int64, device=_device(self.capture))]
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
        return masks

    def _window(
        self, keep: Keep, padding: Input | None, node: Node, shrunk: dict[float, int], length: int
    ) -> int | None:
        """The window on probes of this length, with the numbers of the mask's graph `shrunk`."""

        def literal(inner: Node, args: Any) -> Any:
            if inner.target not in _ARITHMETIC:
                return args
            return _replace(args, lambda n: math.copysign(shrunk.get(abs(n), abs(n)), n))

        window: int | None = None
        masks = self._masks(length, padding)
        for index, mask in enumerate(masks if length <= 256 else [m[:1] for m in masks]):
            kept = keep(mask, length, literal)
            while kept.dim() < 4:
                kept = kept.unsqueeze(0)
            kept = kept.expand(len(mask), kept.shape[1], length, length)
            if not bool((kept == kept[:, :1]).all()):
                raise Refused(f"attention heads have different masks, {where(node)}")
            kept = kept[:, 0]
            if index == 0:
                if bool(kept.all()):
                    raise Refused(_BIDIRECTIONAL.format(where(node)))
                width = int(kept[0, -1].sum())
                window = None if width >= length else width
            if not bool((kept == _expected(mask, window))[mask.bool()].all()):
                raise Refused(_OTHER_MASK.format(where(node)))
        return window


_OTHER_MASK = (
    "the attention mask is neither causal nor a causal window (chunked, block, prefix or "
    "data-dependent?), {}"
)


def _expected(mask: torch.Tensor, window: int | None) -> torch.Tensor:
    """[B, L, L] bool: a causal mask, with the padding left out."""
    length = mask.shape[1]
    place = torch.arange(length, device=mask.device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < (window or length)) & mask.bool()[:, None, :]


def _kept(value: torch.Tensor, node: Node) -> torch.Tensor:
    if value.dtype == torch.bool:
        return value
    if not value.is_floating_point():
        raise Refused(f"an attention mask of dtype {value.dtype}, {where(node)}")
    zero, far = value == 0, value <= -1e4
    if not bool((zero | far).all()):
        raise Refused(_BIAS.format(where(node)))
    return zero


def _gradient_modes(capture: Capture) -> dict[Node, bool | None]:
    """Whether each node runs with gradients, as the graph itself switches them (None: as it is
    called)."""
    mode: bool | None = None
    modes = {}
    for node in capture.nodes:
        if node.target is torch._C._set_grad_enabled:
            mode = bool(node.args[0])
        modes[node] = mode
    return modes


def _text(capture: Capture, roles: Roles, between: list[Node], score: Node) -> str:
    """What a region computes, as text that is equal for equal regions."""
    names: dict[Node, Any] = {score: "score"}
    lines = []
    for node in between:
        if node is score:
            continue
        if node.op in ("placeholder", "get_attr") or roles.exact(node):
            names[node] = id(node) if node.op != "call_method" else roles.values[node]
            continue
        args = map_arg(roles.args[node], lambda n: _name(capture.resolve(n), names))
        names[node] = len(names)
        lines.append(f"{node.target} {args} {node in roles.slices} {node in roles.tables}")
    return "\n".join(lines)


def _name(value: Any, names: dict[Node, Any]) -> Any:
    return map_arg(value, lambda n: ("node", names.get(n, n.name)))


def _constant(capture: Capture, node: Node) -> torch.Tensor | None:
    """The tensor of a constant or of a buffer."""
    if node.op == "get_attr":
        value = node.meta["fx_packing_attr"]
        return value if isinstance(value, torch.Tensor) else None
    item = capture.by_node.get(node)
    return item.example if item is not None and item.kind == "module" else None


def _device(capture: Capture) -> torch.device:
    return next(i.example.device for i in capture.inputs if i.kind == "user" and i.shape)


def _number(roles: Roles, value: Any) -> Any:
    return roles.values[value] if isinstance(value, Node) else value


def active_dropout(roles: Roles, node: Node) -> bool:
    """Whether a dropout node drops anything."""
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


def _shrinkable(roles: Roles, node: Node) -> list[float]:
    """The numbers in a node's arithmetic that may be a window; those far out are what masks fill
    with."""
    if node.op == "placeholder" or node.target not in _ARITHMETIC:
        return []
    return [abs(n) for n in _numbers(roles.args[node]) if _may_be_window(n)]


def _may_be_window(number: float) -> bool:
    return 2 <= abs(number) < (2**31 if type(number) is int else 1e4)


def _hidden(roles: Roles, node: Node) -> list[float]:
    """The numbers of an operation that is no arithmetic, as far as they may say where a mask
    changes."""
    if node.op in ("placeholder", "get_attr") or node.target in _ARITHMETIC:
        return []
    if node in roles.pinned:
        return [abs(roles.pinned[node])] if _may_be_window(roles.pinned[node]) else []
    if roles.exact(node):
        return []
    numbers = [abs(n) for n in _numbers(roles.args[node]) if _may_be_window(n)]
    return [2.0 ** min(n, 60) for n in numbers] if node.target in _POWERS else numbers


def _replace(args: Any, fn: Callable[[float], float]) -> Any:
    """Replace the plain numbers (not sizes, dims or slices) of arithmetic arguments."""
    if type(args) in (int, float) and _may_be_window(args):
        return type(args)(fn(args))
    if type(args) in (tuple, list):
        return type(args)(_replace(a, fn) for a in args)
    return args if not isinstance(args, dict) else {k: _replace(v, fn) for k, v in args.items()}
