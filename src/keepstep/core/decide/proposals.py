"""Proposals: taking living nodes out of a job is proposed first; the limits or a person decide, and the log knows both.

``propose`` is for whoever suspects a node that lives: stragglers, silent corruption, processes that fail too often. It
only writes down what is thought and whether it may be done; ``recover.swap`` carries out what is approved as soon as
the job can take it (a spare node is there, no other incident is open). Evidence ages: a swap that was held is looked at
again only when its reason is seen again; an eviction, whose reason stays, whenever the limits let it pass. Both end
when nobody has decided in time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from keepstep.core.cases import Proposal
from keepstep.core.decide.limits import AUTO, HOUR_S, against_mode, mode_of, objection
from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft, nanos
from keepstep.core.state import EVIDENCE_KEPT, Job
from keepstep.model.ids import IncidentId, Nanos, NodeId, Rank, show_epoch
from keepstep.model.records import ProposalMoved, ProposalState
from keepstep.model.settings import Policy
from keepstep.model.topology import Roster

Kind = Literal["swap", "evict"]
Origin = Literal["", "straggler"]
_COST = "a healthy node stands idle until it is taken back (`keepstep undo`)"


def propose(
    draft: Draft,
    *,
    kind: Kind,
    nodes: Sequence[NodeId],
    ranks: Sequence[Rank],
    reason: str,
    evidence: Sequence[str],
    probability: float,
    rejected: Sequence[str] = (),
    cost_if_wrong: str = _COST,
    incident: IncidentId | None = None,
    testable: bool = False,
    origin: Origin = "",
) -> None:
    """Propose to take living nodes out; say it as often as it is seen.

    While a proposal that covers these nodes is open, or a person has refused one within the hour, nothing is added;
    but a stronger reason takes the place of a weaker one, and keeps the yes that a person has given to it.
    Within the limits of mode ``auto`` it is approved at once, and carried out with the same decision if that can be.

    Args:
        kind: ``swap`` for one that is to be replaced by a better one, ``evict`` for one that is under suspicion.
        nodes: that are to go; those that are lost already need no proposal and are left out.
        ranks: that are the reason, or that run there.
        reason: one sentence.
        rejected: alternatives, each with why it was not taken.
        testable: only suspicion speaks against the nodes, so they come back when they pass a self-test (``examine``).
        origin: ``straggler`` for what ends with the windows that show it.
    """
    job = draft.job
    living = tuple(name for name in dict.fromkeys(nodes) if lives(job, name))
    if job.over or not living or refused_lately(draft, living):
        return
    known = covering(job, living)
    if known and _strength(kind, origin, testable) <= _strength(known.kind, known.origin, known.testable):
        approve_by_itself(draft, known)
        return
    name = f"{job.id}-p{job.proposal_count + 1}"
    if known:
        move(draft, known, "REJECTED", by=AUTO, why=f"{name} takes its place: {reason}")
    draft.emit(
        ProposalMoved(
            job=job.id,
            at=draft.now,
            proposal=name,
            to="PROPOSED",
            by=AUTO,
            why=reason,
            kind=kind,
            incident=incident,
            nodes=living,
            ranks=tuple(ranks),
            probability=probability,
            evidence=tuple(evidence)[:EVIDENCE_KEPT],
            rejected=tuple(rejected),
            cost_if_wrong=cost_if_wrong,
            held=objection(job, living, draft.now, draft.policy),
            testable=testable,
            origin=origin,
        )
    )
    draft.wake(deadlines.proposal(name), draft.policy.approve_s)
    if known and known.state == "APPROVED" and known.by != AUTO:
        move(draft, job.proposals[name], "APPROVED", by=known.by, why=f"as {known.id} was: {known.why}")
    approve_by_itself(draft, job.proposals[name])


def _strength(kind: str, origin: str, testable: bool) -> tuple[bool, bool, bool]:
    """Ordered: corruption over failures, failures over slowness, proof over suspicion."""
    return kind == "evict", origin != "straggler", not testable


def lives(job: Job, name: NodeId) -> bool:
    return name in job.nodes and not job.nodes[name].lost


def covering(job: Job, nodes: Collection[NodeId]) -> Proposal | None:
    """The open proposal that is about all of these nodes, if there is one."""
    return next((one for one in job.proposals.values() if one.open and set(nodes) <= set(one.nodes)), None)


def refused_lately(draft: Draft, nodes: Collection[NodeId]) -> bool:
    """A person who has said no is not asked the same again within the hour."""
    return any(
        one.state == "REJECTED"
        and one.by != AUTO
        and one.at > draft.now - nanos(HOUR_S)
        and set(nodes) <= set(one.nodes)
        for one in draft.job.proposals.values()
    )


def cleared_before(job: Job, name: NodeId) -> bool:
    """Whether a self-test has brought this node back already: if it fails again, the test does not see its fault."""
    return any(one.state == "UNDONE" and one.by == AUTO and name in one.nodes for one in job.proposals.values())


def approve_by_itself(draft: Draft, one: Proposal) -> None:
    """Approve what the limits allow; what they hold back stays open for a person."""
    if one.state == "PROPOSED" and not objection(draft.job, one.nodes, draft.now, draft.policy, own=one.id):
        move(draft, one, "APPROVED", by=AUTO, why="within the limits of mode auto")
        draft.wake(deadlines.proposal(one.id), draft.policy.capacity_s)


def reconsider(draft: Draft) -> None:
    """Approve held evictions that the limits let pass by now: a mode was set, the breaker has closed. A slow node must
    be seen to be slow again; corruption does not get better with time."""
    for one in [one for one in draft.job.proposals.values() if one.state == "PROPOSED" and one.kind == "evict"]:
        approve_by_itself(draft, one)


def held_now(job: Job, one: Proposal, now: Nanos, policy: Policy) -> str:
    """What holds back a proposal now; of one that is over, what held it back."""
    if one.state == "PROPOSED":
        return objection(job, one.nodes, now, policy, own=one.id)
    return may_go_on(job, one, now, policy) if one.state == "APPROVED" else one.held


def may_go_on(job: Job, one: Proposal, now: Nanos, policy: Policy) -> str:
    """What holds back an approved proposal *now*; empty when nothing does. A person's yes is bound by ``freeze`` only.

    Args:
        one: approved; the limits may have been used up, or automation frozen, since.
    """
    if one.by == AUTO:
        return objection(job, one.nodes, now, policy, own=one.id)
    return against_mode(job, policy) if mode_of(job, policy) == "frozen" else ""


def leaving(job: Job, now: Nanos, policy: Policy) -> tuple[NodeId, ...]:
    """Nodes of the roster that approved proposals may take out now, each with its state somewhere else.

    So never a node together with the one that holds its copies, or whose copies it holds: the second one goes when the
    copies have been made anew.
    """
    if job.roster is None:
        return ()
    gone = {at.node for at in job.roster.places if not lives(job, at.node)}
    out: list[NodeId] = []
    for one in job.proposals.values():
        if one.state == "APPROVED" and not may_go_on(job, one, now, policy):
            for name in one.nodes:
                if lives(job, name) and name not in out and _kept_elsewhere(job.roster, job, name, gone | set(out)):
                    out.append(name)
    return tuple(out)


def _kept_elsewhere(roster: Roster, job: Job, name: NodeId, gone: Collection[NodeId]) -> bool:
    """Whether no state is lost with this node, besides those that are gone. For a job's only node nobody can tell."""
    at = roster.place(name)
    if at is None:
        return False
    if len(roster.places) == 1:
        return True
    if at.buddy in gone or any(seat.rank in job.gaps for seat in roster.seats_on(name)):
        return False
    return not any(other.buddy == name and other.node in gone for other in roster.places)


def move(
    draft: Draft, one: Proposal, to: ProposalState, *, by: str, why: str, incident: IncidentId | None = None
) -> None:
    draft.emit(ProposalMoved(job=draft.job.id, at=draft.now, proposal=one.id, to=to, by=by, why=why, incident=incident))
    if not draft.job.proposals[one.id].open:
        draft.clear(deadlines.proposal(one.id))


def time_is_over(draft: Draft, name: str) -> None:
    """Nobody has decided, or no spare node has come."""
    one = draft.job.proposals.get(name)
    if one is None or not one.open:
        return
    if one.state == "PROPOSED":
        why = f"nobody has decided within {draft.policy.approve_s:g} s (approve_s)"
    else:
        why = (
            may_go_on(draft.job, one, draft.now, draft.policy)
            or "it could not be carried out in time: no spare node, or no calm moment"
        )
    move(draft, one, "EXPIRED", by=AUTO, why=why)


def measure_anew(draft: Draft) -> None:
    """A new epoch forgets the windows before it, so swaps that rest on them end; what is still slow is seen again."""
    job = draft.job
    for one in [one for one in job.proposals.values() if one.open and one.origin == "straggler"]:
        if any(lives(job, name) and job.in_roster(name) for name in one.nodes):
            why = f"its reason is gone: epoch {show_epoch(job.epoch)} is open, steps are measured anew"
            move(draft, one, "REJECTED", by=AUTO, why=why)


def settle(draft: Draft) -> None:
    """Close what is done, and what needs no decision any more: its nodes are lost by themselves, or the job is over."""
    job = draft.job
    for one in [one for one in job.proposals.values() if one.open]:
        if any(lives(job, name) for name in one.nodes):
            if job.over:
                move(draft, one, "REJECTED", by=AUTO, why=f"the job is {job.state}")
        elif one.state == "APPROVED" and any(job.nodes[name].faulty for name in one.nodes):
            where = f"epoch {show_epoch(job.epoch)} is open without node {', '.join(one.nodes)}"
            move(draft, one, "CARRIED_OUT", by=one.by, why=where, incident=job.current)
        else:
            move(draft, one, "REJECTED", by=AUTO, why="its nodes were lost before anything was done to them")
