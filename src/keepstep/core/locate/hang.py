"""Hang: all that is known of a job that does not move, weighed to one verdict. Pure.

Positions say who does not come, stacks say where it is instead, connections say who is not reached. Each has the word
where it is the better witness: all that wait for storage are nobody's fault; an operation that everybody has launched
is held up by the network; the rank that all waits lead to is named, and what it does instead tells whether the
machine is to blame or the code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from keepstep.core.locate.collectives import Finding, find
from keepstep.core.locate.domains import domains_of
from keepstep.core.locate.evict import smallest_domain
from keepstep.core.locate.network import find_cut
from keepstep.core.locate.stacks import Consensus, Place, Waits, consensus, on_storage, tell, waits_for
from keepstep.core.locate.stall import AGREES, Verdict, vote, weigh
from keepstep.model.facts import RankStalled, StacksTaken
from keepstep.model.ids import Rank
from keepstep.model.position import RankPosition
from keepstep.model.records import Category
from keepstep.model.stacks import ProcessStacks
from keepstep.model.topology import Layout, Roster, fold_ranks

AWAY: frozenset[Waits] = frozenset({"data", "storage", "lock", "computing"})
"""Where a rank is that waits for no other, if most others are elsewhere."""
HALTED: frozenset[Waits] = frozenset({"stopped", "ended"})
CAUSES: Mapping[Waits, Category] = {
    "stopped": "infrastructure",
    "ended": "infrastructure",
    "storage": "infrastructure",
    "data": "data",
    "computing": "user_code",
    "lock": "user_code",
    "sleep": "user_code",
}
"""Whose fault it is that a rank does not come, by what it does instead. A machine is blamed for what the code cannot
do by itself: a process that was stopped, a file that does not come. Elsewhere the next machine would do the same."""
SHOWN = 8


def judge(
    stalled: Sequence[RankStalled],
    gone: Collection[Rank],
    taken: Sequence[StacksTaken],
    roster: Roster,
    layout: Layout,
) -> Verdict:
    """Who holds the job up, how sure that is, whose fault it is, and on what evidence.

    Args:
        stalled: what the ranks said of themselves; at least one.
        gone: ranks that left with code 0 before their loop was complete.
        taken: what the nodes saw, all of one look.
    """
    processes = [process for fact in taken for process in fact.processes]
    positions = [position for fact in taken for position in fact.positions]
    seen = consensus(processes) if processes else None
    if gone or not positions or (seen is not None and seen.storage):
        return _without_positions(weigh(vote(stalled, gone), seen), bool(gone), seen)
    places = {rank: place for place in seen.places for rank in place.ranks} if seen else {}
    odd = set(seen.odd) if seen else set()
    found = find(
        positions,
        elsewhere=[rank for rank, place in places.items() if rank in odd and place.waits in AWAY],
        halted=[rank for rank, place in places.items() if place.waits in HALTED],
    )
    if found is None or found.kind == "silent":
        return _without_positions(weigh(vote(stalled, gone), seen), False, seen)
    evidence = (*found.evidence, *(place.line for place in (seen.places if seen else ())[:4]))
    if found.kind == "inside":
        return _network(found, evidence, taken, roster)
    if found.kind == "outside":
        return _without_positions(weigh(_nobody(found, evidence), seen), False, seen)
    if (waiting := _common_storage(found, processes, roster)) is not None:
        return replace(waiting, evidence=evidence[:SHOWN])
    if found.suspects:
        return _among(found, evidence)
    if found.kind in ("mismatch", "order"):
        return _named(found, "user_code", evidence)
    return _missing(found, evidence, places, processes, positions, roster, layout)


def _without_positions(verdict: Verdict, gone: bool, seen: Consensus | None) -> Verdict:
    if not verdict.ranks:
        return verdict
    if gone:
        return replace(verdict, category="user_code", kill=False)
    places = {rank: place for place in seen.places for rank in place.ranks} if seen else {}
    return replace(verdict, category=_category(verdict.ranks, places))


def _category(ranks: Sequence[Rank], places: Mapping[Rank, Place]) -> Category:
    """The machine's, unless every one of them was seen to do something that the code alone can make it do."""
    causes = {
        CAUSES.get(places[rank].waits, "infrastructure") if rank in places else "infrastructure" for rank in ranks
    }
    return causes.pop() if len(causes) == 1 else "infrastructure"


def _missing(
    found: Finding,
    evidence: tuple[str, ...],
    places: Mapping[Rank, Place],
    processes: Sequence[ProcessStacks],
    positions: Sequence[RankPosition],
    roster: Roster,
    layout: Layout,
) -> Verdict:
    """Somebody does not come: what does it do instead?"""
    category = _category(found.ranks, places)
    if category == "user_code" and any(one.source == "flight-recorder" for one in positions):
        category = "unknown"  # a device that hangs looks like a line of code that does not end
    doing = places[found.ranks[0]].doing if len(found.ranks) == 1 and found.ranks[0] in places else ""
    verdict = _named(found, category, (*_children(found.ranks, processes), *evidence))
    if doing and places[found.ranks[0]].waits != "collective":
        surer = round(1 - (1 - found.probability) * AGREES, 3)
        place = places[found.ranks[0]].shown
        verdict = replace(
            verdict, reason=f"{found.reason}; it {doing}{f' at {place}' if place else ''}", probability=surer
        )
    if len(found.ranks) > 1:
        return _shared(verdict, roster, layout)
    return verdict


def _common_storage(found: Finding, processes: Sequence[ProcessStacks], roster: Roster) -> Verdict | None:
    """Ranks of several nodes wait for storage: it is what they share, and no node is to blame."""
    waiting = on_storage(processes)
    nodes = {member.node for member in roster.members if member.rank in waiting}
    if len(nodes) < 2 or not found.ranks or not set(found.ranks) <= waiting:
        return None
    who = f"ranks {fold_ranks(tuple(waiting))} on {len(nodes)} nodes"
    reason = f"{who} wait for a file system or a device, the others for them: the storage is at fault, no rank is"
    return Verdict(ranks=(), probability=0.0, reason=reason, evidence=())


def _children(ranks: Sequence[Rank], processes: Sequence[ProcessStacks]) -> tuple[str, ...]:
    """What the processes that a rank has started wait for: a data loader's workers, above all."""
    return tuple(
        f"started by rank {process.rank}: {process.name} (pid {process.pid}) "
        f"{_WAITS.get(waits_for(process), 'waits')}: {tell(process)}"
        for process in processes
        if process.role == "child" and process.rank in ranks and process.threads
    )[:3]


_WAITS: Mapping[Waits, str] = {
    "collective": "waits in a collective",
    "data": "waits for data",
    "storage": "waits for a file system or a device",
    "lock": "waits for a lock",
    "sleep": "sleeps",
    "stopped": "has been stopped",
    "computing": "computes",
}


def _shared(verdict: Verdict, roster: Roster, layout: Layout) -> Verdict:
    """Several do not come: the smallest thing that they share explains them, or nothing does."""
    domain = smallest_domain(verdict.ranks, domains_of(roster, layout))
    evidence = (*verdict.evidence, *domain.evidence, *domain.rejected)
    if domain.domain is None or domain.action in ("leave", "examine"):
        return replace(verdict, probability=min(verdict.probability, 0.5), evidence=evidence)
    reason = f"{verdict.reason}; {domain.reason}"
    chance = round(max(verdict.probability, domain.probability), 3)
    return replace(verdict, reason=reason, probability=chance, nodes=domain.nodes, evidence=evidence)


def _network(found: Finding, evidence: tuple[str, ...], taken: Sequence[StacksTaken], roster: Roster) -> Verdict:
    """Everybody has come. The connections may tell who is not reached."""
    cut = find_cut(taken, roster)
    if cut is None:
        return _nobody(found, evidence)
    return Verdict(
        ranks=cut.ranks,
        probability=cut.probability,
        reason=cut.reason,
        evidence=(*cut.evidence, *evidence)[:SHOWN],
        category="infrastructure",
        nodes=cut.nodes,
        kill=False,
        whole=True,
        pair=cut.nodes if len(cut.nodes) == 2 else (),
    )


def _among(found: Finding, evidence: tuple[str, ...]) -> Verdict:
    """It is one of these ranks, and nothing tells which: all are named, and none is ended for it."""
    return Verdict(
        ranks=found.suspects,
        probability=round(1 / len(found.suspects), 3),
        reason=found.reason,
        evidence=evidence[:SHOWN],
        category="user_code",
        kill=False,
        whole=True,
    )


def _named(found: Finding, category: Category, evidence: tuple[str, ...]) -> Verdict:
    return Verdict(
        ranks=found.ranks,
        probability=found.probability,
        reason=found.reason,
        evidence=evidence[:SHOWN],
        category=category,
    )


def _nobody(found: Finding, evidence: tuple[str, ...]) -> Verdict:
    return Verdict(ranks=(), probability=0.0, reason=found.reason, evidence=evidence[:SHOWN])
