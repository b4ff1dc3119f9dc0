"""The passes, in order. Each is a plain function in a file of its own; none changes its input.

A pass that cannot go on raises `Refused` with the reason; `backend.py` catches it in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from ..capture import Capture, Input
from ..errors import Refused
from .attention import Attention, find_attention
from .flatten import FlatGraph, flatten
from .live import live_nodes
from .loops import fold_loops
from .roles import Roles, find_roles
from .tail import Tail, find_tail, free_scalars
from .tokenwise import Proof, prove


@dataclass
class Analysis:
    """All that is known of a packable graph; `flat` writes the flat graph of a kernel."""

    capture: Capture
    roles: Roles
    attention: list[Attention]
    live: list[Node]
    proof: Proof
    tail: Tail | None = None
    _flats: dict[tuple[str, bool], FlatGraph] = field(default_factory=dict)

    @property
    def padding(self) -> Input | None:
        """The [B, L] input that says which tokens are real; None where all are."""
        return next((a.mask for a in self.attention if a.mask is not None), None)

    def flat(self, kernel: str, *, dropout: bool = True) -> FlatGraph:
        """The flat graph with the given attention kernel, with or without its dropout."""
        key = (kernel, dropout)
        if key not in self._flats:
            self._flats[key] = flatten(
                self.capture,
                self.roles,
                self.live,
                self.attention,
                self.proof,
                kernel,
                self.tail,
                dropout=dropout,
            )
        return self._flats[key]


def analyse(capture: Capture) -> Analysis:
    """Loops, roles, attention, what stays alive, and the proof. Raises `Refused`."""
    folded = fold_loops(capture)
    if folded is None:
        return _analyse(capture)
    try:
        return _analyse(folded)
    except Refused as refusal:
        try:  # it may be a loop over something else that is as long as the batch
            return _analyse(capture)
        except Refused:
            raise refusal from None


def _analyse(capture: Capture) -> Analysis:
    roles = find_roles(capture)
    attention = find_attention(capture, roles)
    live = live_nodes(capture, roles, attention)
    proof = prove(capture, roles, live, attention)
    if not attention:
        raise Refused(
            "the graph has no attention, so there is nothing that packing could speed up here; a "
            "graph break may have cut the model into pieces (see TORCH_LOGS=graph_breaks)"
        )
    tail = find_tail(capture, roles, live, attention, proof)
    if tail is not None:
        free_scalars(roles, tail)
    return Analysis(capture, roles, attention, live, proof, tail)
