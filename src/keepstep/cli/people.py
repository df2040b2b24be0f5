"""The commands by which people decide: names, arguments, help. The work is done in ``decide``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from keepstep.cli.options import Job as JobName
from keepstep.cli.options import Json, Output, Server, State, Token, form
from keepstep.cli.where import Where

Why = Annotated[str, Parameter(help="Reason, for the log")]
Yes = Annotated[bool, Parameter(["--yes", "-y"], negative="", help="Do not ask")]
DryRun = Annotated[bool, Parameter(negative="", help="Only say what would be done")]
ProposalName = Annotated[
    str, Parameter(help="Proposal, as `keepstep proposals` names it; `p3` is the third of the latest run")
]
IncidentName = Annotated[
    str, Parameter(help="Incident, as `keepstep incidents` names it; `i3` is the third of the latest run")
]


def proposals(
    job: JobName = "",
    *,
    every: Annotated[bool, Parameter("--all", negative="", help="Those that are over, too")] = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Changes of living nodes that are proposed: why, how sure, and what holds them back."""
    from keepstep.cli.decide import show_proposals

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return show_proposals(where, job, every=every, output=form(output, json))


def approve(
    proposal: ProposalName,
    *,
    why: Why = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Say yes to a proposal, also beyond what automation may do by itself."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.approve(where, proposal, why=why, yes=yes, dry_run=dry_run, output=form(output, json))


def reject(
    proposal: ProposalName,
    *,
    why: Why = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Say no to a proposal; the same is not proposed again within the hour."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.reject(where, proposal, why=why, output=form(output, json))


def undo(
    what: Annotated[str, Parameter(help="Proposal, incident or node")],
    *,
    job: Annotated[str, Parameter("--job", help="Job of the node; the latest run if left out")] = "",
    why: Why = "",
    yes: Yes = False,
    dry_run: DryRun = False,
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Take an eviction back: the living node may be used again, on probation."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.undo(where, what, job=job, why=why, yes=yes, dry_run=dry_run, output=form(output, json))


def freeze(
    job: JobName = "",
    *,
    why: Why = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Stop all automation that changes living nodes; what dies is still replaced, so that the job goes on."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.freeze(where, job, why=why, thaw=False, output=form(output, json))


def thaw(
    job: JobName = "",
    *,
    why: Why = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """End a freeze: the mode is what it was before."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.freeze(where, job, why=why, thaw=True, output=form(output, json))


def mode(
    job: Annotated[str, Parameter(help="Job, or the beginning of its name")],
    mode: Annotated[str, Parameter(help="observe, assist or auto")],
    *,
    why: Why = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """What automation may do to living nodes from now on: only say it, ask a person, or act within the limits."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.set_mode(where, job, mode, why=why, output=form(output, json))


def ack(
    id: IncidentName,
    *,
    why: Why = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Say that somebody has seen an incident."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.ack(where, id, why=why, output=form(output, json))


def merge(
    id: IncidentName,
    into: Annotated[str, Parameter(help="The incident that it is part of")],
    *,
    why: Why = "",
    server: Server = "",
    token_file: Token = "",
    state_dir: State = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Say that an incident is part of another one."""
    from keepstep.cli import decide

    where = Where(server=server, token_file=token_file, state_dir=state_dir)
    return decide.merge(where, id, into, why=why, output=form(output, json))


def register(app: App, incident: App) -> None:
    """Add these commands to the door, and those about one incident to ``keepstep incident``."""
    for command in (proposals, approve, reject, undo, freeze, thaw, mode):
        app.command(command)
    for about_one in (ack, merge, approve, undo):
        incident.command(about_one)
