"""What people say to an investigation: open one, move it, close it. Each word is done, or refused in the log."""

from __future__ import annotations

from typing import get_args

from keepstep.core.cases import Investigation
from keepstep.core.decide import proposals
from keepstep.core.decide.limits import AUTO
from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft
from keepstep.core.exceptions import IllegalMove
from keepstep.core.locate.investigation_machine import INVESTIGATION
from keepstep.core.locate.sdc import PROVEN, SEEN, confirm, investigation_id, move, nodes_of
from keepstep.core.locate.sdc_orders import clear_taint, order_soak
from keepstep.core.state import Job
from keepstep.model.facts import OperatorSaid
from keepstep.model.records import InvestigationMoved, InvestigationState


def investigation_said(draft: Draft, fact: OperatorSaid) -> None:
    """Carry out ``sdc-open``, ``sdc-step`` or ``sdc-close``, or note why it cannot be."""
    if why := refusal(draft.job, fact):
        draft.note(f"{fact.verb} asked for by {fact.by} is refused: {why}")
        return
    if fact.verb == "sdc-open":
        _open(draft, fact)
        return
    known = draft.job.investigations[fact.subject]
    to = _state(fact)
    if to == "CONFIRMED":
        confirm(draft, known, f"{fact.by}: {fact.why}", (), PROVEN)
        return
    move(draft, known, to, fact.why, by=fact.by)
    if to == "CLEARED":
        clear_taint(draft, draft.job.investigations[known.id])
        _withdraw(draft, known, fact)
    elif to == "SOAK":
        tested = order_soak(draft, draft.job.investigations[known.id])
        if not tested:
            draft.note(f"{known.id}: no self-test is ordered: no suspect can be reached, or Policy.soak_s is 0")
        draft.wake(deadlines.soak(known.id), draft.policy.soak_s + draft.policy.soak_patience_s)


def _withdraw(draft: Draft, known: Investigation, fact: OperatorSaid) -> None:
    """What was proposed because of a verdict ends with it; what has been done is for ``keepstep undo``."""
    for one in [one for one in draft.job.proposals.values() if one.open and one.kind == "evict"]:
        if one.nodes == known.nodes:
            why = f"{known.id} was cleared by {fact.by}" + (f": {fact.why}" if fact.why else "")
            proposals.move(draft, one, "REJECTED", by=fact.by, why=why)


def refusal(job: Job, fact: OperatorSaid) -> str:
    """Why this cannot be done; empty when it can."""
    if fact.by in ("", AUTO):
        return f"{fact.by!r} is nobody who could have said it: say by whom it is asked for"
    if job.over or job.roster is None:
        return f"job {job.id} is {job.state}"
    if fact.verb == "sdc-open":
        if not fact.ranks:
            return "it names no rank (--rank)"
        outside = [rank for rank in fact.ranks if not 0 <= rank < job.roster.world_size]
        return f"there is no rank {outside[0]}; the world has {job.roster.world_size} ranks" if outside else ""
    known = job.investigations.get(fact.subject)
    if known is None:
        return f"there is no investigation {fact.subject}; there are {', '.join(job.investigations) or 'none'}"
    states = get_args(InvestigationState)
    to = _state(fact)
    if to not in states:
        return f"{fact.other!r} is no state; choose one of {', '.join(states)}"
    try:
        INVESTIGATION.check(known.state, to)
    except IllegalMove:
        ways = ", ".join(INVESTIGATION.moves[known.state]) or "nowhere: it is closed"
        return f"{known.id} is {known.state}; from there it goes to {ways}"
    return ""


def _state(fact: OperatorSaid) -> InvestigationState:
    return fact.other.upper()  # type: ignore[return-value]  # `refusal` has checked it


def _open(draft: Draft, fact: OperatorSaid) -> None:
    """Since when it may be so is not known: no checkpoint is marked."""
    job = draft.job
    draft.emit(
        InvestigationMoved(
            job=job.id,
            at=draft.now,
            investigation=investigation_id(job, job.investigation_count + 1),
            to="SUSPECTED",
            by=fact.by,
            why=fact.why,
            ranks=fact.ranks,
            nodes=nodes_of(job, fact.ranks),
            step=job.step,
            since=job.step,
            probability=SEEN,
        )
    )
