"""Facts about how training goes: checkpoints, numbers, pace, stacks, self-tests."""

from __future__ import annotations

from typing import Literal

from keepstep.model.fact import Fact
from keepstep.model.ids import Epoch, Rank
from keepstep.model.pace import NodePace, RankPace
from keepstep.model.position import Link, RankPosition
from keepstep.model.stacks import ProcessStacks


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
    """The SDK's guard saw something in the numbers of training, or did something about it.

    ``nonfinite``: a loss or gradient is NaN or infinite. ``spike``: one is far outside its recent past. ``replicas``:
    ranks that must hold the same do not. ``rolled_back``: an older state was put back on all ranks. ``skipped``: an
    update was left out. ``gone``: the step came out well when it was done again. ``kept``: a copy to go back to is kept
    from now on. ``alone``: there are no replicas to compare. ``judged``: the step was done again with the same input,
    and ``verdict`` says what kind of fault it was. ``quarantined``: batches are left out from now on.

    Attributes:
        step: index of the step, from 0.
        ranks: those it was seen on; empty where nobody can be named.
        tensor: the first parameter or optimizer tensor concerned.
        since: committed steps of the newest state that is known to be clean; what was saved of later ones is tainted.
    """

    what: Literal[
        "nonfinite",
        "spike",
        "replicas",
        "rolled_back",
        "skipped",
        "gone",
        "kept",
        "alone",
        "judged",
        "quarantined",
    ]
    step: int
    why: str
    ranks: tuple[Rank, ...] = ()
    tensor: str = ""
    since: int | None = None
    verdict: Literal["", "data", "software", "transient", "hardware"] = ""
    batches: tuple[str, ...] = ()
    """Ids of the batches concerned, as the data position names them."""
    others: tuple[Rank, ...] = ()
    """Ranks that did the same work and came to another result than ``ranks``."""


class StacksTaken(Fact, frozen=True, kw_only=True):
    """Where the processes of this node's ranks stood, all within a few seconds.

    Attributes:
        positions: of the ranks that tell them; none without ``keepstep.init`` in the script.
        links: connections that get no answer.
        addresses: this node's, as the connections of its ranks use them.
    """

    epoch: Epoch
    request: int
    processes: tuple[ProcessStacks, ...]
    positions: tuple[RankPosition, ...] = ()
    links: tuple[Link, ...] = ()
    addresses: tuple[str, ...] = ()


class RanksPaced(Fact, frozen=True, kw_only=True):
    """How the steps of this node's ranks went in one window (``Policy.pace_window_s``); a roll-up of heartbeats.

    Attributes:
        window: number of the window since the epoch's begin, from 1.
        seconds: its length.
    """

    epoch: Epoch
    window: int
    seconds: float
    ranks: tuple[RankPace, ...]
    machine: NodePace = NodePace()


class SelfTestDone(Fact, frozen=True, kw_only=True):
    """A node has examined itself.

    Attributes:
        request: of the order.
        passed: ``None`` where the test could not be made; ``why`` says why.
        digest: of the result; equal seeds give equal digests on healthy machines.
        rounds: how often the test was done.
        failed: names of the tests that failed, with what they expected and got.
    """

    request: int
    test: str
    passed: bool | None
    why: str = ""
    digest: str = ""
    rounds: int = 0
    seconds: float = 0.0
    failed: tuple[str, ...] = ()
