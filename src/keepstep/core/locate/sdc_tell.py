"""Tell: an incident for numbers that were wrong, so that people find it where they look for what went wrong.

Training has gone on by itself when the mind hears of it: the incident is opened, told and closed in one decision, and
what is found out later is added to its page. While another incident is open, that one is in the way: the
investigation has it all the same.
"""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.core.recover.act import open_incident
from keepstep.core.recover.measure import resolve
from keepstep.model.facts import GuardNoted
from keepstep.model.ids import IncidentId
from keepstep.model.records import Category, SuspectNamed

_CATEGORY: dict[str, Category] = {
    "data": "data",
    "software": "user_code",
    "transient": "infrastructure",
    "hardware": "infrastructure",
    "": "infrastructure",
}
_CAUSE = {
    "data": "a batch makes the numbers go wrong",
    "software": "the numbers go wrong whatever the batch and the machine: code, settings or state",
    "transient": "silent data corruption that did not come again (a passing hardware fault or a race)",
    "hardware": "silent data corruption that comes again on one rank only",
    "": "silent data corruption: replicas differ",
}


def tell(draft: Draft, fact: GuardNoted, known: IncidentId | None) -> IncidentId | None:
    """Open an incident and close it, or add to the one that is ``known``.

    Returns:
        The incident; ``None`` where another one is in the way.
    """
    job = draft.job
    if known is None and job.incident is not None:
        return None
    if known is None:
        open_incident(draft, f"guard: {fact.why}", fact.at)
        draft.move_incident("LOCATING", "training has dealt with it by itself; looking for whose fault it was")
    name = known or draft.incident.id
    seats = [job.seat_of(rank) for rank in fact.ranks if job.roster and 0 <= rank < job.roster.world_size]
    machine = fact.verdict not in ("data", "software")
    passed = fact.verdict == "transient" and not fact.ranks
    cause = "numbers were wrong once, and right when the step was done again" if passed else _CAUSE[fact.verdict]
    evidence = [f"step {fact.step}: {fact.why}"]
    evidence += [f"first tensor: {fact.tensor}"] if fact.tensor else []
    evidence += [f"batch: {batch}" for batch in fact.batches]
    evidence += [f"ranks {', '.join(map(str, fact.others))} did the same work and differ"] if fact.others else []
    draft.emit(
        SuspectNamed(
            job=job.id,
            at=draft.now,
            incident=name,
            category="transient" if passed else _CATEGORY[fact.verdict],
            node=seats[0].node if seats and machine else None,
            ranks=fact.ranks if machine else (),
            probability=_probability(fact),
            reason=f"{cause}{_at(fact)}",
            evidence=tuple(evidence),
            root_cause=cause,
        )
    )
    if known is None:
        resolve(draft, fact.why)
    return name


def _probability(fact: GuardNoted) -> float:
    if fact.verdict:
        return 0.9
    return 0.7 if fact.ranks else 0.3


def _at(fact: GuardNoted) -> str:
    where = f" in {fact.tensor}" if fact.tensor else ""
    return f", step {fact.step}{where}"
