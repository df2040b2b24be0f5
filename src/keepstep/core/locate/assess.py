"""Assess: look at the board after each new piece of evidence, and answer, doubt, or wait.

Level-triggered on purpose: it asks what the board says now and not what the last fact was, so the order in which
reports of many nodes come in does not matter.
"""

from __future__ import annotations

from keepstep.core.decide.ladder import above
from keepstep.core.decide.situation import vacant_ranks
from keepstep.core.detect import deadlines
from keepstep.core.detect.restores import standing
from keepstep.core.draft import Draft, nanos
from keepstep.core.locate.faults import (
    Fault,
    by_words,
    doubts,
    early_fault,
    early_leavers,
    faults,
    onset_of_doubt,
    victims,
)
from keepstep.core.locate.hang import judge
from keepstep.core.locate.look import looking, order_stacks, outdated, shown
from keepstep.core.locate.odds import at_odds, hinted
from keepstep.core.recover.act import act, answer, open_incident
from keepstep.core.recover.measure import resolve
from keepstep.core.recover.progress import check_progress
from keepstep.core.state import Job
from keepstep.model.facts import StoreLost
from keepstep.model.ids import Nanos, Rank
from keepstep.model.topology import fold_ranks


def assess(draft: Draft) -> None:
    """Answer what can be answered; otherwise make sure that somebody looks again in time."""
    job = draft.job
    if job.over or job.roster is None:
        return
    if job.ahead() > job.epoch:
        return  # a deputy has acted: its report is on the way, and this board is about a past epoch
    if deadlines.LEAVE in job.deadlines:
        return  # perhaps the whole job is being ended, and what breaks meanwhile is a consequence of that
    found = faults(job, draft.now, draft.policy)
    if _at_odds(draft, found):
        return
    if found:
        answer(draft, found)
        return
    if job.incident is not None and job.incident.state == "DECIDED":
        return  # a plan waits for a node or a store; what breaks meanwhile is its consequence
    if lines := doubts(job):
        open_incident(draft, f"collectives broke: {lines[0]}", onset_of_doubt(job, draft.now))
        draft.move_incident("LOCATING", f"{lines[0]}; looking for the cause")
        draft.wake_once(deadlines.EXPLAIN, draft.policy.explain_s)
    elif job.stalled and not _recovering(job):
        _stalled(draft)
    elif job.incident is not None and job.incident.state == "LOCATING" and not job.broken:
        _moved_again(draft)


def _at_odds(draft: Draft, found: list[Fault]) -> bool:
    """Whether ranks broke because one of them launched something else, and that is looked into or answered."""
    job = draft.job
    ranks = hinted(job)
    if not ranks or _recovering(job) or not all(set(fault.ranks) <= set(ranks) for fault in found):
        return False
    incident = job.incident
    if incident is not None and incident.state not in ("OPEN", "LOCATING"):
        return False
    said = f"rank {fold_ranks(ranks)} met an operation that is not its own"
    open_incident(draft, said, onset_of_doubt(job, draft.now))
    draft.move_incident("LOCATING", f"{said}; comparing what each rank has launched")
    if job.looked != (draft.incident.id, job.epoch):
        order_stacks(draft, "ranks launched different operations")
        draft.wake(deadlines.STACKS, draft.policy.stacks_s)
    if deadlines.STACKS in job.deadlines and looking(job):
        return True
    if culprits := at_odds(draft, found):
        answer(draft, culprits)
        return True
    return False


def _recovering(job: Job) -> bool:
    """Between a Join and the last rank's resumption, silence has a deadline of its own."""
    return job.roster is None or job.resumed < job.roster.world_size


def _stalled(draft: Draft) -> None:
    job = draft.job
    first = min(job.stalled.values(), key=lambda fact: fact.at - nanos(fact.idle_s))
    onset = Nanos(min(draft.now, first.at - nanos(first.idle_s)))
    open_incident(draft, f"no progress since step {first.step}", onset)
    draft.move_incident("LOCATING", "ranks stopped moving; collecting where each one stands")
    if job.looked != (draft.incident.id, job.epoch):
        order_stacks(draft, "ranks stopped moving")
        draft.wake(deadlines.STACKS, draft.policy.stacks_s)
    draft.wake_once(deadlines.LOCATE, draft.policy.locate_s)


def _moved_again(draft: Draft) -> None:
    """Nothing is left on the board: it was a pause. If communicators had been touched, a broken one would say so."""
    incident = draft.incident
    draft.clear(deadlines.LOCATE, deadlines.STACKS, deadlines.EXPLAIN, deadlines.PATIENCE)
    if incident.attempts:
        draft.move_incident("DECIDED", "all ranks moved again by themselves")
        draft.move_incident("RECOVERING", "all ranks moved again by themselves")
        check_progress(draft)
        return
    resolve(draft, "all ranks moved again by themselves")


def stall_reports_are_in(draft: Draft) -> None:
    """``locate_s`` after the first stall report: vote, unless some rank has its own good reason to be busy."""
    job = draft.job
    if job.roster is None or not job.stalled or job.incident is None or job.incident.state != "LOCATING":
        return
    gone = [job.seats[f"{fact.node}/{fact.slot}"] for fact in early_leavers(job)]
    ended = {job.seats[key] for key in job.exits if key in job.seats}
    missing = [m.rank for m in job.roster.members if m.rank not in job.stalled and m.rank not in ended]
    if missing:
        draft.wake_once(deadlines.PATIENCE, draft.policy.stall_patience_s)
        draft.wake_once(deadlines.LOCATE, draft.policy.stall_patience_s)
        return
    if not gone and deadlines.STACKS in job.deadlines and looking(job):
        return  # what the nodes see is on its way; either that or its deadline brings us back
    convict(draft, gone)


def stacks_are_in(draft: Draft) -> None:
    """A node has shown where its processes stand. Once all have, a vote that waited for that goes on."""
    job = draft.job
    if deadlines.STACKS in job.deadlines and not looking(job):
        draft.clear(deadlines.STACKS)
        if not job.stalled:
            assess(draft)
        elif deadlines.LOCATE not in job.deadlines or deadlines.PATIENCE in job.deadlines:
            stall_reports_are_in(draft)


def stacks_time_is_over(draft: Draft) -> None:
    """``stacks_s`` after a look was ordered: go on with what has come."""
    if draft.job.stalled:
        stall_reports_are_in(draft)
    else:
        assess(draft)


def look_again_at_stall(draft: Draft) -> None:
    """A late report that completes the picture need not wait for a deadline."""
    job = draft.job
    if job.incident is not None and job.incident.state == "LOCATING" and outdated(job) and not looking(job):
        order_stacks(draft, "more ranks stopped moving")
        draft.wake(deadlines.STACKS, draft.policy.stacks_s)
    if deadlines.PATIENCE in job.deadlines:
        stall_reports_are_in(draft)


def convict(draft: Draft, gone: list[Rank]) -> None:
    """Judge by what is known and act on the verdict."""
    job = draft.job
    assert job.roster is not None
    verdict = judge(list(job.stalled.values()), gone, shown(job), job.roster, job.spec.layout)
    onset = draft.incident.onset
    blamed = set(verdict.nodes or (job.seat_of(rank).node for rank in verdict.ranks))
    fault = Fault(
        key=f"stall:{job.epoch}",
        title=draft.incident.title,
        category=verdict.category,
        node=blamed.pop() if len(blamed) == 1 and verdict.category == "infrastructure" else None,
        ranks=verdict.ranks,
        probability=verdict.probability,
        reason=verdict.sentence,
        evidence=verdict.evidence,
        onset=onset,
        kill=verdict.ranks if verdict.kill else (),
        pair=verdict.pair,
    )
    answer(draft, [fault])


def explain_time_is_over(draft: Draft) -> None:
    """``explain_s`` after collectives broke: answer without a culprit, or with the rank that left too early."""
    job = draft.job
    incident = job.incident
    if job.roster is None or incident is None or incident.state != "LOCATING":
        return
    links = [node.link for place in job.roster.places if (node := job.nodes.get(place.node))]
    if any(link in ("away", "broken") for link in links):
        draft.wake(deadlines.EXPLAIN, draft.policy.reconnect_s)  # reports are held up; the lease bounds this wait
        return
    lines = doubts(job)
    if not lines:
        assess(draft)
        return
    if early := early_leavers(job):
        answer(draft, [early_fault(job, fact) for fact in early] + victims(job))
        return
    cause = "collective_abort: collectives broke, and every process lives"
    nobody = by_words(_nobody(draft, "collectives broke and nobody was found to be gone", lines, cause), job)
    answer(draft, [*victims(job), nobody] if job.level else victims(job) or [nobody])


def patience_is_over(draft: Draft) -> None:
    """``stall_patience_s``: whatever the missing ranks are busy with, it took too long."""
    job = draft.job
    if job.incident is not None and job.incident.state == "LOCATING" and job.stalled:
        convict(draft, [])


def _nobody(draft: Draft, reason: str, evidence: list[str], root_cause: str = "") -> Fault:
    return Fault(
        key=f"nobody:{draft.job.epoch}",
        title=reason,
        category="unknown",
        node=None,
        ranks=(),
        probability=0.0,
        reason=reason,
        evidence=tuple(evidence[:8]),
        onset=draft.now,
        root_cause=root_cause,
    )


def missing_at_rebuild(draft: Draft) -> None:
    """``rebuild_s`` is over: the ranks that hold the others up are killed, and the next rung is taken.

    Everybody waits for everybody while communicators are built, so being late proves little. Suspicion goes to those
    whose node has not even carried out the order, then to those that have not resumed while others have, then to
    those that stand still while they bring their state, then to newcomers; if nobody stands out, nobody is blamed.
    """
    job = draft.job
    roster = job.roster
    if roster is None or job.resumed == roster.world_size or _postponed(draft, deadlines.REBUILD):
        return
    if job.level == 0 and len(job.started) == len(roster.places):
        return  # nothing more is to be expected of a script without the SDK
    late = [m.rank for m in roster.members if not ((p := job.progress.get(m.rank)) and p.resumed)]
    idle = [m.rank for m in roster.members if m.node not in job.started]
    fresh = [m.rank for m in roster.members if m.newcomer and m.rank in late]
    late = late if len(late) < roster.world_size else []
    ranks = idle or late or standing(job) or fresh
    if job.restoring:
        what = f"rank {fold_ranks(ranks)} has" if ranks else "the ranks have"
        wait_s = draft.policy.rebuild_s
        _late(draft, ranks, f"{what} not resumed, and no bytes of any rank's state have arrived for {wait_s:g} s")
        return
    took = draft.policy.rebuild_s if roster.mode == "in_process" else draft.policy.first_start_s
    what = f"rank {fold_ranks(ranks)} had" if ranks else "the ranks had"
    _late(draft, ranks, f"{what} not resumed {took:g} s after the order to enter the epoch")


def missing_at_verify(draft: Draft) -> None:
    """``verify_s`` is over: ranks resumed but did no step."""
    job = draft.job
    roster = job.roster
    if roster is None or job.advanced == roster.world_size or _postponed(draft, deadlines.VERIFY):
        return
    late = [m.rank for m in roster.members if not ((p := job.progress.get(m.rank)) and (p.advanced or p.done))]
    ranks = late if len(late) < roster.world_size else []
    what = f"rank {fold_ranks(ranks)} had" if ranks else "the ranks had"
    _late(draft, ranks, f"{what} done no new step {draft.policy.verify_s:g} s after resuming")


def _late(draft: Draft, ranks: list[Rank], reason: str) -> None:
    job = draft.job
    incident = job.incident
    floor = above(incident.rung) if incident is not None and incident.rung else "in_process"
    nodes = {job.seat_of(rank).node for rank in ranks}
    gone = set(vacant_ranks(job))
    fault = Fault(
        key=f"late:{job.epoch}",
        title=reason,
        category="unknown",
        node=nodes.pop() if len(nodes) == 1 else None,
        ranks=tuple(ranks),
        probability=0.5 if ranks else 0.0,
        reason=reason,
        evidence=(reason,),
        onset=draft.now,
        kill=tuple(rank for rank in ranks if rank not in gone),
    )
    answer(draft, [fault], floor=floor if floor not in ("requeue", "stop") else "restart_job")


def _postponed(draft: Draft, name: str) -> bool:
    """A deadline passed while reports could not come in proves nothing: give them time. Bounded by the lease."""
    job = draft.job
    assert job.roster is not None
    nodes = [job.nodes.get(place.node) for place in job.roster.places]
    if any(node is not None and node.link in ("away", "broken") for node in nodes):
        draft.wake(name, draft.policy.explain_s)
        return True
    return False


def store_lost(draft: Draft, fact: StoreLost) -> None:
    """The store over which ranks are building communicators is gone: they wait in vain, so open an epoch with another.

    Once all have joined nobody needs the store any more. Processes that start anew fail by themselves and say so.
    """
    job = draft.job
    roster, incident = job.roster, job.incident
    if roster is None or incident is None or incident.state != "RECOVERING" or roster.mode != "in_process":
        return
    if fact.node != job.store_node or job.joined == roster.world_size or job.ahead() > job.epoch:
        return
    left = roster.world_size - job.joined
    reason = f"the rendezvous store on {fact.node} was lost before {left} of {roster.world_size} ranks had joined"
    fault = Fault(
        key=f"store:{job.epoch}",
        title=reason,
        category="transient",
        node=None,
        ranks=(),
        probability=1.0,
        reason=reason,
        evidence=(f"{fact.node}: {fact.why}",),
        onset=fact.at,
    )
    answer(draft, [fault])


def retry(draft: Draft) -> None:
    """Something that a waiting plan may need has come; not while it is unclear which processes a node still has."""
    job = draft.job
    if any(deadlines.reconcile_node(name) for name in job.deadlines):
        return
    if job.state == "WAITING" and job.incident is not None and job.ahead() == job.epoch:
        act(draft)


def pause_is_over(draft: Draft) -> None:
    if draft.job.state == "WAITING" and draft.job.incident is not None and draft.job.ahead() == draft.job.epoch:
        act(draft, rested=True)


def capacity_is_over(draft: Draft) -> None:
    if draft.job.state == "WAITING" and draft.job.incident is not None:
        act(draft, no_capacity=True)
