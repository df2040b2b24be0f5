"""The commands besides ``run`` and ``demo``: names, arguments, help. The work is done elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

import keepstep
from keepstep.cli import ckpt, people, sdc
from keepstep.cli.errors import UsageError
from keepstep.cli.options import Job as JobName
from keepstep.cli.options import Json, Output, Server, State, Token, form
from keepstep.cli.where import Where

Fault = Literal["kill", "freeze", "node-loss", "controller-loss", "store-loss", "exception", "slow"]
app = App(
    name="keepstep",
    help="Training never stops: one dead rank is replaced, the others keep their processes.",
    version=keepstep.__version__,
    version_flags=["--version", "-V"],
    help_on_error=False,
    result_action="return_value",
)


def dispatch(words: Sequence[str]) -> int:
    """Run a command; every mistake becomes a ``UsageError``."""
    try:
        result = app(list(words), exit_on_error=False, print_error=False, help_on_error=False)
    except CycloptsError as error:
        command = " ".join(["keepstep", *(word for word in words[:1] if not word.startswith("-"))])
        raise UsageError(_sentence(error), help=f"`{command} --help` shows how it is called") from error
    return result if isinstance(result, int) else 0


def _sentence(error: CycloptsError) -> str:
    return " ".join(str(error).split()).rstrip(".")


@app.command
def status(
    job: JobName = "",
    *,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """One screen: the job, its nodes, its standbys, what is wrong and what is done about it."""
    from keepstep.cli.show import show_status

    return show_status(Where(server=server, token_file=token_file, state_dir=state_dir), job, form(output, json))


@app.command
def jobs(
    *, server: Server = "", token_file: Token = "", state_dir: State = "", output: Output = "table", json: Json = False
) -> int:
    """The runs of this machine (or the jobs of --server), the newest first."""
    from keepstep.cli.show import show_jobs

    return show_jobs(Where(server=server, token_file=token_file, state_dir=state_dir), form(output, json))


@app.command
def job(
    job: JobName = "",
    *,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """One job in full: ranks, nodes, incidents."""
    from keepstep.cli.show import show_job

    return show_job(Where(server=server, token_file=token_file, state_dir=state_dir), job, form(output, json))


@app.command
def incidents(
    job: JobName = "",
    *,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """What went wrong in a job, and what it cost."""
    from keepstep.cli.show import show_incidents

    return show_incidents(Where(server=server, token_file=token_file, state_dir=state_dir), job, form(output, json))


incident = App(name="incident", help="One incident: who, why, what was done, what it cost.")
app.command(incident)


@incident.default
def incident_page(
    id: Annotated[
        str, Parameter(help="Incident, as `keepstep incidents` names it; `i3` is the third of the latest run")
    ],
    *,
    timeline: Annotated[bool, Parameter(negative="", help="Every record from the first evidence to the end")] = False,
    evidence: Annotated[bool, Parameter(negative="", help="Every line of evidence, with who says so")] = False,
    stacks: Annotated[bool, Parameter(negative="", help="Where the processes stood when they were looked at")] = False,
    trace: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True, help="Write Chrome trace events to this file (- for stdout); opens in Perfetto"
        ),
    ] = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """One incident: who, why, what was done, what it cost."""
    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    if evidence or stacks or trace:
        from keepstep.cli.incident import show_pages

        pages = {"evidence": evidence, "stacks": stacks, "timeline": timeline}
        return show_pages(where, id, pages, trace=trace, output=form(output, json))
    from keepstep.cli.show import show_incident

    return show_incident(where, id, timeline, form(output, json))


people.register(app, incident)


@app.command
def logs(
    job: JobName = "",
    *,
    rank: Annotated[int | None, Parameter(help="Only this rank")] = None,
    first_error: Annotated[bool, Parameter(negative="", help="The earliest failure that explains the others")] = False,
    follow: Annotated[bool, Parameter(["--follow", "-f"], negative="", help="Go on until the job ends")] = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
) -> int:
    """The ranks' output, equal lines of several ranks folded into one."""
    from keepstep.cli.logs import show_logs

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return show_logs(where, job, rank=rank, first_error=first_error, follow=follow)


@app.command
def stacks(
    job: JobName = "",
    *,
    rank: Annotated[list[int] | None, Parameter(negative="", help="Only this rank; may be repeated")] = None,
    group: Annotated[
        bool, Parameter(negative="", help="One tree of calls, each set of ranks where it goes its own way")
    ] = False,
    every: Annotated[bool, Parameter(negative="", help="Each process, not one of each place")] = False,
    threads: Annotated[bool, Parameter(negative="", help="All threads, not the main one alone")] = False,
    native: Annotated[
        bool, Parameter(negative="", help="Frames of C and C++ libraries, too; stops each process for a moment")
    ] = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Where every process of a job stands now; ranks in the same place put together, the odd ones named."""
    from keepstep.cli.stacks import show_stacks

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return show_stacks(
        where,
        job,
        ranks=rank or [],
        native=native,
        every=every,
        threads=threads,
        group=group,
        form=form(output, json),
    )


@app.command
def explain(
    what: Annotated[
        list[str] | None,
        Parameter(
            help="Log files of one job, `-` for stdin, or a code: `xid 79`, `exit 137`", allow_leading_hyphen=True
        ),
    ] = None,
    /,
    *,
    json: Annotated[bool, Parameter("--json", negative="", help="The whole answer as JSON")] = False,
    jsonl: Annotated[
        bool, Parameter("--jsonl", negative="", help="Read JSON objects with a `log`, one a line; answer one a line")
    ] = False,
    history: Annotated[
        list[str] | None,
        Parameter(
            "--history",
            negative="",
            help="Earlier incidents to compare with: a run, a folder of runs, an event log, JSON lines",
        ),
    ] = None,
) -> int:
    """What a log or a fault code means: category, culprit, evidence, what to do. Needs no controller."""
    from keepstep.cli.explain import show_explanation

    return show_explanation(what or [], as_json=json, jsonl=jsonl, history=history)


@app.command
def inject(
    fault: Annotated[Fault, Parameter(help="What to break")],
    *,
    job: Annotated[str, Parameter("--job", help="Job; the latest run if left out")] = "",
    rank: Annotated[int | None, Parameter(help="Rank to hurt")] = None,
    node: Annotated[str, Parameter(help="Node to lose")] = "",
    seconds: Annotated[
        float, Parameter(help="How long a slow step takes, or a freeze lasts (0: until replaced)")
    ] = 0.0,
    yes: Annotated[bool, Parameter(["--yes", "-y"], negative="", help="Do not ask")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Only say what would be done")] = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
) -> int:
    """Break something on purpose, in a job that was started with --allow-inject."""
    from keepstep.cli.order import order_fault

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return order_fault(where, job, fault, rank=rank, node=node, seconds=seconds, yes=yes, dry_run=dry_run)


@app.command
def stop(
    job: Annotated[str, Parameter(help="Job, or the beginning of its name")],
    *,
    why: Annotated[str, Parameter(help="Reason, for the log")] = "asked to",
    yes: Annotated[bool, Parameter(["--yes", "-y"], negative="", help="Do not ask")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Only say what would be done")] = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
) -> int:
    """End a job on all its nodes."""
    from keepstep.cli.order import order_stop

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return order_stop(where, job, why=why, yes=yes, dry_run=dry_run)


@app.command
def controller(
    *,
    run_dir: Annotated[str, Parameter(help="Directory of its log; made when missing")],
    listen: Annotated[str, Parameter(help="HOST:PORT for agents")] = "127.0.0.1:29400",
    http_port: Annotated[int, Parameter(help="Port for people and tools; 0 takes a free one")] = 0,
    mode: Annotated[
        Literal["observe", "assist", "auto"],
        Parameter(help="The most that automation may do to living nodes, in all jobs until a person says more"),
    ] = "observe",
    protect: Annotated[str, Parameter(help="Nodes that only a person may take out, with commas between them")] = "",
    token_file: Token = "",
) -> int:
    """Run a controller in the foreground, for jobs that are started with --controller HOST:PORT."""
    from keepstep.cli.order import run_controller

    return run_controller(run_dir, listen, http_port, token_file, mode=mode, protect=protect)


app.command(ckpt.app)
app.command(sdc.app)


@app.command
def selftest(
    *,
    test: Annotated[Literal["all", "gemm", "memory"], Parameter(help="What to examine")] = "all",
    seconds: Annotated[float, Parameter(help="Budget; one round is done in any case")] = 10.0,
    seed: Annotated[int, Parameter(help="Equal seeds give equal digests on sound machines")] = 1,
    share: Annotated[float, Parameter(help="Of this machine's processors, for a machine that has work to do")] = 1.0,
    output: Output = "table",
    json: Json = False,
) -> int:
    """Examine this machine: products with known results, core by core and device by device. 1 when one fails."""
    from keepstep.cli.selftest import examine

    return examine(test, seconds=seconds, seed=seed, share=share, output=form(output, json))


token = App(name="token", help="Secrets that agents, controllers and commands share.")
app.command(token)


@token.command(name="new")
def token_new(file: Annotated[str, Parameter(help="Where to write it; never overwritten")]) -> int:
    """Make a token (mode 0600)."""
    from pathlib import Path

    from keepstep.cli import tokens

    tokens.new(Path(file))
    print(f"wrote {file}; give it to every node and command: --token-file {file}", file=sys.stderr)
    return 0


@app.command
def doctor(*, output: Output = "table", json: Json = False) -> int:
    """Check this machine: kernel, memory, versions. Exit code 1 when something is missing."""
    from keepstep.cli.show import show_doctor

    return show_doctor(form(output, json))


@app.command
def version(*, output: Output = "table", json: Json = False) -> int:
    """Version of keepstep, its protocol and its log."""
    from keepstep.cli.show import show_version

    return show_version(form(output, json))
