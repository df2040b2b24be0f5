"""Odds: members of a group that launched different operations, found by the words of the library that broke on it.

Gloo ends whoever *receives* what it did not expect, which is a neighbour of the rank at odds and seldom that rank
itself. So these words accuse nobody: they ask for the positions, and those tell who launched something else. Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from keepstep.core.draft import Draft
from keepstep.core.locate.collectives import Finding, find_odds
from keepstep.core.locate.faults import Fault
from keepstep.core.locate.look import shown
from keepstep.core.state import Job
from keepstep.model.ids import Rank
from keepstep.model.topology import fold_ranks

_WORDS = (
    "collective mismatch",
    "mismatch between collectives",
    "doesn't match expected size",
    "op.preamble.length",
    "Mismatched collective",
)
"""Of gloo (gloo/transport/tcp/pair.cc) and of torch with TORCH_DISTRIBUTED_DEBUG=DETAIL."""


def hinted(job: Job) -> tuple[Rank, ...]:
    """Ranks that broke with such words in the present epoch, by their exit or by their collective."""
    exits = {
        job.seats[key]: (*fact.stderr_tail, *fact.first_error, fact.error.message if fact.error else "")
        for key, fact in job.exits.items()
        if key in job.seats and key not in job.condemned
    }
    broken = {rank: (fact.error,) for rank, fact in job.broken.items()}
    found = {
        rank
        for said in (exits, broken)
        for rank, lines in said.items()
        if any(word in line for line in lines for word in _WORDS)
    }
    return tuple(sorted(found))


def at_odds(draft: Draft, found: list[Fault]) -> list[Fault]:
    """The rank that launched something else, and those that ended of it as its victims; empty where nobody is found."""
    job = draft.job
    finding = find_odds([position for fact in shown(job) for position in fact.positions])
    if finding is None:
        return []
    ranks = finding.ranks or finding.suspects
    victims = [_victim(fault, finding) for fault in found if not set(fault.ranks) <= set(ranks)]
    gone = {job.seats[key] for key in job.exits if key in job.seats}
    who = f"rank {ranks[0]} {finding.reason}" if finding.ranks and len(ranks) == 1 else finding.reason
    culprit = Fault(
        key=f"odds:{job.epoch}",
        title=draft.incident.title,
        category="user_code",
        node=None,
        ranks=ranks,
        probability=finding.probability if finding.ranks else round(1 / len(ranks), 3),
        reason=who,
        evidence=finding.evidence,
        onset=draft.incident.onset,
        kill=tuple(rank for rank in finding.ranks if rank not in gone),
    )
    return [culprit, *victims]


def _victim(fault: Fault, finding: Finding) -> Fault:
    named = fold_ranks(finding.ranks or finding.suspects)
    reason = (
        f"rank {fold_ranks(fault.ranks)} broke on the operation that rank {named} launched: a victim, not a culprit"
    )
    return replace(fault, category="transient", node=None, victim=True, reason=reason, kill=(), leave=False)
