"""``keepstep incident ID --evidence --stacks --trace FILE``: what is behind the page of an incident."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep.agent.files import write_atomic
from keepstep.cli.errors import DoorError, UsageError
from keepstep.cli.render import check_form, paint
from keepstep.cli.say import say
from keepstep.cli.show import block, find_incident, hint
from keepstep.cli.stacks import consensus_view, print_stacks
from keepstep.cli.where import Where
from keepstep.core.locate.stacks import consensus
from keepstep.core.summary_evidence import evidence_lines, incident_evidence, incident_stacks
from keepstep.core.trace import incident_trace
from keepstep.model.records import AnyRecord


def show_pages(where: Where, incident: str, pages: Mapping[str, bool], *, trace: str, output: str) -> int:
    """Show what was asked for, one after the other; ``trace`` is written to a file.

    Args:
        pages: ``evidence``, ``stacks``, ``timeline``: whether each was asked for.
    """
    form = check_form(output)
    if trace == "-" and any(pages.values()):
        raise UsageError("--trace - writes to stdout, and so would the other pages", help="name a file for the trace")
    source, name = find_incident(where, incident)
    records = _records(source.incident(name))
    if trace:
        _write_trace(trace, incident_trace(records, name))
    if form in ("json", "jsonl"):
        if any(pages.values()):
            print(msgspec.json.encode(_answer(records, name, pages)).decode())
        return 0
    shown = [page for page, asked in pages.items() if asked]
    for page in shown:
        if len(shown) > 1:
            print(paint(page, "bold"))
        if page == "stacks":
            _stacks(records, name)
        elif page == "evidence":
            pieces = incident_evidence(records, name)
            print("\n".join(evidence_lines(pieces) or [f"no evidence of {name} is kept in the log"]))
        else:
            print("\n".join(block(source, name, timeline=True)))
    if not trace:
        hint(f"next: keepstep incident {name} --trace {name}.json, then open it in https://ui.perfetto.dev")
    return 0


def _records(answer: Mapping[str, Any]) -> list[AnyRecord]:
    return [msgspec.convert(event["record"], AnyRecord, strict=False) for event in answer["events"]]


def _answer(records: Sequence[AnyRecord], name: str, pages: Mapping[str, bool]) -> dict[str, Any]:
    answer: dict[str, Any] = {"schema": "keepstep.v1/IncidentPages", "id": name}
    if pages["evidence"]:
        answer["evidence"] = incident_evidence(records, name)
    if pages["stacks"]:
        processes = incident_stacks(records, name)
        answer["processes"] = processes
        answer |= consensus_view(consensus(processes))
    if pages["timeline"]:
        answer["events"] = records
    return answer


def _stacks(records: Sequence[AnyRecord], name: str) -> None:
    processes = list(incident_stacks(records, name))
    if processes:
        print_stacks(processes)
    else:
        print(f"nobody had to look into the processes for {name}: what was seen named the culprit by itself")


def _write_trace(path: str, trace: dict[str, Any]) -> None:
    text = json.dumps(trace)
    if path == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        write_atomic(Path(path), text.encode())
    except OSError as error:
        raise DoorError(
            f"the trace cannot be written to {path}: {error.strerror}", help="name a file in a directory of yours"
        ) from error
    say(f"wrote {path}: {len(trace['traceEvents'])} events; open it in https://ui.perfetto.dev")
