"""History for ``keepstep explain --history``: earlier incidents, from whatever has been kept of them.

An event log of a controller, a run directory or a folder of many, JSON or JSON lines of incidents
(``keepstep incidents -o jsonl``), of answers of ``explain --json``, of ``exit.json``. What is none of these is passed
over and counted, so that a folder may hold anything.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from keepstep.cli.errors import NotFound
from keepstep.core.diagnose.named import place_of
from keepstep.core.diagnose.similar import Case, Match, Past

FILES = 5_000
"""Looked at below a folder."""
DEPTH = 5
"""Folders below a folder."""
FILE_BYTES = 256 << 20
"""Of one file of JSON; a longer one is passed over."""
LINE_BYTES = 4 << 20
_LOG = "log.sqlite"
_JSON = (".json", ".jsonl", ".ndjson")


def history(paths: list[str]) -> tuple[list[Past], int]:
    """Past incidents in no order, and how many files and lines were passed over.

    Raises:
        NotFound: a path does not exist.
    """
    found: list[Past] = []
    passed = 0
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise NotFound(
                f"there is no history {name}",
                help="a run directory, a folder of runs, an event log (log.sqlite), or JSON lines of incidents",
            )
        for file in _files(path):
            more, odd = _of_log(file) if file.name.endswith(".sqlite") else _of_json(file)
            found += more
            passed += odd
    return found, passed


def similar_row(match: Match) -> dict[str, Any]:
    """As in the view of an incident."""
    past = match.past
    at = datetime.datetime.fromtimestamp(past.at, datetime.UTC).isoformat() if past.at else None
    return {
        "id": past.id,
        "job": past.job,
        "at": at,
        "same": list(match.same),
        "title": past.title,
        "category": past.category,
        "node": past.case.node or None,
        "done": past.done,
        "ended": past.ended,
        "took_s": past.took_s,
    }


def _files(path: Path) -> Iterator[Path]:
    """Files that may hold history; an ``exit.json`` beside a log says nothing that the log does not."""
    if path.is_file():
        yield path
        return
    left = FILES
    waiting = [(path, 0)]
    while waiting and left > 0:
        folder, depth = waiting.pop(0)
        try:
            inside = sorted(folder.iterdir())
        except OSError:
            continue
        logged = any(one.name == _LOG for one in inside)
        for one in inside:
            if one.is_symlink():
                continue
            if one.is_dir():
                waiting += [(one, depth + 1)] if depth < DEPTH and not logged else []
            elif one.name == _LOG or (one.suffix in _JSON and not logged):
                left -= 1
                yield one


def _of_log(path: Path) -> tuple[list[Past], int]:
    from keepstep.core.controller import Controller
    from keepstep.core.locate.past import past_of
    from keepstep.store.sqlite import open_log

    mind = Controller()
    try:
        log = open_log(path, readonly=True)
        with contextlib.closing(log):
            for entry in log.read():
                mind.evolve(entry.record)
    except Exception:  # A damaged log, or one of another version, may fail anywhere in here.
        return [], 1
    return [past_of(job, one) for job in mind.jobs() for one in job.incidents.values()], 0


def _of_json(path: Path) -> tuple[list[Past], int]:
    """One JSON document, or one per line."""
    try:
        if path.stat().st_size > FILE_BYTES:
            return [], 1
        data = path.read_bytes()
    except OSError:
        return [], 1
    with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _of_value(msgspec.json.decode(data), path)
    found: list[Past] = []
    passed = 0
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            more, odd = _of_value(msgspec.json.decode(line) if len(line) <= LINE_BYTES else None, path)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            more, odd = [], 1
        found += more
        passed += odd
    return found, passed


def _of_value(value: Any, path: Path) -> tuple[list[Past], int]:
    if isinstance(value, dict) and isinstance(value.get("incidents"), list):
        value = value["incidents"]
    found: list[Past] = []
    passed = 0
    for number, one in enumerate(value if isinstance(value, list) else [value], start=1):
        past = _past(one, f"{path.parent.name}/{path.name}" + (f":{number}" if isinstance(value, list) else ""))
        found += [past] if past is not None else []
        passed += past is None
    return found, passed


def _past(one: Any, where: str) -> Past | None:
    """An incident's row, an answer of ``explain``, or an ``exit.json``."""
    if not isinstance(one, dict) or not {"root_cause", "category"} & one.keys():
        return None
    culprit = one["culprit"] if isinstance(one.get("culprit"), dict) else {}
    cause = _text(one, "root_cause").partition(":")[0]
    error = culprit.get("error") if isinstance(culprit.get("error"), dict) else culprit
    line = error.get("line") if isinstance(error, dict) else None
    place = place_of(_text(error, "file"), line if isinstance(line, int) else None)
    case = Case(
        cause=cause,
        code=_text(one, "code") if isinstance(one.get("code"), str) else "",
        place=place,
        node=_text(one, "node") or _text(culprit, "node"),
        gpu=_text(culprit, "gpu"),
    )
    if not (cause or case.code or place or case.node):
        return None
    code = one.get("code")
    ended = _text(one, "state") or (f"left with code {code}" if isinstance(code, int) else "")
    took = one.get("recover_ms")
    return Past(
        id=_text(one, "id") or _text(one, "incident") or where,
        case=case,
        at=_seconds(one),
        job=_text(one, "job"),
        title=_text(one, "title") or _text(one, "summary") or _text(one, "why"),
        category=_text(one, "category"),
        done=_text(one, "rung") or _text(one, "resolution") or _text(one, "action"),
        ended=ended,
        took_s=float(took) / 1000 if isinstance(took, int | float) else None,
    )


def _text(one: Any, key: str) -> str:
    value = one.get(key) if isinstance(one, dict) else None
    return value if isinstance(value, str) else ""


def _seconds(one: dict[str, Any]) -> float:
    """Since 1970, from what stands there; 0 where nothing does."""
    for key in ("opened_at", "onset_at", "at", "time"):
        value = one.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                at = datetime.datetime.fromisoformat(value)
                return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
    evidence = one.get("evidence")
    if isinstance(evidence, list) and evidence and isinstance(evidence[0], dict):
        value = evidence[0].get("time")
        return float(value) if isinstance(value, int | float) else 0.0
    return 0.0
