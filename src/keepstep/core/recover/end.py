"""End: a job is finished, given up or stopped, and every node is told so with the code to leave with."""

from __future__ import annotations

from typing import Literal

from keepstep.core.decide.proposals import settle
from keepstep.core.draft import Draft
from keepstep.core.recover.measure import resolve
from keepstep.model.actions import StopJob
from keepstep.model.exits import DONE, REQUEUE
from keepstep.model.facts import StopRequested
from keepstep.model.ids import IncidentId, NodeId, action_id
from keepstep.model.records import Category

StopCategory = Category | Literal["none"]


def finish(draft: Draft) -> None:
    """Every rank left with code 0: that is the end, whatever was still being verified."""
    job = draft.job
    incident = job.incident
    if incident is not None:
        why = "the job finished"
        if incident.state == "RECOVERING":
            draft.move_incident("VERIFYING", why)
        if incident.state == "OPEN":
            draft.move_incident("LOCATING", why)
        if incident.state == "DECIDED":
            draft.move_incident("ESCALATED", why)
        else:
            resolve(draft, why)
    draft.move_job("FINISHED", "every rank left with code 0", DONE)
    _stop_all(draft, DONE, job.why, "none", None)


def give_up(draft: Draft, code: int, why: str) -> None:
    """No rung is left: the incident is a person's now."""
    incident = draft.incident
    draft.move_incident("ESCALATED", why)
    draft.move_job("FAILED", why, code)
    _stop_all(draft, code, why, incident.category, incident.id)


def fail_start(draft: Draft, code: int, why: str) -> None:
    """The job never started."""
    draft.move_job("FAILED", why, code)
    _stop_all(draft, code, why, "infrastructure" if code == REQUEUE else "none", None)


def stop(draft: Draft, fact: StopRequested) -> None:
    """Somebody asked for the end. A preemption asks for another allocation (138); everything else is 0."""
    why = f"stopped by {fact.by}: {fact.why}"
    end_by_request(draft, why, stop_code(fact.why))


def end_by_request(draft: Draft, why: str, code: int) -> None:
    draft.move_incident("ESCALATED", why)
    draft.move_job("STOPPED", why, code)
    _stop_all(draft, code, why, "none", None)


def stop_code(why: str) -> int:
    """138 when the reason speaks of preemption, else 0."""
    return REQUEUE if "preempt" in why.lower() else DONE


def order_stop(
    draft: Draft, node: NodeId, code: int, why: str, category: StopCategory, incident: IncidentId | None
) -> None:
    job = draft.job
    waiting = any(isinstance(action, StopJob) and action.node == node for action in job.orders.values())
    if not waiting:
        draft.order(
            StopJob(
                id=action_id(job.id, f"stop-{node}", job.order_count),
                job=job.id,
                epoch=job.epoch,
                node=node,
                code=code,
                why=why,
                category=category,
                incident=incident,
                step=job.step,
            )
        )


def repeat_stop(draft: Draft, node: NodeId) -> None:
    """For a node that comes (back) after the end."""
    job = draft.job
    last = next(reversed(job.incidents.values()), None) if job.state == "FAILED" else None
    category = last.category if last else "none"
    order_stop(draft, node, job.exit_code or 0, job.why, category, last.id if last else None)


def _stop_all(draft: Draft, code: int, why: str, category: StopCategory, incident: IncidentId | None) -> None:
    settle(draft)
    for node in list(draft.job.nodes.values()):
        if node.link != "left":
            order_stop(draft, node.node, code, why, category, incident)
