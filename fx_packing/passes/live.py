"""What the flat graph still needs: everything that reaches an output, once attention takes the
queries, keys and values alone.

    ids -> ... -> q, k, v -> attention -> ... -> output        live
    attention_mask -> causal, padding -> 4-D mask -^           not live any more
"""

from __future__ import annotations

from torch.fx import Node

from ..capture import Capture
from .attention import Attention
from .inplace import check_aliases, storages
from .roles import STATE, Roles, is_number


def live_nodes(capture: Capture, roles: Roles, attention: list[Attention]) -> list[Node]:
    """The nodes of the flat graph in order; sizes and scalars, which become constants, left out.
    Raises `Refused` where changes in place would not be the same in the flat graph."""
    by_node = {a.node: a for a in attention}
    live: set[Node] = set()
    todo = capture.operands(capture.output)
    todo += [n for n in capture.nodes if n.target in STATE]
    while todo:
        while todo:
            node = todo.pop()
            if node in live or (is_number(roles.values[node]) and node.target not in STATE):
                continue
            live.add(node)
            found = by_node.get(node)
            todo += [found.query, found.key, found.value] if found else capture.operands(node)
        if roles.mutations:
            touched = {s for n in live for s in storages(roles, n)}
            todo = [n for n, s in roles.mutations.items() if n not in live and s & touched]
    ordered = [n for n in capture.nodes if n in live]
    check_aliases(capture, roles, ordered)
    return ordered
