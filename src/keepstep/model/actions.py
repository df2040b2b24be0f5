"""Actions: what the mind orders. Each is idempotent, fenced by an epoch and named by a derived id.

An agent that is given an action it has already carried out answers ``ActionDone`` at once; one that carries an
epoch older than the newest it has accepted is refused with ``ActionFailed``.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from keepstep.model.ids import ActionId, Epoch, IncidentId, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Roster


class Action(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all actions; ``node`` is the agent that has to carry it out."""

    id: ActionId
    job: JobId
    epoch: Epoch
    node: NodeId


class Join(Action, frozen=True, kw_only=True):
    """Bring this node into the roster's epoch.

    The agent starts the processes of seats whose slot it does not have yet (``slot`` is chosen by the mind for a
    cold start: ``r<rank>e<epoch>``), hands parked standbys their rank, passes the roster to survivors (which
    abort their communicators first), and kills processes of the job that have no seat.
    With mode ``restart`` every old worker process is killed before the new ones start.
    """

    roster: Roster


class KillProcess(Action, frozen=True, kw_only=True):
    """SIGKILL at once: the verdict stands, waiting would only cost the others time."""

    slot: SlotId
    why: str


class KeepStandbys(Action, frozen=True, kw_only=True):
    """Keep ``count`` warm processes parked on this node from now on, refilling after each use."""

    count: int


class StopJob(Action, frozen=True, kw_only=True):
    """End the job on this node: SIGTERM, then SIGKILL after ``grace_s``; then leave with ``code``."""

    code: int
    why: str
    grace_s: float = 10.0
    category: str = "none"
    """``none`` (finished or stopped by a person), ``infrastructure``, ``user_code``, ``unknown``: for exit.json."""
    incident: IncidentId | None = None
    step: int = 0
    """Last step that every rank had committed."""


class InjectFault(Action, frozen=True, kw_only=True):
    """Carry out a fault that a person asked for."""

    fault: Literal["kill", "freeze", "node-loss", "store-loss", "exception", "slow"]
    rank: Rank | None = None
    seconds: float = 0.0


class TakeStacks(Action, frozen=True, kw_only=True):
    """Look into the processes of these ranks and report ``StacksTaken``. Changes nothing."""

    ranks: tuple[Rank, ...]
    request: int
    why: str
    native: bool = False


EXAMINATIONS = 1_000_000
"""Requests from here on belong to nodes that are out on suspicion, those below to investigations."""


class SelfTest(Action, frozen=True, kw_only=True):
    """Examine this node and report ``SelfTestDone``: work whose result is known from ``seed``.

    Attributes:
        test: ``gemm`` (integer-valued matrix products), ``memory``, or another name that ``keepstep.probes`` knows.
        seed: the same one on two nodes makes their digests comparable.
        seconds: budget; at least one round is done.
        share: of the node's processors that it may take while ranks train there.
    """

    test: str
    request: int
    seed: int
    seconds: float
    why: str
    share: float = 1.0


class TaintCheckpoints(Action, frozen=True, kw_only=True):
    """Mark what this node keeps of steps after ``since`` as tainted: not to be restored from unless a person says so.

    Attributes:
        since: committed steps of the newest state that is known to be clean.
        until: committed steps of the newest state that may be tainted.
        before: what was written after this time (Unix, nanoseconds) is of steps that were done again, and stays
            unmarked; 0 marks all of them.
        clear: take the mark away again; the investigation found nothing.
    """

    since: int
    until: int
    why: str
    before: int = 0
    clear: bool = False


AnyAction = Join | KillProcess | KeepStandbys | StopJob | InjectFault | TakeStacks | SelfTest | TaintCheckpoints
