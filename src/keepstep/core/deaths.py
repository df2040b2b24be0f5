"""Deaths: what two ends of a process have in common when their cause is the same."""

from __future__ import annotations

import re

from keepstep.model.facts import UserError, WorkerExited

STACK_FRAMES = 12
"""Innermost frames by which two stacks are compared."""
_FRAME = re.compile(r'File "([^"]{1,400})", line (\d{1,9})')
_FROM_OUTSIDE = frozenset({1, 2, 7, 9, 15})
"""Signals that no line of code sends to itself: what stands in the output beside them is not where it ended."""


def signature(exit_: WorkerExited) -> str:
    """What two failures of the same cause have in common."""
    error: UserError | None = exit_.error
    return error.signature if error else stack_of(exit_) or _how(exit_)


def stack_of(fact: WorkerExited) -> str:
    """Where a process was when it died, by its own words (a traceback, or faulthandler's); empty if unknown."""
    if fact.signal in _FROM_OUTSIDE:
        return ""
    found = [match for line in (*fact.first_error, *fact.stderr_tail) for match in _FRAME.finditer(line)]
    places = list(dict.fromkeys(f"{match[1]}:{match[2]}" for match in found))[-STACK_FRAMES:]
    return f"{_how(fact)} at {' < '.join(places)}" if places else ""


def _how(fact: WorkerExited) -> str:
    return f"signal {fact.signal}" if fact.signal else f"exit code {fact.code}"
