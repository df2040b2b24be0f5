"""How a verdict is held against the truth. Pure: entries of the log in, numbers out.

The verdict is the first decision in which suspects are named, or the first note of a straggler, behind the onset. It
is right when it names exactly the truth: those ranks and no other; for a pair of nodes both and no third; for nobody,
nobody. Later, better thoughts do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from benchmarks.progress import spread
from keepstep.model.actions import KillProcess
from keepstep.model.facts import RankStalled, WorkerExited, WorkerFrozen
from keepstep.model.ids import IncidentId
from keepstep.model.records import (
    EpochOpened,
    IncidentMoved,
    IncidentOpened,
    NodeMoved,
    Observed,
    Ordered,
    PlanMade,
    Record,
    StragglerNoted,
    SuspectNamed,
)
from keepstep.model.topology import Roster

GONE = ("TAINTED", "DRAINING", "QUARANTINED")
"""States of a node that is taken away from the job."""


class Truth(Struct, frozen=True, kw_only=True):
    """Attributes:
    ranks: whose process is at fault; empty where the network or nobody is.
    nodes: of a pair between which the network is cut, or of a machine that is at fault itself.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def nobody(self) -> bool:
        return not self.ranks and not self.nodes

    @property
    def words(self) -> str:
        if self.nodes and not self.ranks:
            return " and ".join(self.nodes)
        return f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "nobody"


class Verdict(Struct, frozen=True, kw_only=True):
    """What was said first; wall-clock nanoseconds."""

    declared: int
    named: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    category: str
    probability: float
    reason: str
    incident: IncidentId | None


def stories(entries: Iterable[Record], onset: int) -> list[Record]:
    """What was written about things that happened since ``onset``."""
    return [record for record in entries if record.at >= onset]


def verdict(records: Sequence[Record], seats: Mapping[int, str]) -> Verdict | None:
    """The first one; ``None`` while there is none.

    Args:
        records: since the onset.
        seats: node of each rank.
    """
    declared = next((r.at for r in records if _declares(r)), 0)
    first = next((r for r in records if isinstance(r, SuspectNamed | StragglerNoted) and _names(r)), None)
    if first is None:
        return None
    if isinstance(first, StragglerNoted):
        both = {*first.nodes, *([first.peer] if first.peer else [])}
        return Verdict(
            declared=first.at,
            named=first.at,
            ranks=tuple(first.ranks),
            nodes=tuple(sorted(both)),
            category=first.cause,
            probability=first.probability,
            reason=first.why,
            incident=None,
        )
    together = [r for r in records if isinstance(r, SuspectNamed) and r.at == first.at]
    best = max(together, key=lambda record: record.probability)
    blamed = [r for r in together if r.category != "transient" and (r.ranks or r.node)]
    ranks = tuple(sorted({rank for record in blamed for rank in record.ranks}))
    nodes = {str(record.node) for record in blamed if record.node is not None} or {seats[r] for r in ranks}
    if not blamed and best.probability > 0:  # a pair is nobody's process, and is told in words
        nodes = {node for node in seats.values() if node in best.reason.replace(",", " ").split()}
    return Verdict(
        declared=declared or first.at,
        named=first.at,
        ranks=ranks,
        nodes=tuple(sorted(nodes)),
        category=best.category,
        probability=best.probability,
        reason=best.reason,
        incident=first.incident,
    )


def _declares(record: Record) -> bool:
    """No progress, a frozen process, an exit: from here on it is known that something is wrong."""
    if isinstance(record, IncidentOpened):
        return True
    if isinstance(record, IncidentMoved):
        return record.to == "LOCATING"
    return isinstance(record, Observed) and isinstance(record.fact, RankStalled | WorkerFrozen)


def _names(record: SuspectNamed | StragglerNoted) -> bool:
    return not (isinstance(record, StragglerNoted) and record.over)


def right(truth: Truth, said: Verdict | None) -> bool:
    if said is None:
        return False
    if truth.nobody:
        return not said.ranks and not said.nodes
    if truth.ranks:
        return set(said.ranks) == set(truth.ranks)
    return set(said.nodes) == set(truth.nodes)


def innocent(
    truth: Truth, records: Sequence[Record], roster: Roster, replaced: Collection[int], *, forgivable: Collection[str]
) -> list[str]:
    """What was taken away from those who had done nothing, one sentence each.

    Args:
        records: of the whole trial.
        roster: at its begin.
        replaced: ranks that have another process now.
        forgivable: nodes that may be taken out, because the fault is (or may well be) the machine's.
    """
    found: list[str] = []
    guilty = {member.rank for member in roster.members if member.node in truth.nodes} | set(truth.ranks)
    seats = {(m.node, m.slot): m.rank for m in roster.members}
    ended: set[int] = set()
    hit: set[int] = set()
    for record in records:
        if isinstance(record, EpochOpened):
            seats = {(m.node, m.slot): m.rank for m in record.roster.members}
        elif isinstance(record, Ordered) and isinstance(record.action, KillProcess):
            rank = seats.get((record.action.node, record.action.slot))
            if rank is not None and rank not in guilty:
                hit.add(rank)
                found.append(f"rank {rank} was killed: {record.action.why}")
        elif isinstance(record, Observed) and isinstance(record.fact, WorkerExited):
            if not record.fact.killed_by_us:
                ended.add(record.fact.rank)
        elif isinstance(record, NodeMoved) and record.to in GONE and record.node not in forgivable:
            found.append(f"{record.node} was taken out ({record.to}): {record.why}")
    found += [f"rank {r} got another process" for r in sorted(set(replaced) - guilty - ended - hit)]
    return found


def rungs(records: Iterable[Record]) -> list[str]:
    """Of the plans made, without repetitions."""
    return list(dict.fromkeys(r.rung for r in records if isinstance(r, PlanMade)))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of some trials, in the words of the report."""
    times = [row["time_to_suspect_s"] for row in rows if row["time_to_suspect_s"] is not None]
    return {
        "trials": len(rows),
        "top1_accuracy": round(sum(row["right"] for row in rows) / len(rows), 4) if rows else None,
        "declared_s": spread([row["declared_s"] for row in rows if row["declared_s"] is not None]),
        "time_to_suspect_s": spread(times),
        "innocent_evictions": sum(len(row["innocent"]) for row in rows),
    }
