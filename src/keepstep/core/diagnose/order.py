"""What came first, by clocks that may disagree, and what was over long before."""

from __future__ import annotations

from msgspec.structs import replace

from keepstep.core.diagnose.cause import Cause
from keepstep.core.diagnose.observe import Finding, Log

ENOUGH = 0.34
"""Weight below which a candidate is a consequence of something that the log does not show."""
EARLIEST = 0.05
"""Bonus of the candidate that was seen first."""
TWO_DAYS_S = 2 * 86400.0
STALE_S = 6 * 3600.0
"""Seconds before the last trouble, after which a fault is history and not the cause."""


def recent(causes: list[Cause]) -> list[Cause]:
    """Old faults weigh little beside fresh ones: the job ran on after them."""
    last = {
        id(cause): max((one.time for one in cause.findings if one.time is not None), default=None) for cause in causes
    }
    known = [time for time in last.values() if time is not None]
    if not known or _mixed(known):
        return causes
    end = max(known)
    return [
        replace(cause, weight=cause.weight - 0.4, why="it was over long before")
        if (time := last[id(cause)]) is not None and end - time > STALE_S
        else cause
        for cause in causes
    ]


def put_first(causes: list[Cause], log: Log) -> list[Cause]:
    """Prefer what was seen first: by corrected time where every candidate tells one, else by place in the log.

    A lead over another node that is smaller than what their clocks may differ by is no lead.
    """
    serious = [cause for cause in causes if cause.weight >= ENOUGH]
    if len(serious) < 2:
        return causes
    leads = [cause.findings[0] for cause in serious]
    times = _times(leads, log)
    if times:
        first = serious[times.index(min(times))]
        node = first.findings[0].node
        if any(
            at - min(times) < log.clocks.tolerance(node, one.node)
            for at, one in zip(times, leads, strict=True)
            if one.node != node
        ):
            return causes
    else:
        first = min(serious, key=lambda cause: cause.findings[0].number)
    return [replace(cause, weight=cause.weight + EARLIEST) if cause is first else cause for cause in causes]


def _times(findings: list[Finding], log: Log) -> list[float]:
    """Corrected times of all of them; none where one does not tell its time."""
    times = [log.clocks.corrected(one.node, one.time) for one in findings if one.time is not None]
    return times if len(times) == len(findings) and not _mixed(times) else []


def _mixed(times: list[float]) -> bool:
    """Whether some tell a date and others only a time of day."""
    return min(times, default=0.0) < TWO_DAYS_S < max(times, default=0.0)


def earliest_first(findings: list[Finding], log: Log) -> list[Finding]:
    """The findings with the one in front that came first, whatever order their files were read in."""
    times = _times(findings, log)
    if not times:
        return findings
    first = times.index(min(times))
    if times[0] - times[first] <= log.clocks.tolerance(findings[0].node, findings[first].node):
        return findings
    return [findings[first], *findings[:first], *findings[first + 1 :]]
