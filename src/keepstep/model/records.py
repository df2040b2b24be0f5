"""Records: what the log holds, in the order it was observed, concluded and ordered.

``Controller.decide`` turns a fact into records; ``Controller.evolve`` folds them. Nothing else changes state.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from keepstep.model.actions import AnyAction
from keepstep.model.facts import AnyFact
from keepstep.model.ids import IncidentId, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.topology import Roster

SCHEMA = 1
"""Version of the log's record schema. A reader refuses a log of a newer one; an older one is migrated."""

JobState = Literal["PENDING", "STARTING", "RUNNING", "RECOVERING", "WAITING", "FINISHED", "FAILED", "STOPPED"]
IncidentState = Literal["OPEN", "LOCATING", "DECIDED", "RECOVERING", "VERIFYING", "RESOLVED", "ESCALATED"]
NodeState = Literal[
    "HEALTHY",
    "SUSPECT",
    "TAINTED",
    "DRAINING",
    "QUARANTINED",
    "REPAIRING",
    "VERIFYING",
    "PROBATION",
    "RETIRED",
]
StandbyState = Literal["COLD", "CHECKING", "SLEEPING", "WAKING", "ACTIVE", "GONE"]
Rung = Literal["in_process", "same_node", "replace_node", "restart_job", "requeue", "stop"]
"""The restart ladder, lowest first. ``same_node`` is in-process recovery with a cold process on the same node."""
Category = Literal["infrastructure", "user_code", "data", "transient", "unknown"]
Automation = Literal["observe", "assist", "auto", "frozen"]
"""What may be done to nodes that live: nothing, only what a person approves, all within the limits, nothing at all."""
ProposalState = Literal["PROPOSED", "APPROVED", "CARRIED_OUT", "REJECTED", "EXPIRED", "UNDONE"]
InvestigationState = Literal["SUSPECTED", "REPLAY", "VOTE", "SOAK", "CONFIRMED", "CLEARED"]


class Record(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all records; ``at`` is the controller's clock when it decided."""

    job: JobId
    at: Nanos


class Observed(Record, frozen=True, kw_only=True):
    """The fact that led to the records after it."""

    fact: AnyFact


class JobMoved(Record, frozen=True, kw_only=True):
    to: JobState
    why: str
    exit_code: int | None = None


class NodeMoved(Record, frozen=True, kw_only=True):
    node: NodeId
    to: NodeState
    why: str


class StandbyMoved(Record, frozen=True, kw_only=True):
    node: NodeId
    slot: SlotId
    to: StandbyState
    why: str


class IncidentOpened(Record, frozen=True, kw_only=True):
    """Something is wrong. ``onset`` is the earliest evidence, ``at`` the moment of detection."""

    incident: IncidentId
    onset: Nanos
    title: str


class IncidentMoved(Record, frozen=True, kw_only=True):
    incident: IncidentId
    to: IncidentState
    why: str


class SuspectNamed(Record, frozen=True, kw_only=True):
    """Who, how sure, and on what evidence (sequence-independent: the facts themselves, in words)."""

    incident: IncidentId
    category: Category
    node: NodeId | None
    ranks: tuple[Rank, ...]
    probability: float
    reason: str
    evidence: tuple[str, ...]
    root_cause: str = ""
    """In the words of the diagnosis; empty where only positions and exits spoke."""
    code: str = ""
    """Of the rule or the catalogue entry, for ``keepstep explain CODE``."""
    similar: tuple[IncidentId, ...] = ()
    """Earlier incidents of the same cause, newest first."""
    leave: bool = False
    """The node lives, and its own words prove it broken: its ranks go elsewhere as soon as there is room."""
    pair: tuple[NodeId, ...] = ()
    """Two living nodes that do not reach each other."""


class PlanMade(Record, frozen=True, kw_only=True):
    """What will be done and why, what else was thought of, and what being wrong would cost."""

    incident: IncidentId
    rung: Rung
    attempt: int
    reason: str
    rejected: tuple[str, ...]
    cost_if_wrong: str


class EpochOpened(Record, frozen=True, kw_only=True):
    """From this record on, older rosters are fenced off."""

    roster: Roster


class Ordered(Record, frozen=True, kw_only=True):
    """An action to dispatch once this record is durable. The log is the outbox."""

    action: AnyAction


class DeadlineSet(Record, frozen=True, kw_only=True):
    """Ask to be woken. A deadline is named, and setting it again replaces it; ``due`` 0 clears it."""

    name: str
    due: Nanos


class Noted(Record, frozen=True, kw_only=True):
    """A sentence for the reader that changes nothing: a request that was refused, a report that came too late."""

    text: str


class IncidentMeasured(Record, frozen=True, kw_only=True):
    """Phases and cost of a closed incident, in milliseconds where not said otherwise (METRICS in the docs)."""

    incident: IncidentId
    detect_ms: float
    locate_ms: float
    decide_ms: float
    recover_ms: float
    phases: dict[str, float]
    survivors_kept: int
    survivors_possible: int
    steps_lost: int
    replaced: tuple[Rank, ...]


class ProposalMoved(Record, frozen=True, kw_only=True):
    """A change of nodes that are alive (swap, eviction): proposed by the mind, decided by the limits or by a person.

    Attributes:
        proposal: its id, derived from the job and a number.
        incident: that it belongs to, if it came out of one.
        nodes: that are to go.
        by: who moved it: ``auto`` or a person.
        held: why the limits did not let it pass by itself; empty where they did.
    """

    proposal: str
    to: ProposalState
    by: str
    why: str
    kind: Literal["swap", "evict"] = "swap"
    incident: IncidentId | None = None
    nodes: tuple[NodeId, ...] = ()
    ranks: tuple[Rank, ...] = ()
    probability: float = 0.0
    evidence: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    cost_if_wrong: str = ""
    held: str = ""
    testable: bool = False
    """Only suspicion speaks against the nodes: a self-test that they pass clears them."""
    origin: Literal["", "straggler"] = ""
    """What it rests on: ``straggler`` ends with the windows that show it; empty is any other reason."""


class AutomationMoved(Record, frozen=True, kw_only=True):
    to: Automation
    by: str
    why: str


class IncidentMarked(Record, frozen=True, kw_only=True):
    """A person has seen an incident, or says that it is part of another one. Changes no machine."""

    incident: IncidentId
    mark: Literal["acked", "merged", "undone"]
    by: str
    why: str
    other: IncidentId | None = None


class InvestigationMoved(Record, frozen=True, kw_only=True):
    """Silent data corruption: what is known, step by step.

    Attributes:
        investigation: its id, derived from the job and a number.
        step: at which it was seen.
        since: committed steps of the newest clean state.
        evidence: new with this move.
        incident: that tells of the corruption, if one was opened.
    """

    investigation: str
    to: InvestigationState
    by: str
    why: str
    ranks: tuple[Rank, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    tensor: str = ""
    step: int = 0
    since: int = 0
    probability: float = 0.0
    evidence: tuple[str, ...] = ()
    incident: IncidentId | None = None


class StragglerNoted(Record, frozen=True, kw_only=True):
    """Ranks are slow, or not any more (``over``), and why; nobody is evicted by this record.

    Attributes:
        cause: ``data``, ``gc``, ``save`` (snapshots), ``starved`` (no processor), ``input``, ``work`` (its own),
            ``pipeline``: no machine is guilty. ``thermal``, ``link``, ``node``, ``device``: one is.
        slowdown: of the whole job: 1.2 is a fifth longer than without them.
        peer: the other node of a slow pair.
    """

    cause: str
    ranks: tuple[Rank, ...]
    nodes: tuple[NodeId, ...]
    slowdown: float
    probability: float
    why: str
    evidence: tuple[str, ...] = ()
    peer: NodeId | None = None
    over: bool = False


AnyRecord = (
    Observed
    | JobMoved
    | NodeMoved
    | StandbyMoved
    | IncidentOpened
    | IncidentMoved
    | SuspectNamed
    | PlanMade
    | EpochOpened
    | Ordered
    | DeadlineSet
    | Noted
    | IncidentMeasured
    | ProposalMoved
    | AutomationMoved
    | IncidentMarked
    | InvestigationMoved
    | StragglerNoted
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: AnyRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> AnyRecord:
    """Raises ``msgspec.ValidationError`` when ``data`` is not a record of this schema."""
    return _decoder.decode(data)
