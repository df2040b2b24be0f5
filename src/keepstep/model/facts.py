"""Facts: what somebody observed. A fact is never a conclusion and never an order.

Every fact carries the job, the observer's time and, where there is one, the node. The union is closed; code that
handles facts uses ``match`` with ``assert_never``.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from keepstep.model.ids import ActionId, Epoch, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.stacks import ProcessStacks
from keepstep.model.topology import JobSpec, Roster


class Fact(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all facts.

    Attributes:
        at: when it happened, by the observer's clock.
        node: the observing node; empty for the controller's own facts and for people.
        seq: the agent's report number, from 1, never reused by a node within a job; 0 for the controller's own facts.
            The mind ignores a report whose number it has already folded, so re-sending is harmless.
    """

    job: JobId
    at: Nanos
    node: NodeId = NodeId("")
    seq: int = 0


class UserError(Struct, frozen=True, kw_only=True):
    """An exception that left the user's code, as the SDK or the launcher stub saw it."""

    type: str
    message: str
    file: str = ""
    line: int = 0
    function: str = ""
    step: int | None = None
    traceback: tuple[str, ...] = ()
    consequence: bool = False
    """True when the exception followed an aborted or broken collective: a victim, not a culprit."""

    @property
    def signature(self) -> str:
        """Equal for two exceptions of the same type raised at the same place."""
        return f"{self.type}@{self.file}:{self.line}"


class SlotState(Struct, frozen=True, kw_only=True):
    """One live process as a (re-)joining agent found it."""

    slot: SlotId
    pid: int
    role: Literal["worker", "standby"]
    rank: Rank | None = None
    epoch: Epoch = Epoch(0)
    parked: bool = False


# ---------------------------------------------------------------- people and the controller itself


class JobSubmitted(Fact, frozen=True, kw_only=True):
    spec: JobSpec


class StopRequested(Fact, frozen=True, kw_only=True):
    by: str
    why: str


class InjectRequested(Fact, frozen=True, kw_only=True):
    """A person asked for a fault (chaos test). Refused unless the job was started with ``--allow-inject``."""

    fault: Literal["kill", "freeze", "node-loss", "controller-loss", "store-loss", "exception", "slow"]
    by: str
    rank: Rank | None = None
    target: NodeId | None = None
    seconds: float = 0.0
    number: int = 0


class StacksRequested(Fact, frozen=True, kw_only=True):
    """A person asked where the processes of a job stand.

    Attributes:
        ranks: only these; all where empty.
        native: frames of C and C++ libraries, too; every process is stopped for a moment then.
        number: names the request; the answers carry it.
    """

    by: str
    ranks: tuple[Rank, ...] = ()
    native: bool = False
    number: int = 0


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


class CheckpointNoted(Fact, frozen=True, kw_only=True):
    """Something happened to a checkpoint that the story of a job should tell; nothing is decided upon it.

    ``saved``: a generation is complete in ``tier``. ``verified``: it has been read back and matches its checksums.
    ``skipped``: it was due, and could not be written. ``damaged``: a copy did not match its checksum, another holder
    was used. ``gap``: a rank has had no replica for longer than a step. ``closed``: it has one again. ``interval``: the
    steps between snapshots were chosen anew. ``expired``: retention removed it. ``restored``: a rank's state came from
    ``tier``.
    """

    what: Literal["saved", "verified", "skipped", "damaged", "gap", "closed", "interval", "expired", "restored"]
    tier: Literal["memory", "peer", "local", "remote"]
    step: int
    rank: Rank | None = None
    why: str = ""
    bytes: int = 0
    seconds: float = 0.0


class GuardNoted(Fact, frozen=True, kw_only=True):
    """The SDK's guard saw something in the numbers of training, or did something about it; nothing is decided upon it.

    ``nonfinite``: a loss or gradient is NaN or infinite. ``spike``: one is far outside its recent past. ``replicas``:
    ranks that must hold the same do not. ``rolled_back``: an older state was put back on all ranks. ``skipped``: an
    update was left out. ``gone``: the step came out well when it was done again. ``kept``: a copy to go back to is kept
    from now on. ``alone``: there are no replicas to compare.

    Attributes:
        step: index of the step, from 0.
        ranks: those it was seen on; empty where nobody can be named.
        tensor: the first parameter or optimizer tensor concerned.
        since: committed steps of the newest state that is known to be clean; what was saved of later ones is tainted.
    """

    what: Literal["nonfinite", "spike", "replicas", "rolled_back", "skipped", "gone", "kept", "alone"]
    step: int
    why: str
    ranks: tuple[Rank, ...] = ()
    tensor: str = ""
    since: int | None = None


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


class StacksTaken(Fact, frozen=True, kw_only=True):
    """Where the processes of this node's ranks stood, all within a few seconds."""

    epoch: Epoch
    request: int
    processes: tuple[ProcessStacks, ...]


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
