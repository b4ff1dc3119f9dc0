"""Cut off the tail: from the LM head to a few numbers a token, so that it can run in tiles of tokens.

    flat                                          flat            tail, for each tile of tokens
    h -> linear(h, W) [1, T, V] -> / t -> ..      h ->            logits = linear(h, W)  [1, n, V]
      -> gather(., ids) - logsumexp(.) [1, T]     ids ->          rest(logits, ids, ..)  [1, n]

Whatever the captured graph has between the head and the numbers is run as it is; no formula is known
here. The tail of a graph that returns the logits themselves, or anything else as wide, stays in it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from ..capture import Capture
from .attention import Attention
from .roles import STATE, Roles
from .tokenwise import Layout, Proof

_NARROW = 16  # numbers a token that a tail may yield, and the least factor that its head widens by


@dataclass
class Tail:
    """The nodes of a tail, in order, and the line of tokens that all of it is computed on.

    `parts` says of each value that enters it from outside, token by token, which of the joined
    slices it becomes part of (its own line where nothing is joined).

    The backward runs a tail once more, with gradients: what the graph computes without them is detached.
    """

    head: Node
    hidden: Node
    weight: Node
    bias: Node | None
    nodes: list[Node]
    columns: str
    parts: dict[Node, str] = field(default_factory=dict)
    detached: set[Node] = field(default_factory=set)  # computed in a no-grad region


def find_tail(
    capture: Capture, roles: Roles, live: list[Node], attention: list[Attention], proof: Proof
) -> Tail | None:
    """The widest tail, or None where there is none that can be cut off."""
    heads = [n for n in live if n.target is torch._C._nn.linear and n in proof.layouts]
    found = [_tail(capture, roles, live, attention, proof, h) for h in reversed(heads[-4:])]
    tails = [t for t in found if t is not None]
    return max(tails, key=lambda t: line_width(proof.layouts[t.head]), default=None)


def free_scalars(roles: Roles, tail: Tail) -> None:
    """Floats of the caller's that the tail alone reads, a temperature, may be others at each call: what is
    proven of an operation does not depend on them."""
    inside = set(tail.nodes)
    floats = [n for n, value in roles.pinned.items() if isinstance(value, float)]
    roles.free |= {n for n in floats if inside.issuperset(n.users)}
    roles.pinned = {n: value for n, value in roles.pinned.items() if n not in roles.free}


def _tail(
    capture: Capture,
    roles: Roles,
    live: list[Node],
    attention: list[Attention],
    proof: Proof,
    head: Node,
) -> Tail | None:
    inside = {head}
    for node in live:
        if inside & set(capture.operands(node)):
            inside.add(node)
    nodes = [n for n in live if n in inside]
    outputs = [n for n in capture.operands(capture.output) if n in inside]
    operands = [capture.resolve(a) for a in head.args[:3]] + [None]
    hidden, weight, bias = operands[:3]
    if not all(isinstance(n, Node) and n in proof.layouts for n in (hidden, weight)):
        return None
    if weight not in capture.by_node or (bias is not None and bias not in capture.by_node):
        return None
    wide = line_width(proof.layouts[head])
    if wide < _NARROW * max((line_width(proof.layouts.get(n, ((wide,),))) for n in outputs), default=wide):
        return None
    if any(_entangled(capture, roles, attention, proof, n) for n in nodes):
        return None
    lines = {line_of(proof.layouts[n]) for n in outputs} - {None}
    joined = [n for n in lines if n in proof.columns and proof.columns[n].parts]
    columns = joined[0] if joined else next(iter(lines), None)
    wanted = set(proof.columns[columns].parts) if joined else {columns}
    if columns is None or len(joined) > 1 or not lines <= wanted | {columns}:
        return None
    detached = _without_gradients(capture, roles, head, inside)
    if detached is None:
        return None
    tail = Tail(head, hidden, weight, bias, nodes, columns, detached=detached)
    entering = [head, *(o for n in nodes for o in capture.operands(n) if o not in inside)]
    for node in dict.fromkeys(entering):
        if node is hidden or node not in proof.layouts or line_of(proof.layouts[node]) is None:
            continue
        parts = _reached(proof, node, inside, capture, wanted | {tail.columns})
        if len(parts) != 1 or not _follows(proof, *parts, line_of(proof.layouts[node])):
            return None
        tail.parts[node] = parts.pop()
    tail.parts[hidden] = tail.parts.pop(head)
    if lines != {columns}:  # what needs the logits alone also has a place where the next token is none
        if not lines <= {columns, tail.parts[hidden]} or columns in tail.parts.values():
            return None
        known = proof.columns[columns]
        tail.columns = f"{columns} of {tail.parts[hidden]}"
        anchored = replace(known, name=tail.columns, anchor=tail.parts[hidden])
        proof.columns.setdefault(tail.columns, anchored)
    return tail


def _without_gradients(capture: Capture, roles: Roles, head: Node, inside: set[Node]) -> set[Node] | None:
    """Those of `inside` that are computed in a no-grad region. None where a tail does not keep a mode that
    the graph sets: autocast around or behind the head, gradients where there would be none."""
    found: set[Node] = set()
    enabled, behind = True, False
    for node in capture.nodes:
        behind |= node is head
        if node.target is torch._C._set_grad_enabled:
            if node.args[0] and enabled:
                return None
            enabled = bool(node.args[0])
        elif node.target in STATE and node.target is not torch._C._log_api_usage_once:
            if behind:
                return None
        elif node in inside and not enabled:
            if node in roles.mutations:
                return None
            found.add(node)
        elif node.target is operator.getitem and node in inside and node.args[0] in found:
            found.add(node)  # of a tuple, which cannot be detached itself
    return found


def _entangled(capture: Capture, roles: Roles, attention: list[Attention], proof: Proof, node: Node) -> bool:
    """Whether a node cannot be run apart from the rest, and once more in the backward."""
    if node in {a.node for a in attention} or node.target in STATE or node not in proof.layouts:
        return True
    in_body = node.graph is not capture.gm.graph
    random = node.target is torch.nn.functional.dropout
    cut = roles.slices[node][1] if node in roles.slices else None
    apart = node in roles.tables or (cut and node not in proof.cuts and cut.symbol != cut.parent)
    return in_body or random or bool(apart) or line_of(proof.layouts[node]) is None


def _reached(proof: Proof, node: Node, inside: set[Node], capture: Capture, wanted: set[str]) -> set[str]:
    """The lines of `wanted` that a value becomes part of, by the slices that are taken of it."""
    found: set[str] = set()
    seen, todo = set(), [(node, line_of(proof.layouts[node]))]
    while todo:
        value, line = todo.pop()
        if (value, line) in seen:
            continue
        seen.add((value, line))
        if line in wanted:
            found.add(line)  # type: ignore[arg-type]
            continue
        users = [n for n in inside if value in capture.operands(n)]
        todo += [(n, _part_of(proof, line, line_of(proof.layouts[n]))) for n in users]
    return found


def _part_of(proof: Proof, line: str | None, user: str | None) -> str | None:
    """What tokens of `line` are in the line of a user: of joined slices one, or a slice of one."""
    parts = proof.columns[user].parts if user in proof.columns else ()
    sliced = (p for p in parts if proof.columns[p].parent == line)
    return line if line in parts else next(sliced, user)


def _follows(proof: Proof, part: str, line: str | None) -> bool:
    """Whether `part` is `line`, or a slice of it."""
    while part != line and part in proof.columns:
        part = proof.columns[part].parent
    return part == line


def line_of(layout: Layout) -> str | None:
    """The one line of tokens that a tensor has; None if it has none, or not as whole dimension."""
    names = [f for factors in layout for f in factors if isinstance(f, str) and f != "B"]
    if len(names) != 1:
        return None
    (factors,) = (f for f in layout if names[0] in f)
    return names[0] if factors in ((names[0],), ("B", names[0])) else None


def line_dim(layout: Layout) -> int:
    """The dimension that holds the tokens."""
    name = line_of(layout)
    return next(d for d, factors in enumerate(layout) if name in factors)


def line_width(layout: Layout) -> int:
    """How many numbers a token has."""
    return math.prod(f for factors in layout for f in factors if not isinstance(f, str))
