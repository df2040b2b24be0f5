"""``keepstep explain``: what a log or a code means, offline."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from keepstep.cli.errors import UsageError
from keepstep.cli.explain_page import page, page_of_codes
from keepstep.cli.explain_read import check, pieces, source_of
from keepstep.core.diagnose.codes import meanings
from keepstep.core.diagnose.explain import explain, explain_files
from keepstep.core.diagnose.result import Diagnosis

SCHEMA = "keepstep.v1/Diagnosis"
LONGEST_JSON_LINE = 1 << 30
"""Bytes of one line of ``--jsonl``."""


def show_explanation(what: list[str], *, as_json: bool, jsonl: bool) -> int:
    """Explain files, stdin or a code. Exit code 0 whatever the diagnosis is; the answer is on stdout."""
    if jsonl:
        return _each_line(what)
    if not what:
        if sys.stdin.isatty():
            raise UsageError(
                "explain what?", help="a log file, `-` for stdin, or a code as in `keepstep explain xid 79`"
            )
        what = ["-"]
    known = [] if any(name == "-" or Path(name).exists() for name in what) else meanings(" ".join(what))
    if known:
        if as_json:
            found = [msgspec.to_builtins(one) for one in known]
            print(json.dumps({"schema": "keepstep.v1/Meanings", "meanings": found}, indent=2, ensure_ascii=False))
        else:
            print(page_of_codes(known))
        return 0
    for name in what:
        if name.startswith("-") and name != "-" and not Path(name).exists():
            raise UsageError(f"unknown option: {name}", help="`keepstep explain --help` shows how it is called")
        if name != "-":
            check(name)
    several = len(what) > 1
    diagnosis = explain_files((source_of(name, several), pieces(name)) for name in what)
    if as_json:
        print(json.dumps(answer(diagnosis), indent=2, ensure_ascii=False))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(page(diagnosis, colour=colour))
    return 0


def answer(diagnosis: Diagnosis) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(diagnosis)
    return {"schema": SCHEMA, **found}


def _each_line(what: list[str]) -> int:
    """One JSON object with a ``log`` per line in, one answer per line out, in the same order."""
    if len(what) > 1:
        raise UsageError(
            f"--jsonl reads one file or stdin, not {len(what)} files", help="keepstep explain --jsonl < FILE"
        )
    name = what[0] if what else "-"
    file = sys.stdin.buffer if name == "-" else check(name).open("rb")
    wrong = 0
    with file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_JSON_LINE), b""), start=1):
            if not line.strip():
                continue
            try:
                log = json.loads(line)["log"]
                if not isinstance(log, str):
                    raise TypeError("log is no text")
            except (ValueError, KeyError, TypeError, RecursionError):
                wrong += 1
                said = f"line {number} is no JSON object with a text under the key `log`"
                print(json.dumps({**answer(explain([])), "error": said}, ensure_ascii=False))
                continue
            print(json.dumps(answer(explain([log.encode("utf-8", "replace")])), ensure_ascii=False), flush=True)
    if wrong:
        print(f"keepstep: lines that could not be read: {wrong}", file=sys.stderr)
    return 1 if wrong else 0
