"""Broken: what a rank says and waits for when something raised and it may not be its own fault."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from keepstep.model.beat import Phase
from keepstep.model.topology import Roster
from keepstep.model.wire import WorkerBroken, WorkerCannotResume
from keepstep.trainer.exceptions import (
    CannotResume,
    FrameworkUnsupported,
    GroupsUnsupported,
    InjectedFault,
    StateMismatch,
    StateNotPlain,
)

if TYPE_CHECKING:
    from keepstep.trainer.session_torch import Session

WAIT_S = 600.0
"""How long a rank whose collective broke waits to be told the next epoch; covers the wait for a new node."""
WORDS = 500
"""Characters of an error that are passed on."""
_OWN = (CannotResume, StateMismatch, StateNotPlain, FrameworkUnsupported, GroupsUnsupported)


def explained(session: Session, step: int, *, interrupted: bool) -> bool:
    """Whether a newer epoch explains what was raised in ``step``; waits for one if communication is broken."""
    if not interrupted:
        if session.groups.broken is None:
            return False
        session.beat.phase(Phase.RECOVERING)
        session.control.send(WorkerBroken(epoch=session.roster.epoch, step=step, error=session.groups.broken[:WORDS]))
    if session.control.pending is None and not session.control.wait(WAIT_S):
        print(
            f"keepstep: rank {session.rank}: communication broke and nobody opened another epoch within "
            f"{WAIT_S:g} s; giving up",
            file=sys.stderr,
            flush=True,
        )
        return False
    session.beat.freed()
    session.losses.drop()
    return True


def in_recovery(session: Session, roster: Roster, error: Exception, done: int) -> None:
    """Say what went wrong in this epoch and wait for the next; raise where none comes.

    Args:
        done: steps committed.
    """
    if session.control.pending is not None:
        return
    own = isinstance(error, _OWN)
    if own or (session.groups.broken is None and not isinstance(error, (RuntimeError, OSError))):
        why = f"rank {session.rank}: {type(error).__name__}: {error}"[:WORDS]
        session.control.send(WorkerCannotResume(epoch=roster.epoch, why=why))
    else:
        why = session.groups.broken or f"{type(error).__name__}: {error}"
        session.control.send(WorkerBroken(epoch=roster.epoch, step=done, error=why[:WORDS]))
    print(f"keepstep: rank {session.rank}: recovery into {roster.key} failed: {error}", file=sys.stderr, flush=True)
    if not session.control.wait(WAIT_S):
        session.report_failure(error, done)
        raise error


def suffer_injected(session: Session, step: int) -> None:
    """Carry out a fault that a person asked for in this step."""
    control = session.control
    if control.slow_down_s > 0:
        seconds, control.slow_down_s = control.slow_down_s, 0.0
        time.sleep(seconds)
    if control.raise_injected:
        control.raise_injected = False
        raise InjectedFault(f"injected into step {step} of rank {session.rank} on request")
