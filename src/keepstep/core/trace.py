"""Trace: an incident as Chrome trace events, for Perfetto or ``chrome://tracing``.

One lane (process) per node with one row (thread) per rank, and one lane for the controller above them. Spans are what
took time: states of the incident, and for each rank of each epoch its way from the fence to its first new step, with
the phases that the rank measured itself. Marks are what was seen and ordered. All times are the controller's, in
microseconds since the first evidence; a phase measured on a node is laid so that it ends when its report came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keepstep.core.summary import of_incident
from keepstep.core.summary_lines import evidence_line, fact_words, record_words
from keepstep.model.facts import RankAdvanced, RankJoined, RankResumed
from keepstep.model.ids import Nanos, NodeId, Rank, show_epoch
from keepstep.model.records import (
    AnyRecord,
    EpochOpened,
    IncidentMoved,
    IncidentOpened,
    NodeMoved,
    Observed,
    PlanMade,
    ProposalMoved,
    SuspectNamed,
)
from keepstep.model.topology import Roster

CONTROLLER = 1
"""Its lane; nodes have the next ones in the order of their ranks."""
_INCIDENT_ROW, _DECISION_ROW = 0, 1
_Event = dict[str, Any]


def incident_trace(records: Iterable[AnyRecord], incident: str) -> dict[str, Any]:
    """The trace of one incident; without events when the records do not hold it.

    Args:
        records: of the incident's job, from before its opening on; others are passed over.
    """
    own = of_incident(records, incident)
    opened = next((record for record in own if isinstance(record, IncidentOpened)), None)
    if opened is None:
        return {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {"incident": incident}}
    lanes = _lanes(own)
    drawn = [*_states(own, opened), *_decisions(own, opened), *_ranks(own, opened, lanes), *_seen(own, opened, lanes)]
    return {
        "traceEvents": [*_names(own, lanes), *sorted(drawn, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": {"schema": "keepstep.v1/Trace", "incident": incident, "onset_ns": str(opened.onset)},
    }


def _us(at: Nanos, opened: IncidentOpened) -> float:
    return (at - opened.onset) / 1000


def _lanes(own: Sequence[AnyRecord]) -> dict[NodeId, int]:
    """Lane of each node that is spoken of."""
    nodes: dict[NodeId, None] = {}
    for record in own:
        if isinstance(record, EpochOpened):
            nodes |= dict.fromkeys(place.node for place in record.roster.places)
        elif isinstance(record, Observed) and record.fact.node:
            nodes[record.fact.node] = None
        elif isinstance(record, SuspectNamed | NodeMoved) and record.node:
            nodes[record.node] = None
    return {node: lane for lane, node in enumerate(nodes, CONTROLLER + 1)}


def _names(own: Sequence[AnyRecord], lanes: dict[NodeId, int]) -> list[_Event]:
    """Metadata: what lanes and rows are called, and their order."""
    events: list[_Event] = []

    def name(kind: str, pid: int, tid: int, **args: Any) -> None:
        events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    name("process_name", CONTROLLER, 0, name="controller")
    name("process_sort_index", CONTROLLER, 0, sort_index=0)
    name("thread_name", CONTROLLER, _INCIDENT_ROW, name="incident")
    name("thread_name", CONTROLLER, _DECISION_ROW, name="decisions")
    rows: dict[tuple[int, int], None] = {}
    for record in own:
        if isinstance(record, EpochOpened):
            rows |= dict.fromkeys((lanes[m.node], int(m.rank)) for m in record.roster.members)
    for node, lane in lanes.items():
        name("process_name", lane, 0, name=f"node {node}")
        name("process_sort_index", lane, 0, sort_index=lane)
    for lane, rank in sorted(rows):
        name("thread_name", lane, rank, name=f"rank {rank}")
    return events


def _span(name: str, start: float, end: float, pid: int, tid: int, cat: str, **args: Any) -> _Event:
    dur = max(end - start, 0.001)
    return {
        "ph": "X", "name": name, "cat": cat, "ts": start, "dur": dur, "pid": pid, "tid": tid, "args": args,
    }  # fmt: skip


def _mark(name: str, at: float, pid: int, tid: int, cat: str, **args: Any) -> _Event:
    return {"ph": "i", "s": "t", "name": name, "cat": cat, "ts": at, "pid": pid, "tid": tid, "args": args}


def _states(own: Sequence[AnyRecord], opened: IncidentOpened) -> list[_Event]:
    """States of the incident, each until the next one; what lies before it was opened is detection."""
    events = []
    if opened.at > opened.onset:
        events.append(_span("detect", 0.0, _us(opened.at, opened), CONTROLLER, _INCIDENT_ROW, "incident"))
    state, since, why = "OPEN", opened.at, opened.title
    last = max(record.at for record in own)
    for record in own:
        if isinstance(record, IncidentMoved) and record.incident == opened.incident:
            events.append(_state(state, since, record.at, why, opened))
            state, since, why = record.to, record.at, record.why
    if state in ("RESOLVED", "ESCALATED"):
        events.append(_mark(state, _us(since, opened), CONTROLLER, _INCIDENT_ROW, "incident", why=why))
    else:
        events.append(_state(state, since, last, why, opened))
    return events


def _state(state: str, since: Nanos, until: Nanos, why: str, opened: IncidentOpened) -> _Event:
    return _span(
        state.lower(), _us(since, opened), _us(until, opened), CONTROLLER, _INCIDENT_ROW, "incident", why=why
    )  # fmt: skip


def _decisions(own: Sequence[AnyRecord], opened: IncidentOpened) -> list[_Event]:
    kinds = (SuspectNamed, PlanMade, EpochOpened, ProposalMoved)
    return [
        _mark(
            _short(record), _us(record.at, opened), CONTROLLER, _DECISION_ROW, "decision",
            words=" ".join(record_words(record).split()),
        )
        for record in own
        if isinstance(record, kinds)
    ]  # fmt: skip


def _short(record: AnyRecord) -> str:
    match record:
        case SuspectNamed():
            return f"suspect {record.node or 'nobody'}"
        case PlanMade():
            return f"plan {record.rung}"
        case EpochOpened():
            return f"epoch {show_epoch(record.roster.epoch)}"
        case ProposalMoved():
            return f"{record.proposal} {record.to}"
        case _:
            return type(record).__name__


def _ranks(own: Sequence[AnyRecord], opened: IncidentOpened, lanes: dict[NodeId, int]) -> list[_Event]:
    """For each epoch and rank: from the fence to the first new step, with its own phases inside."""
    events: list[_Event] = []
    last = max(record.at for record in own)
    opens = [record for record in own if isinstance(record, EpochOpened)]
    ends = [*(record.at for record in opens[1:]), last]
    for record, end in zip(opens, ends, strict=False):
        roster = record.roster
        joined, resumed, advanced = _reports(own, roster)
        for member in roster.members:
            lane, rank = lanes[member.node], member.rank
            done = advanced.get(rank, end)
            name = f"epoch {show_epoch(roster.epoch)}"
            events.append(
                _span(
                    name, _us(record.at, opened), _us(done, opened), lane, rank, "rank",
                    slot=member.slot, newcomer=member.newcomer, complete=rank in advanced,
                )
            )  # fmt: skip
            if rank in joined:
                events.append(_mark("joined", _us(joined[rank], opened), lane, rank, "rank"))
            if rank in resumed:
                at, fact = resumed[rank]
                events += _phases(fact, _us(record.at, opened), _us(at, opened), lane)
                events.append(_span("first step", _us(at, opened), _us(done, opened), lane, rank, "phase"))
    return events


def _reports(
    own: Sequence[AnyRecord], roster: Roster
) -> tuple[dict[Rank, Nanos], dict[Rank, tuple[Nanos, RankResumed]], dict[Rank, Nanos]]:
    """When each rank of this epoch was connected, had its state, had done a step."""
    joined: dict[Rank, Nanos] = {}
    resumed: dict[Rank, tuple[Nanos, RankResumed]] = {}
    advanced: dict[Rank, Nanos] = {}
    for record in own:
        match record:
            case Observed(fact=RankJoined(epoch=epoch, rank=rank)) if epoch == roster.epoch:
                joined.setdefault(rank, record.at)
            case Observed(fact=RankResumed(epoch=epoch, rank=rank) as fact) if epoch == roster.epoch:
                resumed.setdefault(rank, (record.at, fact))
            case Observed(fact=RankAdvanced(epoch=epoch, rank=rank)) if epoch == roster.epoch:
                advanced.setdefault(rank, record.at)
            case _:
                pass
    return joined, resumed, advanced


def _phases(fact: RankResumed, start: float, end: float, lane: int) -> list[_Event]:
    """One after the other, the last one ending with the report; squeezed where they would begin before the fence."""
    total = sum(fact.phases.values()) * 1000
    if total <= 0:
        return []
    squeeze = min(1.0, (end - start) / total)
    at, events = end - total * squeeze, []
    for name, ms in fact.phases.items():
        length = ms * 1000 * squeeze
        if length > 0:
            events.append(_span(name, at, at + length, lane, fact.rank, "phase", measured_ms=ms))
        at += length
    return events


def _seen(own: Sequence[AnyRecord], opened: IncidentOpened, lanes: dict[NodeId, int]) -> list[_Event]:
    """What was observed to be wrong and what became of nodes, on the row of the rank or node that it is about."""
    events = []
    for record in own:
        if isinstance(record, Observed) and evidence_line(record.fact):
            fact = record.fact
            rank = getattr(fact, "rank", None)
            lane = lanes.get(fact.node, CONTROLLER)
            row = int(rank) if rank is not None else 0
            events.append(
                _mark(type(fact).__name__, _us(record.at, opened), lane, row, "evidence", words=fact_words(fact))
            )
        elif isinstance(record, NodeMoved):
            events.append(
                _mark(record.to.lower(), _us(record.at, opened), lanes[record.node], 0, "node", words=record.why)
            )
    return events
