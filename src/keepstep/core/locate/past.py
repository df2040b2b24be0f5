"""Past: a job's own incidents as cases, so that a new one can be compared with them."""

from __future__ import annotations

from keepstep.core.diagnose.named import place_of
from keepstep.core.diagnose.similar import Case, Match, Past, similar
from keepstep.core.locate.faults import Fault
from keepstep.core.state import Incident, Job
from keepstep.model.ids import IncidentId


def alike(job: Job, fault: Fault) -> tuple[IncidentId, ...]:
    """Earlier incidents of this job that are like a new fault, newest first."""
    if fault.victim:
        return ()
    exit_ = job.exits.get(fault.key)
    error = exit_.error if exit_ is not None else None
    case = Case(
        cause=fault.root_cause.partition(":")[0],
        code=fault.code,
        place=_place(error.signature) if error is not None else "",
        node=fault.node or "",
    )
    return tuple(IncidentId(match.past.id) for match in similar(case, _earlier(job, None)))


def matches(job: Job, incident: Incident) -> tuple[Match, ...]:
    """The same for an incident that has been named already, with what was done about the others."""
    return similar(_case(job, incident), _earlier(job, incident))


def _earlier(job: Job, before: Incident | None) -> list[Past]:
    return [
        past_of(job, one)
        for one in job.incidents.values()
        if one.id != job.current and (before is None or one.number < before.number)
    ]


def past_of(job: Job, incident: Incident) -> Past:
    """An incident of this job, as others remember it."""
    measured = incident.measured
    took = None
    if measured is not None:
        took = (measured.detect_ms + measured.locate_ms + measured.decide_ms + measured.recover_ms) / 1000
    return Past(
        id=incident.id,
        case=_case(job, incident),
        at=incident.opened / 1e9,
        job=job.id,
        title=incident.reason or incident.title,
        category=incident.category,
        done=incident.rung or "",
        ended=f"{incident.state}: {incident.why}" if incident.why else incident.state,
        took_s=took,
    )


def _place(signature: str) -> str:
    """Of ``KeyError@/job/train.py:41``; empty for a signature without a place."""
    file, _, line = signature.partition("@")[2].rpartition(":")
    return place_of(file, int(line)) if line.isdigit() else ""


def _case(job: Job, incident: Incident) -> Case:
    place = next((fault.signature for fault in job.user_faults if fault.incident == incident.id), "")
    return Case(
        cause=incident.root_cause.partition(":")[0],
        code=incident.code,
        place=_place(place),
        node=incident.node or "",
    )
