"""``keepstep explain``: what a log or a code means, offline."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep.cli.errors import UsageError
from keepstep.cli.explain_history import history as history_of
from keepstep.cli.explain_history import similar_row
from keepstep.cli.explain_page import page, page_of_codes
from keepstep.cli.explain_read import check, pieces, source_of
from keepstep.core.diagnose.codes import Meaning, meanings
from keepstep.core.diagnose.explain import explain, explain_files
from keepstep.core.diagnose.named import case_of, code_of
from keepstep.core.diagnose.result import Diagnosis
from keepstep.core.diagnose.similar import Past, similar

SCHEMA = "keepstep.v1/Diagnosis"
LONGEST_JSON_LINE = 1 << 30
"""Bytes of one line of ``--jsonl``."""


def show_explanation(what: list[str], *, as_json: bool, jsonl: bool, history: list[str] | None = None) -> int:
    """Explain files, stdin or a code. Exit code 0 whatever the diagnosis is; the answer is on stdout."""
    before = _before(history or [])
    if not all(name.strip() for name in what):
        raise UsageError(
            "'' names no file and no code", help="a log file, `-` for stdin, or a code: keepstep explain 137"
        )
    if jsonl:
        return _each_line(what, before)
    if not what:
        if sys.stdin.isatty():
            raise UsageError(
                "explain what?", help="a log file, `-` for stdin, or a code as in `keepstep explain xid 79`"
            )
        what = ["-"]
    known = [] if any(name == "-" or Path(name).exists() for name in what) else _meanings(what)
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
        print(json.dumps(answer(diagnosis, before), indent=2, ensure_ascii=False))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(page(diagnosis, similar(case_of(diagnosis), before), colour=colour))
    return 0


def _meanings(what: list[str]) -> list[Meaning]:
    """Of one code in several words, or of several codes; none when one of these is no code."""
    if (known := meanings(" ".join(what))) or len(what) == 1:
        return list(known)
    each = [meanings(word) for word in what]
    return [one for found in each for one in found] if all(each) else []


def answer(diagnosis: Diagnosis, before: Sequence[Past] = ()) -> dict[str, Any]:
    """The diagnosis for programs, with the past incidents that were like it."""
    found: dict[str, Any] = msgspec.to_builtins(diagnosis)
    like = [similar_row(match) for match in similar(case_of(diagnosis), before)]
    return {"schema": SCHEMA, **found, "code": code_of(diagnosis), "similar": like}


def _before(paths: list[str]) -> list[Past]:
    found, passed = history_of(paths)
    if paths:
        odd = f"; passed over what is no incident: {passed}" if passed else ""
        print(f"keepstep: {len(found)} earlier incidents in {', '.join(paths)}{odd}", file=sys.stderr)
    return found


def _each_line(what: list[str], before: Sequence[Past]) -> int:
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
                print(json.dumps({**answer(explain([]), before), "error": said}, ensure_ascii=False))
                continue
            print(json.dumps(answer(explain([log.encode("utf-8", "replace")]), before), ensure_ascii=False), flush=True)
    if wrong:
        print(f"keepstep: lines that could not be read: {wrong}", file=sys.stderr)
    return 1 if wrong else 0
