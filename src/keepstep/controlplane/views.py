"""The JSON that people and tools get, built from a folded mind: by a live controller, or from a log file alone.

Pure functions over the mind and log entries (``load_mind`` and ``incident_entries`` read a log). Each view carries
``schema``; fields are added, never renamed. Times are RFC 3339 in UTC, durations in milliseconds or seconds as named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep import __version__
from keepstep.controlplane.checkpoint_views import checkpoint_rows, copies_row, trouble_rows
from keepstep.controlplane.decide_views import automation_row
from keepstep.controlplane.folding import LOG_FILE
from keepstep.controlplane.moments import when
from keepstep.controlplane.pace_views import pace_rows, straggler_rows
from keepstep.core.controller import Controller
from keepstep.core.diagnose.similar import Match
from keepstep.core.locate.past import matches
from keepstep.core.recover.rosters import shortfalls
from keepstep.core.state import Incident, Job, Node
from keepstep.model.actions import TakeStacks
from keepstep.model.ids import IncidentId, JobId, Nanos, show_epoch
from keepstep.model.placement import NAMES
from keepstep.model.records import IncidentMeasured, IncidentMoved, IncidentOpened, Observed, PlanMade, SuspectNamed
from keepstep.model.settings import Policy
from keepstep.model.topology import fold_ranks
from keepstep.ports import Entry, EventLog
from keepstep.store.sqlite import open_log

INCIDENT_ENTRIES = 10_000
"""Entries shown of one incident; its first ones."""

View = dict[str, Any]


def load_mind(run_dir: str | Path, policy: Policy | None = None) -> tuple[Controller, list[Entry]]:
    """Fold the log below ``run_dir`` without a controller; also beside a live one.

    Raises:
        StoreError: there is no log, or it cannot be read.
    """
    event_log = open_log(Path(run_dir) / LOG_FILE, readonly=True)
    try:
        entries = list(event_log.read())
    finally:
        event_log.close()
    mind = Controller(policy or Policy())
    for entry in entries:
        mind.evolve(entry.record)
    return mind, entries


# ---------------------------------------------------------------- views


def status_view(mind: Controller, *, seq: int = 0) -> View:
    """One screen: every job in one row."""
    return {
        "schema": "keepstep.v1/Status",
        "version": __version__,
        "seq": seq,
        "jobs": [_job_row(job, mind.policy) for job in mind.jobs()],
    }


def jobs_view(mind: Controller) -> View:
    return {"schema": "keepstep.v1/JobList", "jobs": [_job_row(job, mind.policy) for job in mind.jobs()]}


def job_view(job: Job, policy: Policy | None = None) -> View:
    """Everything known about one job, evidence of open incidents aside."""
    return {
        "schema": "keepstep.v1/Job",
        **_job_row(job, policy or Policy()),
        "command": list(job.spec.command),
        "spec": msgspec.to_builtins(job.spec),
        "nodes": [_node_row(job, node) for node in sorted(job.nodes.values(), key=lambda node: node.arrival)],
        "standbys": [
            {"node": standby.node, "slot": standby.slot, "state": standby.state} for standby in job.standbys.values()
        ],
        "ranks": _rank_rows(job),
        "incidents": [_incident_row(job, incident) for incident in job.incidents.values()],
        "replication_gaps": [
            {"rank": rank, "step": gap.step, "since": when(gap.at), "why": gap.why}
            for rank, gap in sorted(job.gaps.items())
        ],
        "stragglers": straggler_rows(job),
        "paces": pace_rows(job),
        "shared_domains": [
            {"domain": NAMES[short.kind], "nodes": list(short.nodes), "why": short.why} for short in shortfalls(job)
        ],
    }


def stacks_view(job: Job, request: int = 0) -> View:
    """Where the processes of a job stood when that was last looked at.

    Args:
        request: only what was shown for this request or a later one.
    """
    shown = {node: fact for node, fact in job.stacks.items() if fact.request >= request}
    places = job.roster.places if job.roster is not None else ()
    asked = {a.node for a in job.orders.values() if isinstance(a, TakeStacks) and a.request >= request}
    return {
        "schema": "keepstep.v1/Stacks",
        "job": job.id,
        "taken_at": when(max((fact.at for fact in shown.values()), default=Nanos(0))),
        "missing": [place.node for place in places if place.node in asked and place.node not in shown],
        "processes": [process for fact in shown.values() for process in fact.processes],
        "positions": [position for fact in shown.values() for position in fact.positions],
        "links": [link for fact in shown.values() for link in fact.links],
    }


def incidents_view(jobs: Iterable[Job]) -> View:
    """Incidents of some jobs, oldest first."""
    rows = [_incident_row(job, incident) for job in jobs for incident in job.incidents.values()]
    return {"schema": "keepstep.v1/IncidentList", "incidents": rows}


def incident_view(mind: Controller, entries: Sequence[Entry], incident: str) -> View | None:
    """One incident with its evidence, its plans and its events; ``None`` when there is no such incident.

    Args:
        entries: of the log; those that do not belong to the incident are passed over.
    """
    found = next(
        ((job, job.incidents[IncidentId(incident)]) for job in mind.jobs() if IncidentId(incident) in job.incidents),
        None,
    )
    if found is None:
        return None
    job, one = found
    own = _of_incident(entries, job.id, one.id)
    return {
        "schema": "keepstep.v1/Incident",
        **_incident_row(job, one),
        "reason": one.reason,
        "evidence": list(one.evidence),
        "similar": [similar_row(match) for match in matches(job, one)],
        "plan": one.plan,
        "plans": [_plan(record) for record in (entry.record for entry in own) if isinstance(record, PlanMade)],
        "suspects": [_suspect(record) for record in (e.record for e in own) if isinstance(record, SuspectNamed)],
        "measured": None if one.measured is None else _measured(one.measured),
        "epoch": show_epoch(one.epoch),
        "events": [event_row(entry) for entry in own],
    }


def events_view(entries: Sequence[Entry], *, after: int, last: int) -> View:
    """A piece of the log. ``next`` is the ``after`` to go on with."""
    return {
        "schema": "keepstep.v1/EventList",
        "events": [event_row(entry) for entry in entries],
        "next": entries[-1].seq if entries else after,
        "last": max(last, entries[-1].seq if entries else 0),
    }


def event_row(entry: Entry) -> View:
    record = entry.record
    row: View = {
        "seq": entry.seq,
        "at": when(record.at),
        "job": record.job,
        "type": type(record).__name__,
    }
    if isinstance(record, Observed):
        row["fact"] = type(record.fact).__name__
    row["record"] = msgspec.to_builtins(record, str_keys=True)
    return row


def accepted_view(entries: Sequence[Entry]) -> View:
    """What a person's request led to; durable by now."""
    return {"schema": "keepstep.v1/Accepted", "events": [event_row(entry) for entry in entries]}


# ---------------------------------------------------------------- an incident's entries


def incident_entries(event_log: EventLog, incident: str, *, limit: int = INCIDENT_ENTRIES) -> list[Entry]:
    """Entries from the fact that opened the incident to the end of it, and what names it later, at most ``limit``.

    Incident ids begin with their job's id, and their records name them; so one pass over the log finds the piece.
    """
    out: list[Entry] = []
    fact: Entry | None = None
    over = False
    for entry in event_log.read():
        if isinstance(entry.record, Observed):
            fact = entry
        if not out:
            if isinstance(entry.record, IncidentOpened) and entry.record.incident == incident:
                out = [*([fact] if fact else []), entry]
            continue
        mine = _names(entry, incident) if over else entry.record.job == out[-1].record.job
        if len(out) < limit and mine:
            out.append(entry)
        over = over or _ends(entry, incident)
    return out


def _of_incident(entries: Sequence[Entry], job: JobId, incident: IncidentId) -> list[Entry]:
    """The piece of ``entries`` from the fact before the opening to the closing record, and what names it later."""
    mine = [entry for entry in entries if entry.record.job == job]
    start = next((i for i, e in enumerate(mine) if _opens(e, incident)), None)
    if start is None:
        return []
    end = next((i for i, e in enumerate(mine) if i > start and _ends(e, incident)), len(mine) - 1)
    while start > 0 and not isinstance(mine[start].record, Observed):
        start -= 1
    return [*mine[start : end + 1], *(entry for entry in mine[end + 1 :] if _names(entry, incident))]


def _names(entry: Entry, incident: str) -> bool:
    return getattr(entry.record, "incident", None) == incident


def _opens(entry: Entry, incident: str) -> bool:
    return isinstance(entry.record, IncidentOpened) and entry.record.incident == incident


def _ends(entry: Entry, incident: str) -> bool:
    match entry.record:
        case IncidentMeasured(incident=one):
            return one == incident
        case IncidentMoved(incident=one, to="ESCALATED"):
            return one == incident
        case _:
            return False


# ---------------------------------------------------------------- rows


def _job_row(job: Job, policy: Policy) -> View:
    parked = sum(1 for standby in job.standbys.values() if standby.state == "SLEEPING")
    return {
        "job": job.id,
        "state": job.state,
        "why": job.why,
        "exit_code": job.exit_code,
        "level": job.level,
        "epoch": show_epoch(job.epoch),
        "attempt": job.attempt,
        "step": job.step,
        "world_size": job.roster.world_size if job.roster else 0,
        "nodes_total": len(job.nodes),
        "nodes_training": len(job.roster.places) if job.roster else 0,
        "nodes_lost": sum(1 for node in job.nodes.values() if node.lost),
        "standbys_parked": parked,
        "incidents_total": job.incident_count,
        "incident_open": job.current,
        "submitted_at": when(job.submitted),
        "allow_inject": job.spec.allow_inject,
        "checkpoints": checkpoint_rows(job),
        "copies": copies_row(job),
        "checkpoint_troubles": trouble_rows(job),
        "ranks_without_copy": fold_ranks(sorted(job.gaps)),
        "snapshot_every": job.spec.snapshot_every,
        "snapshot_pace": job.pace,
        "automation": automation_row(job, policy),
    }


def _node_row(job: Job, node: Node) -> View:
    seats = job.roster.seats_on(node.node) if job.roster else ()
    place = job.roster.place(node.node) if job.roster else None
    parked = sum(1 for one in job.standbys.values() if one.node == node.node and one.state == "SLEEPING")
    return {
        "node": node.node,
        "host": node.host,
        "health": node.health,
        "link": node.link,
        "since": when(node.since),
        "role": "worker" if seats else "standby",
        "ranks": fold_ranks([seat.rank for seat in seats]),
        "standbys_parked": parked,
        "rack": node.rack or None,
        "buddy": place.buddy if place else None,
        "faults": len(node.faults),
    }


def _rank_rows(job: Job) -> list[View]:
    rows = []
    for member in job.roster.members if job.roster else ():
        progress = job.progress.get(member.rank)
        rows.append(
            {
                "rank": member.rank,
                "node": member.node,
                "slot": member.slot,
                "local_rank": member.local_rank,
                "newcomer": member.newcomer,
                "step": progress.step if progress else 0,
                "resumed": progress is not None and progress.resumed is not None,
                "advanced": progress is not None and progress.advanced,
                "done": progress is not None and progress.done,
            }
        )
    return rows


def _incident_row(job: Job, incident: Incident) -> View:
    measured = incident.measured
    return {
        "id": incident.id,
        "job": job.id,
        "number": incident.number,
        "state": incident.state,
        "title": incident.reason or incident.title,
        "symptom": incident.title,
        "why": incident.why,
        "category": incident.category,
        "root_cause": incident.root_cause,
        "code": incident.code,
        "node": incident.node,
        "ranks": fold_ranks(incident.suspects),
        "probability": incident.probability,
        "rung": incident.rung,
        "attempts": incident.attempts,
        "acked": incident.acked or None,
        "merged": incident.merged,
        "onset_at": when(incident.onset),
        "opened_at": when(incident.opened),
        "closed_at": when(incident.closed),
        "recover_ms": measured.recover_ms if measured else None,
        "steps_lost": measured.steps_lost if measured else None,
        "survivors_kept": measured.survivors_kept if measured else None,
        "survivors_possible": measured.survivors_possible if measured else None,
    }


def _plan(plan: PlanMade) -> View:
    return {
        "at": when(plan.at),
        "rung": plan.rung,
        "attempt": plan.attempt,
        "reason": plan.reason,
        "rejected": list(plan.rejected),
        "cost_if_wrong": plan.cost_if_wrong,
    }


def _suspect(suspect: SuspectNamed) -> View:
    return {
        "at": when(suspect.at),
        "category": suspect.category,
        "node": suspect.node,
        "ranks": fold_ranks(suspect.ranks),
        "probability": suspect.probability,
        "reason": suspect.reason,
        "root_cause": suspect.root_cause,
        "code": suspect.code,
        "leave": suspect.leave,
        "evidence": list(suspect.evidence),
    }


def similar_row(match: Match) -> View:
    """A past incident that is like this one: what both have in common, what was done, how it ended."""
    past = match.past
    return {
        "id": past.id,
        "job": past.job,
        "at": when(Nanos(int(past.at * 1e9))),
        "same": list(match.same),
        "title": past.title,
        "category": past.category,
        "node": past.case.node or None,
        "done": past.done,
        "ended": past.ended,
        "took_s": past.took_s,
    }


def _measured(measured: IncidentMeasured) -> View:
    return {
        "detect_ms": measured.detect_ms,
        "locate_ms": measured.locate_ms,
        "decide_ms": measured.decide_ms,
        "recover_ms": measured.recover_ms,
        "phases_ms": measured.phases,
        "survivors_kept": measured.survivors_kept,
        "survivors_possible": measured.survivors_possible,
        "steps_lost": measured.steps_lost,
        "replaced": fold_ranks(measured.replaced),
    }
