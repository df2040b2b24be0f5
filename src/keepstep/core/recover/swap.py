"""Swap: carry out what is approved, once the job can take it.

Looked at after every fact, like the board: whatever was missing (a spare node, the end of another incident, a copy of
the state, ``keepstep thaw``), the next fact that brings it starts the swap. A swap is an incident like any other, with
a page, a plan and a measured cost; only its suspect was named beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.cases import Proposal
from keepstep.core.decide.limits import AUTO
from keepstep.core.decide.proposals import leaving, lives, may_go_on, reconsider, settle
from keepstep.core.decide.situation import spare_nodes
from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft
from keepstep.core.recover.act import act, open_incident
from keepstep.core.recover.rosters import pick_store
from keepstep.core.standby.pool import order_standbys, retire_standbys
from keepstep.core.state import Job
from keepstep.model.ids import NodeId
from keepstep.model.records import SuspectNamed


def carry_out(draft: Draft) -> None:
    """Take out the nodes of approved proposals that may go now; nothing where the job is not in order."""
    job = draft.job
    if not any(one.open for one in job.proposals.values()):
        return
    reconsider(draft)
    _retire_spares(draft)
    settle(draft)
    if not calm(job):
        return
    going = leaving(job, draft.now, draft.policy)[: len(spare_nodes(job))]
    if going:
        _swap(draft, going)


def calm(job: Job) -> bool:
    """Whether the job can be rebuilt for something that is not urgent."""
    if job.state != "RUNNING" or job.roster is None or job.incident is not None or job.ahead() > job.epoch:
        return False
    if job.done or job.clean or deadlines.LEAVE in job.deadlines or not (job.settled or job.level == 0):
        return False
    if any((node := job.nodes.get(at.node)) is None or node.link != "up" for at in job.roster.places):
        return False
    if job.level == 0 and job.attempt >= job.spec.max_restarts:
        return False
    return pick_store(job, [at.node for at in job.roster.places]) is not None


def _swap(draft: Draft, going: Sequence[NodeId]) -> None:
    job = draft.job
    assert job.roster is not None
    because = [one for one in job.proposals.values() if one.state == "APPROVED" and set(one.nodes) & set(going)]
    names = ", ".join(going)
    what = "swap" if because[0].kind == "swap" else "eviction"
    open_incident(draft, f"planned {what} of node {names}", draft.now)
    draft.emit(
        SuspectNamed(
            job=job.id,
            at=draft.now,
            incident=draft.incident.id,
            category="infrastructure",
            node=going[0] if len(going) == 1 else None,
            ranks=tuple(seat.rank for name in going for seat in job.roster.seats_on(name)),
            probability=max(one.probability for one in because),
            reason="; ".join(dict.fromkeys(_reason(one) for one in because)),
            evidence=tuple(dict.fromkeys(line for one in because for line in one.evidence)),
        )
    )
    act(draft)


def _reason(one: Proposal) -> str:
    who = "" if one.by == AUTO else f", approved by {one.by}"
    return f"{one.reason} ({one.id}{who})"


def _retire_spares(draft: Draft) -> None:
    """A node without ranks goes without an epoch."""
    job = draft.job
    for one in [one for one in job.proposals.values() if one.state == "APPROVED"]:
        spare = [name for name in one.nodes if lives(job, name) and not job.in_roster(name)]
        if not spare or may_go_on(job, one, draft.now, draft.policy):
            continue
        for name in spare:
            draft.move_node(name, "TAINTED", one.reason)
            draft.move_node(name, "DRAINING", "it has no ranks")
            retire_standbys(draft, job.nodes[name])
            draft.move_node(name, "QUARANTINED", one.reason)
        order_standbys(draft)
