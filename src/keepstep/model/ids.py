"""Names of things, and how one name is derived from another.

No id is random: a log that is folded twice, or a decision that is made twice, yields the same names. That is
what makes every order safe to repeat.
"""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
SlotId = NewType("SlotId", str)
"""One process place on a node: ``s0``, ``s1``, ... in the order the agent made them; never reused within a job."""
IncidentId = NewType("IncidentId", str)
ActionId = NewType("ActionId", str)
Rank = NewType("Rank", int)
Nanos = NewType("Nanos", int)
"""Nanoseconds since the Unix epoch, on the clock of whoever wrote the value down."""

Epoch = NewType("Epoch", int)
"""Fencing token of a job: which roster of processes is entitled to train.

Packed as ``major << 16 | minor``. The controller opens majors, an agent that acts for an absent controller opens
minors of the current major. So the two can never open the same epoch, and a plain integer comparison orders both.
"""

MINOR_BITS = 16
NO_EPOCH = Epoch(0)


def next_major(epoch: Epoch) -> Epoch:
    """The epoch a controller opens after ``epoch``."""
    return Epoch(((epoch >> MINOR_BITS) + 1) << MINOR_BITS)


def next_minor(epoch: Epoch) -> Epoch:
    """The epoch a deputy agent opens after ``epoch`` while the controller is away."""
    return Epoch(epoch + 1)


def show_epoch(epoch: Epoch) -> str:
    """``3`` for a controller's epoch, ``3.1`` for the first one a deputy opened after it."""
    major, minor = epoch >> MINOR_BITS, epoch & ((1 << MINOR_BITS) - 1)
    return f"{major}.{minor}" if minor else f"{major}"


def incident_id(job: JobId, number: int) -> IncidentId:
    """The ``number``-th incident (from 1) of a job."""
    return IncidentId(f"{job}-i{number}")


def action_id(owner: str, step: str, attempt: int) -> ActionId:
    """Id of an order: who it belongs to (incident or job), which step of the protocol, which attempt.

    An order to several nodes carries one id per node; put the node into ``step``.
    """
    return ActionId(f"{owner}/{step}/{attempt}")
