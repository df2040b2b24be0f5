"""Commands that look: status, jobs, job, incidents, incident, doctor, version.

Each is a question to a source, rows, and a next command.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import keepstep
from keepstep.checkpoint import room
from keepstep.cli import dirs, doctor
from keepstep.cli.copies import copies_line, trouble_lines
from keepstep.cli.errors import DoorError, NotFound
from keepstep.cli.local import add_local
from keepstep.cli.render import Column, Form, check_form, fold_nodes, paint, show
from keepstep.cli.slow import slow_lines
from keepstep.cli.source import Source, find, of_run
from keepstep.cli.where import Where
from keepstep.model.records import SCHEMA, AnyRecord
from keepstep.model.wire import PROTOCOL

JOB_COLUMNS = (
    Column("JOB", "job"),
    Column("STATE", "state"),
    Column("STEP", "step"),
    Column("RANKS", "world_size"),
    Column("NODES", "nodes_training"),
    Column("LOST", "nodes_lost"),
    Column("STANDBYS", "standbys_parked"),
    Column("INCIDENTS", "incidents_total"),
    Column("OPEN", "incident_open"),
    Column("EXIT", "exit_code"),
    Column("LEVEL", "level", wide=True),
    Column("EPOCH", "epoch", wide=True),
    Column("ATTEMPT", "attempt", wide=True),
    Column("DURABLE", "durable", wide=True),
    Column("NO_COPY", "ranks_without_copy", wide=True),
    Column("BEHIND", "behind", wide=True),
    Column("MODE", "mode", wide=True),
    Column("ASKED", "asked", wide=True),
    Column("SUBMITTED", "submitted_at", wide=True),
    Column("RUN_DIR", "run_dir", wide=True),
    Column("REASON", "why"),
)
NODE_COLUMNS = (
    Column("NODES", "nodes"),
    Column("ROLE", "role"),
    Column("HEALTH", "health"),
    Column("LINK", "link"),
    Column("RANKS", "ranks"),
    Column("STANDBYS", "standbys_parked"),
    Column("FAULTS", "faults"),
)
RANK_COLUMNS = (
    Column("RANK", "rank"),
    Column("NODE", "node"),
    Column("PID", "pid"),
    Column("STEP", "step"),
    Column("SLOT", "slot", wide=True),
    Column("LOCAL", "local_rank", wide=True),
    Column("NEWCOMER", "newcomer"),
    Column("DONE", "done"),
)
INCIDENT_COLUMNS = (
    Column("ID", "id"),
    Column("STATE", "state"),
    Column("CATEGORY", "category"),
    Column("NODE", "node"),
    Column("RANKS", "ranks"),
    Column("RUNG", "rung"),
    Column("RECOVERY_MS", "recover_ms"),
    Column("STEPS_LOST", "steps_lost"),
    Column("KEPT", "survivors_kept"),
    Column("P", "probability", wide=True),
    Column("OPENED", "opened_at", wide=True),
    Column("CLOSED", "closed_at", wide=True),
    Column("REASON", "title"),
)
CHECKPOINT_COLUMNS = (
    Column("CHECKPOINT", "tier"),
    Column("STEP", "step"),
    Column("AGE", "age"),
    Column("VERIFIED", "verified"),
    Column("SIZE", "size"),
    Column("TOOK_S", "seconds"),
    Column("SAVED", "saved_at", wide=True),
)
FINDING_COLUMNS = (Column("CHECK", "check"), Column("STATE", "state"), Column("FOUND", "found"), Column("HELP", "help"))


def show_status(where: Where, job: str, output: str) -> int:
    form = check_form(output)
    source = find(where, job)
    answer = source.status()
    answer["live"] = source.live
    rows = [row for row in answer["jobs"] if not job or source.run_dir is not None or row["job"].startswith(job)]
    people = form in ("table", "wide") and sys.stdout.isatty()
    full = {}
    for row in rows if people or source.run_dir is not None else ():
        full[row["job"]] = add_local(source, source.job(row["job"]))
        row["step"] = full[row["job"]]["step"]
    show(answer, [told(row) for row in rows], JOB_COLUMNS, form)
    trouble = answer.get("controller", {}).get("why")
    if trouble:
        hint(f"the controller is not deciding: {trouble}")
    if people:
        for row in rows:
            print()
            show(answer, fold_rows(full[row["job"]]["nodes"]), NODE_COLUMNS, form)
            show_checkpoints(row, form)
            if row["incident_open"]:
                print()
                print("\n".join(block(source, row["incident_open"], timeline=False)))
    open_ones = [row["incident_open"] for row in rows if row["incident_open"]]
    if open_ones:
        hint(f"next: keepstep incident {open_ones[0]} --timeline")
    elif asked := [row["job"] for row in rows if row.get("automation", {}).get("proposals_open")]:
        hint(f"next: keepstep proposals {asked[0]}")
    elif rows:
        hint(f"next: keepstep job {rows[0]['job']} | keepstep incidents {rows[0]['job']}")
    return 0


def show_jobs(where: Where, output: str) -> int:
    form = check_form(output)
    rows: list[dict[str, Any]] = []
    if where.server:
        rows = list(find(where).jobs()["jobs"])
    else:
        runs = dirs.all_runs(dirs.state_dir(where.state_dir or None))
        if not runs:
            raise NotFound("there are no runs yet", help="start one: keepstep run train.py")
        for run in runs:
            rows += _rows_of(run, where.token_file)
    show({"schema": "keepstep.v1/JobList", "jobs": rows}, [told(row) for row in rows], JOB_COLUMNS, form)
    if rows:
        hint(f"next: keepstep job {rows[0]['job']}")
    return 0


def _rows_of(run_dir: Path, token_file: str) -> list[dict[str, Any]]:
    """The jobs of one run directory; a run that cannot be read is shown as such, and hides no other."""
    try:
        source = of_run(run_dir, token_file, quiet=True)
        found = source.jobs()["jobs"]
    except DoorError as error:
        return [_row_of_exit(run_dir, str(error))]
    return [{**row, "run_dir": str(run_dir), "live": source.live} for row in found] or [
        {
            "job": run_dir.name,
            "state": "PENDING",
            "why": "no agent has reported yet",
            "run_dir": str(run_dir),
            "live": source.live,
        }
    ]


def _row_of_exit(run_dir: Path, why: str) -> dict[str, Any]:
    """What a node knows of a job whose controller was elsewhere: how its own part ended, if it has."""
    row = {"job": run_dir.name, "state": "UNKNOWN", "why": why, "run_dir": str(run_dir), "live": dirs.is_live(run_dir)}
    with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
        said = msgspec.json.decode((run_dir / "exit.json").read_bytes(), type=dict[str, Any])
        row |= {"exit_code": said["code"], "step": said.get("last_step"), "why": said["why"]}
    return row


def show_job(where: Where, job: str, output: str) -> int:
    form = check_form(output)
    source = find(where, job)
    answer = add_local(source, source.job(job_name(source, job)))
    if form in ("table", "wide") and sys.stdout.isatty():
        show(answer, [told(answer)], JOB_COLUMNS, form)
        show_checkpoints(answer, form)
        print("".join(f"{line}\n" for line in slow_lines(answer)), end="")
        for rows, columns in (
            (fold_rows(answer["nodes"]), NODE_COLUMNS),
            (answer["ranks"], RANK_COLUMNS),
            (answer["incidents"], INCIDENT_COLUMNS),
        ):
            if rows:
                print()
                show(answer, rows, columns, form)
    else:
        show(answer, answer["ranks"], RANK_COLUMNS, form)
    hint(f"next: keepstep logs {answer['job']} | keepstep incidents {answer['job']}")
    return 0


def show_checkpoints(job: Mapping[str, Any], form: Form) -> None:
    """What a job could fall back on, and what it lacks; nothing where there is nothing to say."""
    now_s = time.time()
    if rows := checkpoint_rows(job, now_s):
        print()
        show(job, rows, CHECKPOINT_COLUMNS, form)
    lines = [copies_line(job, lambda at: age(at, now_s)), *trouble_lines(job, lambda at: age(at, now_s))]
    print("".join(f"{line}\n" for line in lines if line), end="")
    for short in job.get("shared_domains", ()):
        print(f"copies share their {short['domain']}: {fold_nodes(short['nodes'])} ({short['why']})")
    if pace := job.get("snapshot_pace"):
        print(f"snapshots: {pace}")


def checkpoint_rows(job: Mapping[str, Any], now_s: float) -> list[dict[str, Any]]:
    """The newest generation of each durable tier, with its age and size as people read them."""
    return [
        {**row, "age": age(row["saved_at"], now_s), "size": room.show(row["bytes"])}
        for row in job.get("checkpoints", ())
    ]


def told(row: Mapping[str, Any]) -> dict[str, Any]:
    """A job's row with its durable generations as one cell, what is behind as another, and what people are asked."""
    tiers = row.get("checkpoints") or ()
    cells = [f"{one['tier']}:{one['step']}{'' if one['verified'] else ' (not verified)'}" for one in tiers]
    behind = [f"{one['tier']}:{one['what']}" for one in row.get("checkpoint_troubles") or ()]
    automation = row.get("automation") or {}
    decided = {"mode": automation.get("mode"), "asked": " ".join(automation.get("proposals_open", ()))}
    return {**row, "durable": " ".join(cells), "behind": " ".join(behind), **decided}


def age(at: str | None, now_s: float) -> str:
    """``14 s``, ``3 min``, ``5 h``, ``2 d`` since a time of the log; clocks may differ a little."""
    if at is None:
        return "-"
    seconds = max(0.0, now_s - datetime.datetime.fromisoformat(at).timestamp())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_incidents(where: Where, job: str, output: str) -> int:
    form = check_form(output)
    source = find(where, job)
    answer = source.incidents(job_name(source, job))
    rows = answer["incidents"]
    show(answer, rows, INCIDENT_COLUMNS, form)
    hint(f"next: keepstep incident {rows[-1]['id']}" if rows else "no incident so far")
    return 0


def show_incident(where: Where, incident: str, timeline: bool, output: str) -> int:
    form = check_form(output)
    source, name = find_incident(where, incident)
    if form in ("table", "wide"):
        lines = block(source, name, timeline=timeline)
        print(paint(lines[0], "bold"))
        print("\n".join(lines[1:]))
    else:
        answer = source.incident(name)
        rows = answer["events"] if timeline else [answer]
        show(answer, rows, EVENT_COLUMNS if timeline else INCIDENT_COLUMNS, form)
    if not timeline:
        hint(f"next: keepstep incident {name} --timeline")
    return 0


EVENT_COLUMNS = (Column("SEQ", "seq"), Column("AT", "at"), Column("TYPE", "type"), Column("FACT", "fact"))


def find_incident(where: Where, incident: str) -> tuple[Source, str]:
    """``i3`` or ``3``: of the latest run; ``JOB-i3``: of that job, wherever it is kept."""
    number = incident.removeprefix("i")
    if number.isdecimal():
        source = find(where)
        return source, f"{job_name(source, '')}-i{number}"
    job = incident.rpartition("-i")[0]
    try:
        return find(where, job), incident
    except NotFound as error:
        raise NotFound(f"there is no incident {incident}: {error}", help="`keepstep incidents` lists them") from error


def block(source: Source, incident: str, *, timeline: bool) -> list[str]:
    """The incident as text, written by the same functions for a live controller and for a log."""
    from keepstep.core.summary import incident_block, incident_timeline

    answer = source.incident(incident)
    records = [event["record"] for event in answer["events"]]
    own = [msgspec.convert(record, AnyRecord, strict=False) for record in records]
    if timeline:
        return incident_timeline(own, incident)
    *lines, last = incident_block(own, incident)
    return [*lines, *(f"  = {line}" for line in before_lines(answer.get("similar", ()))), last]


def before_lines(similar: Sequence[Mapping[str, Any]]) -> list[str]:
    """Past incidents that were like this one: what they have in common, what was done, how that ended."""
    lines = []
    for one in similar:
        took = "" if one["took_s"] is None else f" in {one['took_s']:.1f} s"
        ended = str(one["ended"]).partition(":")[0]
        lines.append(
            f"before: {one['id']}, same {' and '.join(one['same'])}: {one['done'] or 'nothing done'}, {ended}{took}"
        )
    return lines


def job_name(source: Source, job: str) -> str:
    """The one job of a run; of several jobs of a controller, the one that is meant."""
    names = [row["job"] for row in source.jobs()["jobs"]]
    if not names:
        raise NotFound("no agent has reported to this controller yet", help="try again in a moment")
    found = [name for name in names if name == job] or [name for name in names if name.startswith(job)]
    if len(found) == 1:
        return str(found[0])
    if source.run_dir is not None and len(names) == 1:
        return str(names[0])
    raise NotFound(f"which job? {', '.join(names)}", help="name one of them")


def fold_rows(nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Nodes that are alike, in one row: ``node[001-064]``."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for node in nodes:
        groups.setdefault((node["role"], node["health"], node["link"], node["faults"]), []).append(node)
    return [
        {
            **alike[0],
            "nodes": fold_nodes([node["node"] for node in alike]),
            "ranks": ",".join(node["ranks"] for node in alike if node["ranks"] != "-") or "-",
            "standbys_parked": sum(node["standbys_parked"] for node in alike),
        }
        for alike in groups.values()
    ]


def show_doctor(output: str) -> int:
    form = check_form(output)
    findings = [msgspec.to_builtins(finding) for finding in doctor.examine()]
    show({"schema": "keepstep.v1/Doctor", "findings": findings}, findings, FINDING_COLUMNS, form)
    bad = [finding["check"] for finding in findings if finding["state"] == "bad"]
    hint(f"not fit yet: {', '.join(bad)}" if bad else "next: keepstep demo")
    return 1 if bad else 0


def show_version(output: str) -> int:
    form = check_form(output)
    answer = {
        "schema": "keepstep.v1/Version",
        "version": keepstep.__version__,
        "protocol": PROTOCOL,
        "log_schema": SCHEMA,
        "python": sys.version.split()[0],
    }
    columns = [Column(key.upper(), key) for key in answer if key != "schema"]
    show(answer, [answer], columns, form)
    return 0


def hint(line: str) -> None:
    """For people: on stderr, and only where somebody looks."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
