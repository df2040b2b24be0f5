"""Adopt: while we were away a deputy opened an epoch of its own. Its word is law until ours is newer."""

from __future__ import annotations

from msgspec.structs import replace

from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft
from keepstep.core.locate.assess import assess
from keepstep.core.locate.exits import words
from keepstep.core.recover import rosters
from keepstep.core.recover.act import enter, open_incident
from keepstep.core.recover.progress import check_progress
from keepstep.core.state import seat_key
from keepstep.model.facts import RecoveredLocally, WorkerExited
from keepstep.model.ids import Epoch, next_major, show_epoch
from keepstep.model.records import PlanMade, SuspectNamed
from keepstep.model.topology import Member


def adopt(draft: Draft, fact: RecoveredLocally) -> None:
    """Take over a deputy's epoch, with an incident that tells how it came about."""
    job = draft.job
    roster = fact.roster
    if job.over or job.roster is None:
        return
    if roster.epoch <= job.epoch:
        newer = show_epoch(job.epoch)
        draft.note(f"epoch {show_epoch(roster.epoch)} of deputy {roster.origin} came too late: {newer} is newer")
        return
    cause = fact.cause
    what = words(cause) if isinstance(cause, WorkerExited) else f"in state {cause.state} for {cause.for_s:.1f} s"
    reason = f"rank {cause.rank} on {cause.node}: {what}"
    open_incident(draft, reason, cause.at)
    incident = draft.incident
    known = seat_key(cause.node, cause.slot) in job.seats
    draft.emit(
        SuspectNamed(
            job=job.id,
            at=draft.now,
            incident=incident.id,
            category="infrastructure",
            node=cause.node,
            ranks=(cause.rank,) if known else (),
            probability=0.9,
            reason=reason,
            evidence=(f"deputy {roster.origin}: {reason}",),
        )
    )
    draft.emit(
        PlanMade(
            job=job.id,
            at=draft.now,
            incident=incident.id,
            rung="in_process",
            attempt=incident.attempts,
            reason=f"Deputy {roster.origin} gave rank {cause.rank} to a parked standby: {fact.why}.",
            rejected=("waiting for the controller: it did not answer",),
            cost_if_wrong="one more rebuild of the communicators, a few seconds",
        )
    )
    draft.move_incident("DECIDED", "decided by a deputy while the controller was away")
    draft.clear(deadlines.ADOPT)
    enter(draft, replace(roster, incident=incident.id))
    draft.move_incident("RECOVERING", f"epoch {show_epoch(roster.epoch)} was opened by deputy {roster.origin}")
    draft.move_job("RECOVERING", f"a deputy recovers rank {cause.rank}")
    check_progress(draft)
    assess(draft)


def deputy_stays_silent(draft: Draft) -> None:
    """A node has accepted a deputy's epoch, and no report of it came: take the seats from what agents say they have."""
    job = draft.job
    known = job.ahead()
    if job.over or job.roster is None or known <= job.epoch:
        return
    picked = rosters.pick_store(job, [place.node for place in job.roster.places])
    if picked is None:
        draft.wake(deadlines.ADOPT, draft.policy.lease_s)
        return
    reason = f"epoch {show_epoch(known)} was opened by a deputy whose report never came"
    open_incident(draft, reason, draft.now)
    incident = draft.incident
    draft.emit(
        PlanMade(
            job=job.id,
            at=draft.now,
            incident=incident.id,
            rung="in_process",
            attempt=incident.attempts,
            reason=f"Open a newer epoch with the processes that agents report: {reason}.",
            rejected=(),
            cost_if_wrong="one more rebuild of the communicators, a few seconds",
        )
    )
    draft.move_incident("DECIDED", reason)
    epoch = next_major(known)
    roster = rosters.reseat(job, (), {}, picked[1], epoch, warm=False, incident=incident.id)
    enter(draft, replace(roster, members=tuple(_reported(draft, member, epoch) for member in roster.members)))
    draft.move_incident("RECOVERING", f"epoch {show_epoch(epoch)} is open")
    draft.move_job("RECOVERING", reason)
    assess(draft)


def _reported(draft: Draft, member: Member, epoch: Epoch) -> Member:
    """The process that holds this rank by the newest word of any agent; a new one where that has ended."""
    best, newest = member, draft.job.epoch
    for node in draft.job.nodes.values():
        for state in node.slots:
            if state.role == "worker" and state.rank == member.rank and state.epoch > newest:
                best, newest = replace(member, node=node.node, slot=state.slot, newcomer=True), state.epoch
    key = seat_key(best.node, best.slot)
    if key in draft.job.exits or key in draft.job.condemned:
        return replace(best, slot=rosters.cold_slot(member.rank, epoch), newcomer=True)
    return best
