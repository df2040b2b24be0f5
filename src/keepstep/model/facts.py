"""Facts: what somebody observed. A fact is never a conclusion and never an order.

Every fact carries the job, the observer's time and, where there is one, the node. The union is closed; code that
handles facts uses ``match`` with ``assert_never``.
"""

from __future__ import annotations

from keepstep.model.fact import Fact, SlotState, UserError
from keepstep.model.facts_noted import CheckpointNoted, GuardNoted, RanksPaced, SelfTestDone, StacksTaken
from keepstep.model.facts_people import (
    InjectRequested,
    JobSubmitted,
    OperatorSaid,
    StacksRequested,
    StopRequested,
    Verb,
)
from keepstep.model.ids import ActionId, Epoch, Rank, SlotId
from keepstep.model.topology import Roster

__all__ = [
    "ActionDone",
    "ActionFailed",
    "AgentDisconnected",
    "AgentJoined",
    "AgentLeft",
    "AnyFact",
    "CheckpointNoted",
    "CollectiveBroken",
    "Fact",
    "GuardNoted",
    "InjectRequested",
    "JobSubmitted",
    "LeaseExpired",
    "LeaseRenewed",
    "OperatorSaid",
    "RankAdvanced",
    "RankDone",
    "RankJoined",
    "RankResumed",
    "RankStalled",
    "RanksPaced",
    "RecoveredLocally",
    "RestoreMoved",
    "ResumeFailed",
    "SdkAttached",
    "SelfTestDone",
    "SlotState",
    "StacksRequested",
    "StacksTaken",
    "StallEnded",
    "StandbyGone",
    "StandbyReady",
    "StopRequested",
    "StoreLost",
    "StoreReady",
    "TimePassed",
    "UserError",
    "Verb",
    "WorkerExited",
    "WorkerFrozen",
]


# ---------------------------------------------------------------- the controller itself


class TimePassed(Fact, frozen=True, kw_only=True):
    """The instant that ``Controller.next_deadline`` asked to be woken at has come."""


# ---------------------------------------------------------------- nodes


class AgentJoined(Fact, frozen=True, kw_only=True):
    """An agent connected: for the first time, after its own restart, or after the controller's."""

    host: str
    boot: str
    """Changes whenever the agent process is a new one."""
    peer_port: int
    keeper_port: int
    node_rank: int | None = None
    rack: str = ""
    """Fault domain beyond the node; empty where it is not known."""
    wants_standby: bool = False
    """Started as a standby node rather than as one of the job's first nodes."""
    epoch: Epoch = Epoch(0)
    """The newest epoch this node has accepted."""
    slots: tuple[SlotState, ...] = ()
    version: str = ""


class AgentDisconnected(Fact, frozen=True, kw_only=True):
    """The connection broke. The node may be gone, or only its agent; the lease decides."""

    why: str
    ours: bool = False
    """True when it was the controller that went away (it says so for every node its log shows as connected when it
    starts again): proves nothing about the node, only the lease counts."""


class LeaseExpired(Fact, frozen=True, kw_only=True):
    silent_s: float


class LeaseRenewed(Fact, frozen=True, kw_only=True):
    """A node whose lease had expired, or whose connection had broken, speaks again."""


class AgentLeft(Fact, frozen=True, kw_only=True):
    """The agent shut down in good order (its user pressed ctrl-C, its scheduler ended it)."""

    why: str


class StoreReady(Fact, frozen=True, kw_only=True):
    """A rendezvous store that no epoch has used yet waits on this node."""

    host: str
    port: int


class StoreLost(Fact, frozen=True, kw_only=True):
    why: str


# ---------------------------------------------------------------- processes


class SdkAttached(Fact, frozen=True, kw_only=True):
    """A worker called ``keepstep.init``: from now on this job can recover in process (level 2)."""

    slot: SlotId
    version: str


class StandbyReady(Fact, frozen=True, kw_only=True):
    """A warm process is parked in ``keepstep.init``: imports done, waiting for a rank."""

    slot: SlotId


class StandbyGone(Fact, frozen=True, kw_only=True):
    slot: SlotId
    why: str


class WorkerExited(Fact, frozen=True, kw_only=True):
    """A worker process ended.

    ``code`` is the exit code, ``None`` when ``signal`` ended it or when nobody was left to reap it.
    """

    slot: SlotId
    rank: Rank
    epoch: Epoch
    code: int | None = None
    signal: int | None = None
    stderr_tail: tuple[str, ...] = ()
    first_error: tuple[str, ...] = ()
    """The first lines of the process' output that told of an error: causes come early, echoes late."""
    error: UserError | None = None
    killed_by_us: bool = False
    """The agent itself ended it, on an order or after a verdict; not a new fault."""


class WorkerFrozen(Fact, frozen=True, kw_only=True):
    """The kernel says the process is stopped (state T) or stuck in uninterruptible sleep (D) for too long."""

    slot: SlotId
    rank: Rank
    epoch: Epoch
    state: str
    for_s: float


class RankStalled(Fact, frozen=True, kw_only=True):
    """No progress for longer than the job's own step times allow. Says where the rank stands, not who is guilty.

    Attributes:
        phase: what the rank said it was doing (``Phase`` in ``model.beat``).
        started, finished: collectives launched and completed so far; equal means it is not inside one.
        busy: share of one core used since the last look; a spinning process is near 1, a waiting one near 0.
    """

    slot: SlotId
    rank: Rank
    epoch: Epoch
    step: int
    phase: str
    started: int
    finished: int
    proc_state: str
    busy: float
    idle_s: float
    limit_s: float


class StallEnded(Fact, frozen=True, kw_only=True):
    """A rank that had been reported as stalled moved again by itself."""

    slot: SlotId
    rank: Rank
    epoch: Epoch


class CollectiveBroken(Fact, frozen=True, kw_only=True):
    """A survivor's collective raised. Evidence that *somebody* is gone; says nothing about who."""

    rank: Rank
    epoch: Epoch
    step: int
    error: str


class RankJoined(Fact, frozen=True, kw_only=True):
    """The rank's communicators for this epoch stand."""

    rank: Rank
    epoch: Epoch
    ms: float


class RestoreMoved(Fact, frozen=True, kw_only=True):
    """Ranks of this node bring their state from somewhere, and bytes of it have arrived since this was said last.

    Attributes:
        ranks: those that are still at it; none of them any more in the last one.
        bytes: that these processes have brought so far in this epoch.
    """

    epoch: Epoch
    ranks: tuple[Rank, ...]
    bytes: int


class RankResumed(Fact, frozen=True, kw_only=True):
    """The rank holds the agreed state and is about to train.

    Attributes:
        step: the number of committed steps it resumes from; 0 on a first start.
        newest: the newest step any rank had committed when the fault struck.
        source: where this rank's state came from: ``initial``, ``live``, ``local``, ``peer``, ``saved`` or ``replica``.
        phases: milliseconds spent per phase (``abort``, ``reset``, ``swap``, ``agree``, ``restore``).
    """

    rank: Rank
    epoch: Epoch
    step: int
    newest: int
    source: str
    phases: dict[str, float]


class RankAdvanced(Fact, frozen=True, kw_only=True):
    """The first commit after a resume: the rank has done one new step."""

    rank: Rank
    epoch: Epoch
    step: int


class RankDone(Fact, frozen=True, kw_only=True):
    """The training loop is complete on this rank; what follows is the script's epilogue."""

    rank: Rank
    epoch: Epoch
    step: int


class ResumeFailed(Fact, frozen=True, kw_only=True):
    """In-process recovery cannot work here (no common step, unsupported layout); ask for a higher rung."""

    rank: Rank
    epoch: Epoch
    why: str


# ---------------------------------------------------------------- orders coming back


class ActionDone(Fact, frozen=True, kw_only=True):
    action: ActionId


class ActionFailed(Fact, frozen=True, kw_only=True):
    action: ActionId
    why: str


class RecoveredLocally(Fact, frozen=True, kw_only=True):
    """While no controller answered, a deputy agent opened a minor epoch by itself."""

    roster: Roster
    cause: WorkerExited | WorkerFrozen
    why: str


AnyFact = (
    JobSubmitted
    | StopRequested
    | InjectRequested
    | StacksRequested
    | OperatorSaid
    | TimePassed
    | AgentJoined
    | CheckpointNoted
    | GuardNoted
    | AgentDisconnected
    | LeaseExpired
    | LeaseRenewed
    | AgentLeft
    | StoreReady
    | StoreLost
    | SdkAttached
    | StandbyReady
    | StandbyGone
    | WorkerExited
    | WorkerFrozen
    | RankStalled
    | StallEnded
    | StacksTaken
    | RanksPaced
    | SelfTestDone
    | CollectiveBroken
    | RankJoined
    | RestoreMoved
    | RankResumed
    | RankAdvanced
    | RankDone
    | ResumeFailed
    | ActionDone
    | ActionFailed
    | RecoveredLocally
)
