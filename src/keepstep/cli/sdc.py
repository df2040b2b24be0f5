"""``keepstep sdc``: investigations of silent data corruption, as people see and move them."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter

from keepstep.cli.errors import UsageError
from keepstep.cli.options import Job as JobName
from keepstep.cli.options import Json, Output, Server, State, Token, form
from keepstep.cli.order import who
from keepstep.cli.render import Column, check_form, show
from keepstep.cli.say import say
from keepstep.cli.show import hint, job_name
from keepstep.cli.source import Source, find
from keepstep.cli.where import Where

app = App(name="sdc", help="Investigations of silent data corruption: who is suspected, what was tested, the verdict.")
COLUMNS = (
    Column("ID", "id"),
    Column("STATE", "state"),
    Column("RANKS", "ranks"),
    Column("NODES", "where"),
    Column("STEP", "step"),
    Column("CLEAN_STEP", "clean_step"),
    Column("P", "probability"),
    Column("TENSOR", "tensor", wide=True),
    Column("INCIDENT", "incident", wide=True),
    Column("OPENED", "opened_at", wide=True),
    Column("WHY", "why"),
)
Why = Annotated[str, Parameter(help="Reason, for the log")]
Name = Annotated[
    str, Parameter(help="Investigation, as `keepstep sdc ls` names it; `sdc3` or 3 is the third of the latest run")
]


@app.command(name="ls")
def list_(
    job: JobName = "",
    *,
    history: Annotated[bool, Parameter(negative="", help="Every step of each, with its evidence")] = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """What is and was investigated."""
    shape = check_form(form(output, json))
    source = find(Where(server=server, token_file=token_file, state_dir=state_dir), job)
    answer = source.investigations(job_name(source, job))
    rows = answer["investigations"]
    show(answer, [{**row, "where": ",".join(row["nodes"])} for row in rows], COLUMNS, shape)
    if history and shape in ("table", "wide"):
        for row in rows:
            print(f"\n{row['id']}")
            print("\n".join(f"  {line}" for line in row["history"]))
    ongoing = [row for row in rows if row["open"]]
    if not rows:
        hint("nothing is suspected")
    elif ongoing:
        hint(f"next: keepstep sdc close {ongoing[-1]['id']} --cleared|--confirmed | keepstep sdc ls --history")
    return 0


@app.command(name="open")
def open_(
    job: Annotated[str, Parameter(help="Job, or the beginning of its name")],
    *,
    rank: Annotated[list[int], Parameter(negative="", help="Rank that is suspected; may be given several times")],
    why: Why,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Suspect ranks; `sdc step ID SOAK` has their nodes examine themselves."""
    shape = check_form(form(output, json))
    source = find(Where(server=server, token_file=token_file, state_dir=state_dir), job)
    name = job_name(source, job)
    return _tell(source.post("jobs", name, "sdc", body={"ranks": list(rank), "why": why, "by": who()}), shape)


@app.command
def step(
    id: Name,
    state: Annotated[str, Parameter(help="REPLAY, VOTE, SOAK, CONFIRMED or CLEARED")],
    *,
    why: Why,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Move an investigation on by hand; SOAK orders the self-test of the suspect's node."""
    shape = check_form(form(output, json))
    source, job, name = _named(Where(server=server, token_file=token_file, state_dir=state_dir), id)
    body = {"state": state.upper(), "why": why, "by": who()}
    return _tell(source.post("jobs", job, "sdc", name, "step", body=body), shape)


@app.command
def close(
    id: Name,
    *,
    confirmed: Annotated[bool, Parameter(negative="", help="It is the machine: propose to take it out")] = False,
    cleared: Annotated[bool, Parameter(negative="", help="It is not: checkpoints are no longer tainted")] = False,
    why: Why = "by a person",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """End an investigation with a verdict."""
    shape = check_form(form(output, json))
    if confirmed == cleared:
        raise UsageError("say what it came to", help="either --confirmed or --cleared")
    source, job, name = _named(Where(server=server, token_file=token_file, state_dir=state_dir), id)
    body = {"verdict": "confirmed" if confirmed else "cleared", "why": why, "by": who()}
    return _tell(source.post("jobs", job, "sdc", name, "close", body=body), shape)


def _named(where: Where, name: str) -> tuple[Source, str, str]:
    """``3``, ``sdc3``: of the latest run; ``JOB-sdc3``: of that job."""
    if not re.fullmatch(r"(.+-)?(sdc)?\d+", name):
        raise UsageError(f"{name!r} names no investigation", help="`keepstep sdc ls` lists them")
    job = name.rpartition("-sdc")[0]
    source = find(where, job)
    of = job_name(source, job)
    return source, of, name if job else f"{of}-sdc{name.removeprefix('sdc')}"


def _tell(answer: dict[str, Any], shape: str) -> int:
    if shape in ("json", "jsonl"):
        print(jsonlib.dumps(answer))
        return 0
    lines: Sequence[str] = answer["answer"]
    for line in lines:
        say(" ".join(line.split()))
    hint("next: keepstep sdc ls --history")
    return 0
