"""Undo: a living node that was taken out may be used again.

By the name of the proposal, of the incident that carried it out, or of the node. Only what lives comes back: a node out
of reach returns by its own report. It comes back on probation, and automation leaves it alone for an hour.
"""

from __future__ import annotations

from keepstep.core.cases import Proposal
from keepstep.core.decide.proposals import move
from keepstep.core.draft import Draft
from keepstep.core.health.machine import USABLE
from keepstep.core.locate.assess import retry
from keepstep.core.standby.pool import order_standbys
from keepstep.core.state import Job
from keepstep.model.facts import OperatorSaid
from keepstep.model.ids import IncidentId, NodeId
from keepstep.model.records import IncidentMarked


def undo(draft: Draft, fact: OperatorSaid) -> None:
    """Take back what ``fact.subject`` names; asked only when ``undo_refusal`` and ``undone`` have nothing to say."""
    job = draft.job
    back = [name for name in _nodes(job, fact.subject) if not _against(job, name)]
    for name in back:
        draft.move_node(name, "PROBATION", f"{fact.by} has taken it back" + (f": {fact.why}" if fact.why else ""))
    for one in _carried(job, fact.subject):
        if not any(name in job.evicted for name in one.nodes):
            move(draft, one, "UNDONE", by=fact.by, why=fact.why or f"{fact.by} has taken it back")
            _mark(draft, one, fact)
    order_standbys(draft)
    retry(draft)


def undo_refusal(job: Job, subject: str) -> str:
    """Why nothing can be taken back, and what can be done instead."""
    one = job.proposals.get(subject)
    if one is not None and one.state not in ("CARRIED_OUT", "UNDONE"):
        more = f"; `keepstep reject {one.id}` ends it" if one.open else ""
        return f"{one.id} is {one.state}, so nothing was done that could be undone{more}"
    nodes = _nodes(job, subject)
    if not nodes:
        if IncidentId(subject) in job.incidents:
            return f"incident {subject} has taken no living node out: nothing can be undone"
        return (
            f"job {job.id} has no proposal, incident or node {subject}; "
            f"`keepstep proposals {job.id}` and `keepstep job {job.id}` list them"
        )
    against = [_against(job, name) for name in nodes]
    return "" if not all(against) or undone(job, subject) else against[0]


def undone(job: Job, subject: str) -> str:
    """That all of it is in use already; empty when something is to be done."""
    nodes = _nodes(job, subject)
    if nodes and all(job.nodes[name].health in (*USABLE, "SUSPECT") for name in nodes):
        return f"node {', '.join(nodes)} may be used already"
    return ""


def _nodes(job: Job, subject: str) -> tuple[NodeId, ...]:
    if NodeId(subject) in job.nodes:
        return (NodeId(subject),)
    found = [name for one in _done(job, subject) for name in one.nodes if name in job.nodes]
    return tuple(dict.fromkeys(found))


def _done(job: Job, subject: str) -> list[Proposal]:
    """Proposals that were carried out, of this name or for this incident."""
    done = [one for one in job.proposals.values() if one.state in ("CARRIED_OUT", "UNDONE")]
    return [one for one in done if subject in (one.id, one.incident)]


def _carried(job: Job, subject: str) -> list[Proposal]:
    named = set(_nodes(job, subject))
    return [one for one in job.proposals.values() if one.state == "CARRIED_OUT" and named & set(one.nodes)]


def _against(job: Job, name: NodeId) -> str:
    node = job.nodes[name]
    if node.health != "QUARANTINED":
        return f"node {name} is {node.health}: it is not out of the job"
    if node.link != "up":
        again = f", then `keepstep undo {name}` again" if node.faulty else ""
        return f"node {name} is out of reach (its connection is {node.link}): start its agent{again}"
    return ""


def _mark(draft: Draft, one: Proposal, fact: OperatorSaid) -> None:
    if one.incident is not None and one.incident in draft.job.incidents:
        draft.emit(
            IncidentMarked(
                job=draft.job.id,
                at=draft.now,
                incident=one.incident,
                mark="undone",
                by=fact.by,
                why=fact.why or f"{one.id} was taken back",
            )
        )
