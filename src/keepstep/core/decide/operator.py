"""What people decide: each word is answered in the log, done or refused with a reason and a way out.

Saying a thing twice is a quiet success. The HTTP side asks ``refusal`` before it writes anything, so that a conflict is
an error where it was said; the mind asks again, because the state may have moved in between.
"""

from __future__ import annotations

from typing import Literal

from keepstep.core.cases import Proposal
from keepstep.core.decide.limits import AUTO, usual_mode
from keepstep.core.decide.proposals import move
from keepstep.core.decide.undo import undo, undo_refusal, undone
from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft
from keepstep.core.locate import sdc_people
from keepstep.core.state import Job
from keepstep.model.facts import OperatorSaid
from keepstep.model.ids import IncidentId
from keepstep.model.records import Automation, AutomationMoved, IncidentMarked

MODES: dict[str, Automation] = {"observe": "observe", "assist": "assist", "auto": "auto"}
_ENDED_ALREADY = ("REJECTED", "EXPIRED", "UNDONE")


def operator_said(draft: Draft, fact: OperatorSaid) -> None:
    """Carry out what a person asked for, or note why it cannot be, or that it is so already."""
    if fact.verb in ("sdc-open", "sdc-step", "sdc-close"):
        sdc_people.investigation_said(draft, fact)
    elif why := refusal(draft.job, fact):
        draft.note(f"{_asked(fact)} is refused: {why}")
    elif why := already(draft.job, fact):
        draft.note(f"{_asked(fact)}: {why}")
    else:
        _do(draft, fact)


def _asked(fact: OperatorSaid) -> str:
    return " ".join(word for word in (fact.verb, fact.subject, fact.other) if word) + f", asked for by {fact.by},"


def refusal(job: Job, fact: OperatorSaid) -> str:
    """Why this cannot be done, and what can be done instead; empty when it can, or when it is so already."""
    if fact.by in ("", AUTO):
        return f"{fact.by!r} is nobody who could have said it: say by whom it is asked for"
    match fact.verb:
        case "ack":
            return _unknown_incident(job, fact.subject)
        case "merge":
            return _against_merge(job, fact)
        case "approve" | "reject":
            return _against_verdict(job, fact)
        case "undo":
            return undo_refusal(job, fact.subject)
        case "freeze" | "thaw" | "mode":
            return _against_mode(job, fact)
        case "sdc-open" | "sdc-step" | "sdc-close":
            return sdc_people.refusal(job, fact)


def already(job: Job, fact: OperatorSaid) -> str:
    """That it is so already, in words; empty when there is something to do. Asked only for what is not refused."""
    match fact.verb:
        case "ack":
            by = job.incidents[IncidentId(fact.subject)].acked
            return f"{by} has seen it before" if by else ""
        case "merge":
            into = job.incidents[IncidentId(fact.subject)].merged
            return f"it is part of {into} already" if into == fact.other else ""
        case "approve" | "reject":
            one = job.proposals[fact.subject]
            if fact.verb == "approve" and one.state == "APPROVED" and one.by == AUTO:
                return ""  # the limits may hold it back by now; a person's yes goes beyond them
            done = ("APPROVED", "CARRIED_OUT") if fact.verb == "approve" else _ENDED_ALREADY
            return f"it is {one.state} already" if one.state in done else ""
        case "undo":
            return undone(job, fact.subject)
        case "freeze":
            return "automation is frozen already" if job.automation == "frozen" else ""
        case "thaw":
            return "" if job.automation == "frozen" else "automation is not frozen"
        case "mode":
            return f"mode is {fact.other} already" if job.automation == fact.other else ""
        case _:
            return ""


def _unknown_incident(job: Job, name: str) -> str:
    if IncidentId(name) in job.incidents:
        return ""
    return f"job {job.id} has no incident {name}; `keepstep incidents {job.id}` lists them"


def _against_merge(job: Job, fact: OperatorSaid) -> str:
    if why := _unknown_incident(job, fact.subject) or _unknown_incident(job, fact.other):
        return why
    if fact.subject == fact.other:
        return f"incident {fact.subject} cannot be part of itself; name the one that it belongs to"
    into: IncidentId | None = IncidentId(fact.other)
    while into is not None and (known := job.incidents.get(into)) is not None:
        if known.merged == fact.subject:
            return f"incident {into} is part of {fact.subject} already; merge {fact.subject} into another one"
        into = known.merged
    return ""


def _against_verdict(job: Job, fact: OperatorSaid) -> str:
    one = job.proposals.get(fact.subject)
    if one is None:
        return f"job {job.id} has no proposal {fact.subject}; `keepstep proposals {job.id}` lists them"
    if fact.verb == "reject":
        if one.state == "CARRIED_OUT":
            return f"{one.id} is carried out; `keepstep undo {one.id}` takes it back"
        return ""
    if one.state in _ENDED_ALREADY:
        return f"{one.id} is {one.state}: {one.why}; it is proposed anew when its reason is seen again"
    if (one.state == "PROPOSED" or one.by == AUTO) and one.open and job.automation == "frozen":
        return f"automation of job {job.id} is frozen, so nothing would be done; `keepstep thaw {job.id}` first"
    return ""


def _against_mode(job: Job, fact: OperatorSaid) -> str:
    if job.over:
        return f"job {job.id} is over: {job.state}"
    if fact.verb == "mode":
        if fact.other not in MODES:
            return f"{fact.other!r} is not a mode; say {', '.join(MODES)}"
        if job.automation == "frozen":
            return f"automation of job {job.id} is frozen; `keepstep thaw {job.id}` first"
    return ""


def _do(draft: Draft, fact: OperatorSaid) -> None:
    job = draft.job
    match fact.verb:
        case "ack":
            _mark(draft, fact, "acked")
        case "merge":
            _mark(draft, fact, "merged")
        case "approve":
            _approve(draft, job.proposals[fact.subject], fact)
        case "reject":
            move(draft, job.proposals[fact.subject], "REJECTED", by=fact.by, why=fact.why or "a person has said no")
        case "undo":
            undo(draft, fact)
        case "freeze":
            _automate(draft, fact, "frozen")
        case "thaw":
            _automate(draft, fact, job.thawed or usual_mode(job, draft.policy))
        case _:
            _automate(draft, fact, MODES[fact.other])


def _mark(draft: Draft, fact: OperatorSaid, mark: Literal["acked", "merged"]) -> None:
    other = IncidentId(fact.other) if mark == "merged" else None
    draft.emit(
        IncidentMarked(
            job=draft.job.id,
            at=draft.now,
            incident=IncidentId(fact.subject),
            mark=mark,
            by=fact.by,
            why=fact.why or f"{fact.by} said so",
            other=other,
        )
    )


def _approve(draft: Draft, one: Proposal, fact: OperatorSaid) -> None:
    """A person may go beyond every limit; what is still missing is a spare node and a calm moment."""
    why = fact.why or (f"in spite of: {one.held}" if one.held else "a person has said yes")
    move(draft, one, "APPROVED", by=fact.by, why=why)
    draft.wake(deadlines.proposal(one.id), draft.policy.approve_s)


def _automate(draft: Draft, fact: OperatorSaid, to: Automation) -> None:
    why = fact.why or f"{fact.by} asked for {fact.verb}"
    draft.emit(AutomationMoved(job=draft.job.id, at=draft.now, to=to, by=fact.by, why=why))
