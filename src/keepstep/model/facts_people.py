"""Facts of people: what somebody asked for."""

from __future__ import annotations

from typing import Literal

from keepstep.model.fact import Fact
from keepstep.model.ids import NodeId, Rank
from keepstep.model.topology import JobSpec


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


Verb = Literal[
    "ack", "approve", "reject", "undo", "merge", "freeze", "thaw", "mode", "sdc-open", "sdc-step", "sdc-close"
]


class OperatorSaid(Fact, frozen=True, kw_only=True):
    """A person decided something. Whether it can be done is for the mind to say; the answer is in the log.

    ``ack``: somebody has seen the incident. ``approve``, ``reject``: a proposal. ``undo``: take back what was done
    (a node that went comes back). ``merge``: ``subject`` is part of ``other``. ``freeze``, ``thaw``: all automation of
    the job. ``mode``: what automation may do from now on. ``sdc-open``, ``sdc-step``, ``sdc-close``: an investigation
    of silent data corruption.

    Attributes:
        subject: incident, proposal, investigation or node that it is about; empty where it is about the whole job.
        other: what it is merged into; the mode; the state that an investigation is moved to.
        ranks: that a new investigation suspects.
        number: names the request.
    """

    verb: Verb
    by: str
    subject: str = ""
    other: str = ""
    ranks: tuple[Rank, ...] = ()
    why: str = ""
    number: int = 0
