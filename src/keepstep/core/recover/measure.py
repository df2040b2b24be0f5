"""Measure: what a closed incident took and cost, from the records that closed it (METRICS in the docs)."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.core.state import Incident, Job
from keepstep.model.ids import Nanos
from keepstep.model.records import IncidentMeasured

_MS = 1_000_000


def resolve(draft: Draft, why: str) -> None:
    """Close the open incident, with its numbers as of now."""
    measured = measure(draft)
    draft.move_incident("RESOLVED", why)
    draft.emit(measured)


def measure(draft: Draft) -> IncidentMeasured:
    job, incident = draft.job, draft.incident
    located, ordered, end = incident.located or draft.now, incident.ordered or draft.now, draft.now
    opened = incident.opened
    if job.deputy_at and job.epoch == incident.epoch:
        # It was over before we knew: the deputy's and the ranks' own words tell how long it took.
        opened = located = min(incident.onset, job.deputy_at)
        ordered, end = job.deputy_at, Nanos(max(seen.at for seen in job.progress.values()))
    kept, possible = survivors(job, incident)
    return IncidentMeasured(
        job=job.id,
        at=draft.now,
        incident=incident.id,
        detect_ms=_span(incident.onset, opened),
        locate_ms=_span(opened, located),
        decide_ms=_span(located, ordered),
        recover_ms=_span(ordered, end),
        phases=phases(job) if incident.attempts else {},
        survivors_kept=kept,
        survivors_possible=possible,
        steps_lost=steps_lost(job) if incident.attempts else 0,
        replaced=incident.replaced,
    )


def survivors(job: Job, incident: Incident) -> tuple[int, int]:
    """Processes that lived through, of those that could have: all but the ones that were blamed."""
    if incident.baseline is None or job.roster is None:
        return 0, 0
    now = {(member.node, member.slot) for member in job.roster.members}
    could = [member for member in incident.baseline.members if member.rank not in incident.suspects]
    return sum((member.node, member.slot) in now for member in could), len(could)


def phases(job: Job) -> dict[str, float]:
    """Per phase the slowest rank: the others wait for it."""
    slowest: dict[str, float] = {}
    for seen in job.progress.values():
        if seen.epoch == job.epoch and seen.resumed is not None:
            for name, ms in seen.resumed.phases.items():
                slowest[name] = max(ms, slowest.get(name, 0.0))
    return slowest


def steps_lost(job: Job) -> int:
    """Steps that all ranks had committed and that have to be done again.

    ``newest`` is the newest step that *any* rank had: a step that only some had committed was not complete, so one
    step of difference loses nothing.
    """
    resumed = [seen.resumed for seen in job.progress.values() if seen.epoch == job.epoch and seen.resumed is not None]
    if not resumed:
        return 0
    return max(0, max(r.newest for r in resumed) - min(r.step for r in resumed) - 1)


def _span(start: int, end: int) -> float:
    return round(max(0, end - start) / _MS, 3)
