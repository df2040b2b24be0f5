"""Cases: what is decided in several steps, some of them by people: proposals and investigations.

Both are folded from records like everything else in ``state``; frozen, replaced at each move.
"""

from __future__ import annotations

from msgspec import Struct

from keepstep.model.ids import IncidentId, Nanos, NodeId, Rank
from keepstep.model.records import InvestigationState, ProposalState


class Proposal(Struct, frozen=True, kw_only=True):
    """A change of living nodes, from its proposal to its end (``records.ProposalMoved``)."""

    id: str
    state: ProposalState
    kind: str
    incident: IncidentId | None
    nodes: tuple[NodeId, ...]
    ranks: tuple[Rank, ...]
    probability: float
    reason: str
    evidence: tuple[str, ...]
    rejected: tuple[str, ...]
    cost_if_wrong: str
    held: str
    opened: Nanos
    at: Nanos
    by: str
    why: str
    testable: bool = False
    """A self-test that its nodes pass clears them."""
    origin: str = ""
    """``straggler``: it rests on measured windows, and ends with them."""
    carried: Nanos = Nanos(0)
    """When the epoch without these nodes was opened."""

    @property
    def open(self) -> bool:
        return self.state in ("PROPOSED", "APPROVED")


class Investigation(Struct, frozen=True, kw_only=True):
    """Silent data corruption, from suspicion to verdict (``records.InvestigationMoved``)."""

    id: str
    state: InvestigationState
    ranks: tuple[Rank, ...]
    nodes: tuple[NodeId, ...]
    tensor: str
    step: int
    since: int
    probability: float
    opened: Nanos
    at: Nanos
    why: str
    history: tuple[str, ...] = ()
    incident: IncidentId | None = None

    @property
    def open(self) -> bool:
        return self.state not in ("CONFIRMED", "CLEARED")
