"""Options that many commands share: where to ask, and how to show the answer."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Server = Annotated[
    str, Parameter("--server", help="Controller's HTTP address, HOST:PORT [env: KEEPSTEP_CONTROLLER_URL]")
]
Token = Annotated[str, Parameter("--token-file", help="File with the controller's token [env: KEEPSTEP_TOKEN_FILE]")]
State = Annotated[str, Parameter("--state-dir", help="Home of run directories [env: KEEPSTEP_STATE_DIR]")]
Output = Annotated[str, Parameter(["--output", "-o"], help="table, wide, json, jsonl or csv")]
Json = Annotated[bool, Parameter("--json", negative="", help="Same as -o json")]
Job = Annotated[str, Parameter(help="Job, or the beginning of its name; the latest run if left out")]


def form(output: str, json: bool) -> str:
    """The form that ``-o`` and ``--json`` ask for together."""
    return "json" if json else output
