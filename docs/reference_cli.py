"""The command line as a page: from the parsers themselves, so that no flag can be forgotten."""

from __future__ import annotations

import argparse
import inspect

from cyclopts import App

from keepstep.cli import demo, flags
from keepstep.cli.commands import app
from reference_pages import cell, one_line

HIDDEN = {"run", "demo"}
"""Told from their own parsers."""


def page() -> str:
    out = [
        "# Command line",
        "",
        "Data goes to stdout, everything else to stderr. `-o table|wide|json|jsonl|csv` chooses the form, `--json` is `-o json`;",
        'without a terminal a table becomes tab-separated text. `NO_COLOR` is honoured. JSON carries `"schema":"keepstep.v1/..."`.',
        "",
        "## keepstep run",
        "",
        "`keepstep run [flags] script.py [script's arguments]`",
        "",
        "Every flag of torchrun is accepted, in both spellings, with its `PET_*` variable; flags of keepstep's own come last.",
        "",
    ]
    parser = flags.build_parser()
    for group in parser._action_groups:
        actions = [
            a for a in group._group_actions if a.option_strings and a.help != argparse.SUPPRESS and a.dest != "help"
        ]
        if actions:
            out += [f"### {group.title.capitalize()}", "", "| flag | environment | meaning |", "|---|---|---|"]
            out += [flag_row(a) for a in actions]
            out.append("")
    out += ["## keepstep demo", "", one_line(inspect.getdoc(demo) or ""), "", "| flag | meaning |", "|---|---|"]
    out += [f"| {names(a)} | {cell(a.help or '')} |" for a in demo.parser()._actions if a.dest != "help"]
    out.append("")
    for name in sorted(n for n in app if not n.startswith("-") and n not in HIDDEN):
        out += command_section(f"keepstep {name}", app[name])
    return "\n".join(out)


def flag_row(action: argparse.Action) -> str:
    variable = getattr(action, "variable", "")
    return f"| {names(action)} | {f'`{variable}`' if variable else ''} | {cell(action.help or '')} |"


def names(action: argparse.Action) -> str:
    """Each option once: both spellings are accepted everywhere, the one with hyphens is shown."""
    shown = [o for o in action.option_strings if "_" not in o]
    metavar = (
        f" {action.metavar}"
        if isinstance(action.metavar, str)
        else f" {'|'.join(map(str, action.choices))}"
        if action.choices
        else ""
    )
    return ", ".join(f"`{cell(o + metavar) if '|' in metavar else o + metavar}`" for o in shown)


def command_section(title: str, command: App) -> list[str]:
    inner = sorted(n for n in command if not n.startswith("-"))
    if command.default_command is None and inner:
        return [line for name in inner for line in command_section(f"{title} {name}", command[name])]
    text = inspect.getdoc(command.default_command) or command.help or ""
    rows = []
    for argument in command.assemble_argument_collection():
        if argument.show:
            shown = ", ".join(f"`{n}`" for n in argument.names if not n.startswith("--no-"))
            rows.append(f"| {shown} | {cell(argument.parameter.help or '')} |")
    table = ["| argument | meaning |", "|---|---|", *rows, ""] if rows else []
    return [f"## {title}", "", one_line(text), "", *table]
