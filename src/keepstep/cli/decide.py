"""Commands by which people decide: proposals, approve, reject, undo, ack, merge, freeze, thaw, mode.

Each names the job it means by the id that it is given, says what it will do, asks where living nodes are touched, and
ends with what the log made of it. Said twice, they are a quiet success.
"""

from __future__ import annotations

import json
import re
from typing import Any

from keepstep.cli.errors import NotFound, UsageError, closest
from keepstep.cli.order import agreed, who
from keepstep.cli.render import Column, check_form, paint, show
from keepstep.cli.say import say
from keepstep.cli.show import find_incident, hint, job_name
from keepstep.cli.source import Source, find
from keepstep.cli.where import Where

MODES = ("observe", "assist", "auto")
PROPOSAL_COLUMNS = (
    Column("ID", "id"),
    Column("STATE", "state"),
    Column("KIND", "kind"),
    Column("NODES", "where"),
    Column("RANKS", "ranks"),
    Column("P", "probability"),
    Column("BY", "by"),
    Column("HELD", "held"),
    Column("INCIDENT", "incident", wide=True),
    Column("OPENED", "opened_at", wide=True),
    Column("COST_IF_WRONG", "cost_if_wrong", wide=True),
    Column("REASON", "reason"),
)


def show_proposals(where: Where, job: str, *, every: bool, output: str) -> int:
    """Open ones first; ``every`` shows those that are over, too."""
    form = check_form(output)
    source = find(where, job)
    name = job_name(source, job)
    answer = source.proposals(name)
    rows = [one for one in answer["proposals"] if every or one["open"]]
    answer["proposals"] = rows
    show(answer, [{**row, "where": ",".join(row["nodes"])} for row in rows], PROPOSAL_COLUMNS, form)
    waiting = [row for row in rows if row["state"] == "PROPOSED"]
    if waiting:
        hint(f"next: keepstep approve {waiting[0]['id']} | keepstep reject {waiting[0]['id']}")
    elif not rows:
        hint("no open proposal" if not every else "no proposal so far")
    return 0


def approve(where: Where, proposal: str, *, why: str, yes: bool, dry_run: bool, output: str) -> int:
    source, job, one = _proposal(where, proposal)
    nodes = ", ".join(one["nodes"])
    plan = f"take node {nodes} out of job {job} and give its ranks to a spare ({one['reason']})"
    if one["state"] == "PROPOSED":
        if one["held"]:
            say(f"held so far: {one['held']}")
        say(f"if that is wrong: {one['cost_if_wrong']}")
        if not agreed(plan, yes=yes, dry_run=dry_run):
            return 0 if dry_run else 1
    return _tell(source, job, "approve", {"subject": one["id"], "why": why}, output)


def reject(where: Where, proposal: str, *, why: str, output: str) -> int:
    source, job, one = _proposal(where, proposal)
    return _tell(source, job, "reject", {"subject": one["id"], "why": why}, output)


def undo(where: Where, subject: str, *, job: str, why: str, yes: bool, dry_run: bool, output: str) -> int:
    """``subject``: a proposal, an incident, or a node of ``job``."""
    if re.fullmatch(r"(.+-)?p\d+", subject) and not job:
        source, name, one = _proposal(where, subject)
        subject, nodes = one["id"], one["nodes"]
    elif re.fullmatch(r"(.+-)?i\d+", subject) and not job:
        source, subject = find_incident(where, subject)
        name, nodes = subject.rpartition("-i")[0], ["that it took out"]
    else:
        source = find(where, job)
        name, nodes = job_name(source, job), [subject]
    plan = f"let job {name} use node {', '.join(nodes)} again"
    if not agreed(plan, yes=yes, dry_run=dry_run):
        return 0 if dry_run else 1
    return _tell(source, name, "undo", {"subject": subject, "why": why}, output)


def ack(where: Where, incident: str, *, why: str, output: str) -> int:
    source, name = find_incident(where, incident)
    return _tell(source, name.rpartition("-i")[0], "ack", {"subject": name, "why": why}, output)


def merge(where: Where, incident: str, into: str, *, why: str, output: str) -> int:
    source, name = find_incident(where, incident)
    job = name.rpartition("-i")[0]
    other = f"{job}-i{into.removeprefix('i')}" if into.removeprefix("i").isdecimal() else into
    return _tell(source, job, "merge", {"subject": name, "other": other, "why": why}, output)


def freeze(where: Where, job: str, *, why: str, thaw: bool, output: str) -> int:
    source = find(where, job)
    return _tell(source, job_name(source, job), "thaw" if thaw else "freeze", {"why": why}, output)


def set_mode(where: Where, job: str, mode: str, *, why: str, output: str) -> int:
    if mode not in MODES:
        near = closest(mode, MODES)
        raise UsageError(
            f"{mode!r} is not a mode", help=f"did you mean {near}?" if near else f"say one of {', '.join(MODES)}"
        )
    source = find(where, job)
    return _tell(source, job_name(source, job), "mode", {"other": mode, "why": why}, output)


def _proposal(where: Where, name: str) -> tuple[Source, str, dict[str, Any]]:
    """``p3`` or ``3``: of the latest run; ``JOB-p3``: of that job; an incident: the open one that came out of it."""
    if re.fullmatch(r"(.+-)?i\d+", name):
        source, incident = find_incident(where, name)
        of = incident.rpartition("-i")[0]
        for row in source.proposals(of)["proposals"]:
            if row["open"] and row["incident"] == incident:
                return source, of, row
        raise NotFound(f"no open proposal came out of incident {incident}", help=f"`keepstep proposals {of}`")
    number = name.removeprefix("p")
    job = "" if number.isdecimal() else name.rpartition("-p")[0]
    source = find(where, job)
    of = job_name(source, job)
    wanted = f"{of}-p{number}" if number.isdecimal() else name
    rows = source.proposals(of)["proposals"]
    for row in rows:
        if row["id"] == wanted:
            return source, of, row
    known = ", ".join(row["id"] for row in rows[-8:]) or "none so far"
    raise NotFound(f"job {of} has no proposal {wanted}; there is {known}", help=f"`keepstep proposals {of} --all`")


def _tell(source: Source, job: str, verb: str, body: dict[str, str], output: str) -> int:
    """Say it, and show what the log made of it: on stdout for tools, in words on stderr for people."""
    form = check_form(output)
    answer = source.post("jobs", job, verb, body={**{key: text for key, text in body.items() if text}, "by": who()})
    if form in ("json", "jsonl"):
        print(json.dumps(answer))
        return 0
    for line in answer["answer"]:
        say(paint(" ".join(line.split()), "bold") if not answer["already"] else f"nothing to do: {line}")
    return 0
