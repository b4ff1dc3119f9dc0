"""Operations that change a tensor in place, and whose memory they change.

Which values share memory is seen in the re-run of `roles`: views of a fake tensor share its
storage.

    y = x * 2                y and z share one storage, which `mul_` changes:
    z = y[:, :, :8]          whatever reads y, reads z or mul_ afterwards needs the mul_
    z.mul_(3)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..capture import Capture
from ..errors import Refused, describe, where
from .roles import STATE, Roles, tensors

_IN_PLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift, operator.imatmul, operator.setitem,
}  # fmt: skip
# A view of the captured tensor may be a copy of the flat one, or the other way round.
_MAYBE_VIEWS = {
    "reshape", "reshape_as", "flatten", "contiguous", torch.reshape, torch.flatten,
    torch.ravel, "ravel",
}  # fmt: skip


def storages(roles: Roles, node: Node) -> set[int]:
    """What identifies the memory of a node's tensors."""
    return {t.untyped_storage()._cdata for t in tensors(roles.values.get(node))}


def find_mutations(capture: Capture, roles: Roles) -> dict[Node, set[int]]:
    """The operations that work in place, and the storages that they change. Raises `Refused` where
    one is an input's or a constant's."""
    found: dict[Node, set[int]] = {}
    for node in capture.nodes:
        target = mutated(capture, node)
        if target is not None and tensors(roles.values.get(target)):
            found[node] = storages(roles, target)
    if found:
        for node in capture.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            changed = storages(roles, node)
            for mutation, touched in found.items():
                if changed & touched:
                    name = capture.by_node[node].source if node in capture.by_node else node.target
                    raise Refused(
                        f"the graph changes its input {name} in place with {describe(mutation)}, "
                        f"{where(mutation)}; assign the result to a new tensor instead"
                    )
    return found


def mutated(capture: Capture, node: Node) -> Node | None:
    """The tensor that a node changes in place, or None."""
    if node.op not in ("call_function", "call_method") or node.target in STATE:
        return None
    if isinstance(node.kwargs.get("out"), Node):
        return capture.resolve(node.kwargs["out"])
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    changes = name.endswith("_") and not name.endswith("__")
    if node.target in _IN_PLACE_OPERATORS or changes or node.kwargs.get("inplace") is True:
        first = node.args[0] if node.args else node.kwargs.get("input")
        first = capture.resolve(first)
        return first if isinstance(first, Node) else None
    if node.target is torch.nn.functional.dropout and len(node.args) > 3 and node.args[3]:
        return capture.resolve(node.args[0])
    return None


def check_aliases(capture: Capture, roles: Roles, live: list[Node]) -> None:
    """Raises `Refused` where a live tensor is changed in place through, or behind, a view that the
    flat graph may have as a copy (or a copy that it may have as a view)."""
    order = {n: i for i, n in enumerate(capture.nodes)}
    alive = [n for n in live if n in roles.mutations]
    for mutation in alive:
        chain = _chain(capture, mutated(capture, mutation))
        shared = [n for n in live if storages(roles, n) & roles.mutations[mutation]]
        risky = [n for n in shared if _unsure(roles, n) and order[n] < order[mutation]]
        risky += [n for n in chain if _unsure(roles, n) and n not in risky]
        for view in risky:
            behind = _chain(capture, view)[1:]
            if view in chain and all(len(n.users) == 1 for n in behind):
                continue
            raise Refused(
                f"{describe(mutation)} changes a tensor in place of which {describe(view)} may be "
                f"a view, {where(mutation)}; assign the result to a new tensor instead"
            )


def _chain(capture: Capture, node: Node | None) -> list[Node]:
    """A node and the first operands behind it, back to where the memory may come from."""
    chain: list[Node] = []
    while isinstance(node, Node) and node.op in ("call_function", "call_method"):
        chain.append(node)
        node = capture.resolve(node.args[0]) if node.args else None
        if isinstance(node, Node) and not _may_share(chain[-1]):
            break
    return chain


def _may_share(node: Node) -> bool:
    known: Any = node.meta.get("example_value")
    base = node.args[0].meta.get("example_value") if isinstance(node.args[0], Node) else None
    mine = {t.untyped_storage()._cdata for t in tensors(known)}
    return node.target in _MAYBE_VIEWS or bool(
        mine & {t.untyped_storage()._cdata for t in tensors(base)}
    )


def _unsure(roles: Roles, node: Node) -> bool:
    return node in roles.slices or node in roles.tables or node.target in _MAYBE_VIEWS
