"""Fold: the only code that changes state. One arm per record, one arm per fact, and no decision in any of them."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from keepstep.core.deaths import signature, stack_of
from keepstep.core.fold_decisions import fold_decision
from keepstep.core.fold_facts import fold_fact, recount
from keepstep.core.health.machine import NODE
from keepstep.core.recover.incident import INCIDENT
from keepstep.core.recover.jobrun import JOBRUN
from keepstep.core.standby.machine import STANDBY
from keepstep.core.state import (
    DEATHS_KEPT,
    EVIDENCE_KEPT,
    INCIDENTS_KEPT,
    NODE_FAULTS_KEPT,
    ORIGIN,
    STORES_REMEMBERED,
    TERMINAL,
    USER_FAULTS_KEPT,
    Death,
    Incident,
    Job,
    Standby,
    UserFault,
    seat_key,
)
from keepstep.model.actions import (
    EXAMINATIONS,
    Join,
    KeepStandbys,
    KillProcess,
    SelfTest,
    StopJob,
    TaintCheckpoints,
    TakeStacks,
)
from keepstep.model.ids import Nanos, NodeId
from keepstep.model.records import (
    AnyRecord,
    AutomationMoved,
    DeadlineSet,
    EpochOpened,
    IncidentMarked,
    IncidentMeasured,
    IncidentMoved,
    IncidentOpened,
    InvestigationMoved,
    JobMoved,
    NodeMoved,
    Noted,
    Observed,
    Ordered,
    PlanMade,
    ProposalMoved,
    StandbyMoved,
    StragglerNoted,
    SuspectNamed,
)
from keepstep.model.topology import Roster


def fold(job: Job, record: AnyRecord) -> None:
    """Change ``job`` by one of its records.

    Raises:
        IllegalMove: the record asks for a transition that the machine's table does not have.
    """
    match record:
        case Observed():
            fold_fact(job, record.fact)
        case JobMoved():
            JOBRUN.check(job.state, record.to)
            job.state, job.why, job.exit_code = record.to, record.why, record.exit_code
            if record.to in TERMINAL:
                job.deadlines.clear()
        case NodeMoved():
            _node_moved(job, record)
        case StandbyMoved():
            _standby_moved(job, record)
        case IncidentOpened():
            _incident_opened(job, record)
        case IncidentMoved():
            _incident_moved(job, record)
        case SuspectNamed():
            _suspect_named(job, record)
        case PlanMade():
            incident = job.incidents[record.incident]
            job.incidents[incident.id] = replace(
                incident,
                rung=record.rung,
                planned=record.rung,
                plan=record.reason,
                located=incident.located or record.at,
            )
        case EpochOpened():
            _epoch_opened(job, record)
        case Ordered():
            _ordered(job, record)
        case DeadlineSet():
            if record.due:
                job.deadlines[record.name] = record.due
            else:
                job.deadlines.pop(record.name, None)
        case IncidentMeasured():
            job.incidents[record.incident] = replace(job.incidents[record.incident], measured=record)
        case Noted():
            pass
        case ProposalMoved() | AutomationMoved() | IncidentMarked() | InvestigationMoved() | StragglerNoted():
            fold_decision(job, record)
        case _:
            assert_never(record)


def _node_moved(job: Job, record: NodeMoved) -> None:
    node = job.nodes[record.node]
    NODE.check(node.health, record.to)
    cleared = record.to == "PROBATION"
    faulty = record.to == "TAINTED" or (node.faulty and not cleared)
    faults = () if cleared and node.faulty else node.faults
    job.nodes[node.node] = replace(node, health=record.to, faulty=faulty, faults=faults)
    if cleared:
        job.evicted.pop(node.node, None)
    if record.to == "PROBATION" and (incident := job.incident):
        named = tuple(key for key in incident.named if key != f"node:{node.node}")
        job.incidents[incident.id] = replace(incident, named=named, planned=None)  # what it waited for is here


def _standby_moved(job: Job, record: StandbyMoved) -> None:
    key = seat_key(record.node, record.slot)
    before = job.standbys[key].state if key in job.standbys else STANDBY.initial
    STANDBY.check(before, record.to)
    if record.to in STANDBY.final:
        job.standbys.pop(key, None)
    else:
        job.standbys[key] = Standby(node=record.node, slot=record.slot, state=record.to)


def _incident_opened(job: Job, record: IncidentOpened) -> None:
    assert job.current is None, f"{job.current} is still open"
    job.incident_count += 1
    job.current = record.incident
    job.incidents[record.incident] = Incident(
        id=record.incident,
        number=job.incident_count,
        title=record.title,
        onset=record.onset,
        opened=record.at,
        baseline=job.roster,
    )
    while len(job.incidents) > INCIDENTS_KEPT:
        del job.incidents[next(iter(job.incidents))]


def _incident_moved(job: Job, record: IncidentMoved) -> None:
    incident = job.incidents[record.incident]
    INCIDENT.check(incident.state, record.to)
    ends = record.to in INCIDENT.final
    job.incidents[incident.id] = replace(
        incident,
        state=record.to,
        why=record.why,
        closed=record.at if ends else incident.closed,
        baseline=None if ends else incident.baseline,
    )
    if ends:
        job.current = None


def _suspect_named(job: Job, record: SuspectNamed) -> None:
    """Blame, and remember on what evidence, so that the same evidence is not judged twice."""
    incident = job.incidents[record.incident]
    blamed = record.ranks if record.category != "transient" else ()
    keys = [seat_key(seat.node, seat.slot) for seat in map(job.seat_of, record.ranks)] if job.roster else []
    if record.node is not None and record.node in job.nodes and job.nodes[record.node].lost:
        keys = [f"node:{record.node}"]
    if not record.ranks:
        keys.append(f"nobody:{job.epoch}")
    louder = record.category != "transient" or incident.category == "unknown"  # a victim never outshines a culprit
    job.incidents[incident.id] = replace(
        incident,
        located=incident.located or record.at,
        category=record.category if louder else incident.category,
        node=record.node if louder else incident.node,
        probability=record.probability if louder else incident.probability,
        reason=record.reason if louder else incident.reason,
        root_cause=record.root_cause if louder else incident.root_cause,
        code=record.code if louder else incident.code,
        similar=record.similar if louder else incident.similar,
        leave=record.node if record.leave else incident.leave,
        pair=record.pair or incident.pair,
        suspects=tuple(sorted({*incident.suspects, *blamed})),
        evidence=(*incident.evidence, *record.evidence)[:EVIDENCE_KEPT],
        named=(*incident.named, *keys),
        user_faults=incident.user_faults + (record.category in ("user_code", "data")),
    )
    if record.category != "infrastructure" or not record.root_cause:  # else it is known to be the machine
        deaths = [
            Death(rank=rank, node=exit_.node, stack=stack)
            for key, rank in zip(keys, record.ranks, strict=False)
            if (exit_ := job.exits.get(key)) and exit_.error is None and (stack := stack_of(exit_))
        ]
        incident = job.incidents[incident.id]
        job.incidents[incident.id] = replace(incident, deaths=(*incident.deaths, *deaths)[-DEATHS_KEPT:])
    if record.category in ("user_code", "data"):
        for key, rank in zip(keys, record.ranks, strict=False):
            if exit_ := job.exits.get(key):
                step = exit_.error.step if exit_.error else None
                fault = UserFault(incident=incident.id, rank=rank, signature=signature(exit_), step=step)
                job.user_faults = (*job.user_faults, fault)[-USER_FAULTS_KEPT:]
    elif record.category == "infrastructure" and record.node in job.nodes and not job.nodes[record.node].lost:
        node = job.nodes[record.node]
        job.nodes[node.node] = replace(node, faults=(*node.faults, record.at)[-NODE_FAULTS_KEPT:])


def _epoch_opened(job: Job, record: EpochOpened) -> None:
    """Fence: whatever spoke about seats that are no longer held is answered."""
    roster = replace(record.roster, members=tuple(sorted(record.roster.members, key=lambda member: member.rank)))
    if job.roster is not None and job.resumed == job.roster.world_size:
        job.proven = job.roster
    _close_incident_books(job, roster)
    job.roster, job.epoch = roster, roster.epoch
    job.attempt = roster.attempt
    job.settled = job.settled and roster.mode == "in_process"
    job.seats = {seat_key(member.node, member.slot): member.rank for member in roster.members}
    if roster.origin == ORIGIN:
        job.deputy_at = Nanos(0)
    job.started = {}
    job.refused = {}
    job.restoring = {}
    job.paces = {}
    job.stragglers = {}
    # A newcomer says anew whether it lacks a copy.
    staying = {member.rank for member in roster.members if not member.newcomer and roster.mode == "in_process"}
    job.gaps = {rank: gap for rank, gap in job.gaps.items() if rank in staying}
    job.exits = {key: fact for key, fact in job.exits.items() if key in job.seats}
    job.condemned = {key: why for key, why in job.condemned.items() if key in job.seats}
    job.frozen, job.stalled, job.broken, job.cannot = {}, {}, {}, {}
    job.progress = {rank: seen for rank, seen in job.progress.items() if seen.epoch >= job.epoch}
    job.store_node = NodeId(roster.origin) if roster.origin in job.nodes else None
    for node, store in list(job.stores.items()):
        if (store.host, store.port) == (roster.store_host, roster.store_port):
            del job.stores[node]
            job.store_node = node
    job.used_stores = (*job.used_stores, f"{roster.store_host}:{roster.store_port}")[-STORES_REMEMBERED:]
    for action in list(job.orders.values()):
        if not isinstance(action, StopJob | TaintCheckpoints):  # what is spoilt stays so, whoever trains
            del job.orders[action.id]
            if isinstance(action, KeepStandbys):
                job.standby_orders.pop(action.node, None)
    recount(job)


def _close_incident_books(job: Job, roster: Roster) -> None:
    incident = job.incident
    if incident is None or job.roster is None:
        return
    before = {member.rank: (member.node, member.slot) for member in job.roster.members}
    changed = {m.rank for m in roster.members if before.get(m.rank) != (m.node, m.slot)}
    places = {place.node for place in roster.places}
    job.incidents[incident.id] = replace(
        incident,
        attempts=incident.attempts + 1,
        planned=None,
        replaced=tuple(sorted({*incident.replaced, *changed})),
        nodes_replaced=incident.nodes_replaced + sum(place.node not in places for place in job.roster.places),
        epoch=roster.epoch,
    )


def _ordered(job: Job, record: Ordered) -> None:
    action = record.action
    job.orders[action.id] = action
    job.order_count += 1
    if isinstance(action, KillProcess):
        job.condemned[seat_key(action.node, action.slot)] = action.why
    elif isinstance(action, KeepStandbys):
        job.standby_orders[action.node] = action.count
    elif isinstance(action, SelfTest):
        if action.request >= EXAMINATIONS:
            job.examined[action.node] = record.at
    elif isinstance(action, TakeStacks):
        job.looked = job.current, action.epoch
    elif isinstance(action, Join | StopJob) and (incident := job.incident) and not incident.ordered:
        job.incidents[incident.id] = replace(incident, ordered=record.at)
