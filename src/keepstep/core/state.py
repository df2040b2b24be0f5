"""State: what the mind knows of a job, folded from its records and nothing else.

Values inside are frozen; a ``Job`` itself is changed by ``fold`` only, and ``fork`` gives a decision its own copy to
think on. The *board* is the evidence against the present epoch: facts as they came, keyed by the seat they speak
about. It is wiped of everything that a newer epoch has answered.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from keepstep.core.cases import Investigation, Proposal
from keepstep.model.actions import AnyAction
from keepstep.model.facts import (
    CollectiveBroken,
    RankResumed,
    RanksPaced,
    RankStalled,
    RestoreMoved,
    ResumeFailed,
    SelfTestDone,
    SlotState,
    StacksTaken,
    WorkerExited,
    WorkerFrozen,
)
from keepstep.model.ids import NO_EPOCH, ActionId, Epoch, IncidentId, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.records import (
    Automation,
    Category,
    IncidentMeasured,
    IncidentState,
    JobState,
    NodeState,
    Rung,
    StandbyState,
    StragglerNoted,
)
from keepstep.model.topology import JobSpec, Member, Roster

TERMINAL = frozenset({"FINISHED", "FAILED", "STOPPED"})
INCIDENTS_KEPT = 256
"""Closed incidents remembered in memory; the log has them all."""
EVIDENCE_KEPT = 32
"""Lines of evidence per incident."""
USER_FAULTS_KEPT = 16
DEATHS_KEPT = 16
"""Per incident."""
NODE_FAULTS_KEPT = 8
PROPOSALS_KEPT = 64
INVESTIGATIONS_KEPT = 64
HISTORY_KEPT = 64
"""Lines of an investigation that are kept in memory."""
PACES_KEPT = 8
"""Windows of step times per node."""
STORES_REMEMBERED = 4
"""Used stores that are not believed to be new when an agent names them again; agents close older ones."""

ORIGIN = "controller"
"""``Roster.origin`` of the epochs that we open ourselves."""

Link = Literal["up", "broken", "away", "expired", "left"]
"""``broken``: the node's side dropped; ``away``: we were gone ourselves; ``expired``: silent for a whole lease."""

Seat = str
"""``node/slot``: one process, whatever rank it has. Never reused within a job."""


def seat_key(node: NodeId, slot: SlotId) -> Seat:
    return f"{node}/{slot}"


class Store(Struct, frozen=True, kw_only=True):
    host: str
    port: int


class Node(Struct, frozen=True, kw_only=True):
    """One node as its agent described it, and what became of its connection."""

    node: NodeId
    host: str
    boot: str
    peer_port: int
    keeper_port: int
    arrival: int
    node_rank: int | None = None
    rack: str = ""
    wants_standby: bool = False
    epoch: Epoch = NO_EPOCH
    slots: tuple[SlotState, ...] = ()
    link: Link = "up"
    since: Nanos = Nanos(0)
    """When ``link`` took its present value."""
    cut: bool = False
    """The connection broke since the agent last said what it has: only its next ``AgentJoined`` brings it back."""
    health: NodeState = "HEALTHY"
    faulty: bool = False
    """Quarantined for what its processes did, not for being out of reach: coming back proves nothing."""
    faults: tuple[Nanos, ...] = ()

    @property
    def lost(self) -> bool:
        return self.link in ("expired", "left") or self.health == "QUARANTINED"


class Standby(Struct, frozen=True, kw_only=True):
    node: NodeId
    slot: SlotId
    state: StandbyState


class Progress(Struct, frozen=True, kw_only=True):
    """How far one rank has come in one epoch."""

    epoch: Epoch
    joined: bool = False
    resumed: RankResumed | None = None
    advanced: bool = False
    done: bool = False
    step: int = 0
    at: Nanos = Nanos(0)
    """When the rank said its last word, by its node's clock."""


class Saved(Struct, frozen=True, kw_only=True):
    """The newest generation of a durable tier that has been told of."""

    step: int
    at: Nanos
    verified: bool = False
    bytes: int = 0
    seconds: float = 0.0


class Gap(Struct, frozen=True, kw_only=True):
    """A rank without a copy on another node."""

    step: int
    at: Nanos
    why: str


class Mishap(Struct, frozen=True, kw_only=True):
    """Checkpoints that were left out or found damaged in one place, and that nothing newer there has made up for.

    Attributes:
        steps: how many generations it has been, from ``first_step`` to ``step``.
        rank: of the last one, where it was one rank's.
    """

    first_step: int
    step: int
    since: Nanos
    at: Nanos
    steps: int
    rank: Rank | None
    why: str


class UserFault(Struct, frozen=True, kw_only=True):
    """An exception of the user's code that was already blamed for a recovery."""

    incident: IncidentId
    rank: Rank
    signature: str
    step: int | None


class Death(Struct, frozen=True, kw_only=True):
    """Where a process stood when it ended, for which a machine could be to blame."""

    rank: Rank
    node: NodeId
    stack: str


class Incident(Struct, frozen=True, kw_only=True):
    """One incident from its first evidence to its end."""

    id: IncidentId
    number: int
    title: str
    onset: Nanos
    opened: Nanos
    state: IncidentState = "OPEN"
    why: str = ""
    closed: Nanos = Nanos(0)
    located: Nanos = Nanos(0)
    ordered: Nanos = Nanos(0)
    category: Category = "unknown"
    node: NodeId | None = None
    probability: float = 0.0
    reason: str = ""
    suspects: tuple[Rank, ...] = ()
    """Ranks blamed so far, by their rank number; victims are not among them."""
    evidence: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    """Keys of the evidence that a ``SuspectNamed`` has already spoken about."""
    rung: Rung | None = None
    planned: Rung | None = None
    """Rung of a plan that waits for something; a plan made anew does not go below it."""
    plan: str = ""
    attempts: int = 0
    """Epochs opened for this incident."""
    nodes_replaced: int = 0
    replaced: tuple[Rank, ...] = ()
    baseline: Roster | None = None
    """The roster that was struck; survivors are counted against it."""
    epoch: Epoch = NO_EPOCH
    user_faults: int = 0
    measured: IncidentMeasured | None = None
    root_cause: str = ""
    code: str = ""
    similar: tuple[IncidentId, ...] = ()
    leave: NodeId | None = None
    """A living node whose own words prove it broken."""
    pair: tuple[NodeId, ...] = ()
    """Two nodes that do not reach each other."""
    deaths: tuple[Death, ...] = ()
    acked: str = ""
    """Who has seen it."""
    merged: IncidentId | None = None
    """The incident that a person says it is part of."""

    @property
    def open(self) -> bool:
        return self.state not in ("RESOLVED", "ESCALATED")


class Job(Struct, kw_only=True):
    """Everything known about one job."""

    spec: JobSpec
    submitted: Nanos
    state: JobState = "PENDING"
    why: str = ""
    exit_code: int | None = None
    seqs: dict[NodeId, int] = {}
    nodes: dict[NodeId, Node] = {}
    stores: dict[NodeId, Store] = {}
    store_node: NodeId | None = None
    """Where the present epoch's store runs."""
    used_stores: tuple[str, ...] = ()
    standbys: dict[Seat, Standby] = {}
    standby_orders: dict[NodeId, int] = {}
    roster: Roster | None = None
    proven: Roster | None = None
    """The last roster in which every rank had resumed: says where replicas are."""
    epoch: Epoch = NO_EPOCH
    attempt: int = 0
    level: int = 0
    """2 once any worker has called ``keepstep.init``."""
    settled: bool = False
    """Every rank of this generation of processes has resumed once, so in-process recovery has a state to return to."""
    trained: bool = False
    seats: dict[Seat, Rank] = {}
    started: dict[NodeId, bool] = {}
    """Nodes that have carried out the present epoch's Join."""
    deputy_at: Nanos = Nanos(0)
    """When a deputy opened the present epoch, by its clock; 0 when it was us."""
    progress: dict[Rank, Progress] = {}
    joined: int = 0
    resumed: int = 0
    advanced: int = 0
    done: int = 0
    clean: int = 0
    step: int = 0
    """Steps that every rank is known to have committed."""
    exits: dict[Seat, WorkerExited] = {}
    frozen: dict[Seat, WorkerFrozen] = {}
    stalled: dict[Rank, RankStalled] = {}
    broken: dict[Rank, CollectiveBroken] = {}
    cannot: dict[Rank, ResumeFailed] = {}
    stacks: dict[NodeId, StacksTaken] = {}
    """By node: where its processes stood when that was last looked at."""
    looked: tuple[IncidentId | None, Epoch] = (None, NO_EPOCH)
    """For which incident, in which epoch, the stacks were last ordered."""
    restoring: dict[NodeId, RestoreMoved] = {}
    """By node: the last word of ranks that bring their state in the present epoch."""
    refused: dict[NodeId, str] = {}
    """Nodes that could not carry out the present epoch's Join, and why."""
    condemned: dict[Seat, str] = {}
    """Processes that were ordered to be killed: their seats are vacant whatever they report from now on."""
    incidents: dict[IncidentId, Incident] = {}
    incident_count: int = 0
    current: IncidentId | None = None
    user_faults: tuple[UserFault, ...] = ()
    orders: dict[ActionId, AnyAction] = {}
    """Orders without an answer; the newest epoch's only."""
    order_count: int = 0
    saved: dict[str, Saved] = {}
    """By tier: ``remote``, or ``local/NODE`` for each node's own disk."""
    gaps: dict[Rank, Gap] = {}
    mishaps: dict[str, Mishap] = {}
    """By what happened (``skipped``, ``damaged``), where (``remote``, or a node's ``local/NODE``, ``memory/NODE``)."""
    pace: str = ""
    """How the steps between snapshots were last chosen, in words; empty while they are as the job asked."""
    deadlines: dict[str, Nanos] = {}
    automation: Automation | None = None
    """What a person has set; the policy's mode where nobody has."""
    thawed: Automation | None = None
    """What it was before it was frozen, and will be again."""
    proposals: dict[str, Proposal] = {}
    proposal_count: int = 0
    evicted: dict[NodeId, Nanos] = {}
    """Living nodes that were taken out, and when."""
    investigations: dict[str, Investigation] = {}
    investigation_count: int = 0
    examined: dict[NodeId, Nanos] = {}
    """When a node that is out on suspicion was last ordered to examine itself."""
    selftests: dict[NodeId, SelfTestDone] = {}
    """By node: the last time that it examined itself."""
    paces: dict[NodeId, tuple[RanksPaced, ...]] = {}
    """By node: the newest windows of the present epoch, oldest first."""
    stragglers: dict[str, StragglerNoted] = {}
    """By cause and ranks: those that are slow now."""

    def fork(self) -> Job:
        """A copy that can be changed without changing this one; costs a shallow copy of each table."""
        copy = msgspec.structs.replace(self)
        for name in _TABLES:
            setattr(copy, name, dict(getattr(copy, name)))
        return copy

    @property
    def id(self) -> JobId:
        return self.spec.job

    @property
    def over(self) -> bool:
        return self.state in TERMINAL

    @property
    def incident(self) -> Incident | None:
        """The open incident, if there is one."""
        return self.incidents[self.current] if self.current else None

    def seat_of(self, rank: Rank) -> Member:
        """The present roster's seat of ``rank``; rosters are sorted, so this is one look."""
        assert self.roster is not None
        return self.roster.members[rank]

    def rank_at(self, node: NodeId, slot: SlotId) -> Rank | None:
        return self.seats.get(seat_key(node, slot))

    def in_roster(self, node: NodeId) -> bool:
        return self.roster is not None and any(place.node == node for place in self.roster.places)

    def ahead(self) -> Epoch:
        """The newest epoch that any node has accepted; above ``epoch`` when a deputy acted in our absence.

        Lost nodes do not count: what they accepted is a minor of an epoch of ours, below the next one that we open.
        """
        return Epoch(max([self.epoch, *(node.epoch for node in self.nodes.values() if not node.lost)]))


_TABLES = tuple(field.name for field in msgspec.structs.fields(Job) if field.default_factory is dict)
