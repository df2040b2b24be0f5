"""An incident as Chrome trace events: the shape that Perfetto reads, and the times that the log tells."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.summary_evidence import incident_evidence, incident_stacks
from keepstep.core.trace import CONTROLLER, incident_trace
from keepstep.model.records import AnyRecord, IncidentMoved, IncidentOpened
from tests.core.test_transcripts import STORIES

LOGS = [(tell.__name__, tell) for tell in STORIES if tell.__name__ != "too_few_nodes"]


def check(event: dict[str, Any]) -> None:
    """The Trace Event Format, as far as it is used here (Google's document "Trace Event Format", sections X, i, M)."""
    assert isinstance(event["name"], str)
    assert event["name"]
    assert isinstance(event["pid"], int)
    assert isinstance(event["tid"], int)
    assert isinstance(event.get("args", {}), dict)
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name", "process_sort_index")
        return
    assert isinstance(event["cat"], str)
    assert event["ts"] >= 0
    if event["ph"] == "X":
        assert event["dur"] > 0
    else:
        assert (event["ph"], event["s"]) == ("i", "t")


@pytest.mark.parametrize(("name", "tell"), LOGS, ids=[name for name, _ in LOGS])
def test_every_story_has_a_sound_trace(name: str, tell: Any) -> None:
    """Each event has its form, each lane and row its name, spans of one row lie beside or within each other."""
    log = tell().fleet.log
    incidents = [record.incident for record in log if isinstance(record, IncidentOpened)]
    for incident in incidents:
        trace = incident_trace(log, incident)
        events = trace["traceEvents"]
        for event in events:
            check(event)
        named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
        spans = [e for e in events if e["ph"] == "X"]
        assert {(e["pid"], e["tid"]) for e in spans} <= named, name
        assert {e["pid"] for e in events} <= {e["pid"] for e in events if e["name"] == "process_name"}
        for row in named:
            nested([e for e in spans if (e["pid"], e["tid"]) == row])
        assert incident_evidence(log, incident) or name in ("controller_back_after_a_deputy",)


def nested(spans: list[dict[str, Any]]) -> None:
    """Perfetto drops a span that begins inside another one and ends after it."""
    for one in spans:
        for other in spans:
            a, b = one["ts"], one["ts"] + one["dur"]
            c, d = other["ts"], other["ts"] + other["dur"]
            crossing = a < c < b < d and min(b - c, d - b) > 0.01
            assert not crossing, (one, other)


def test_times_are_those_of_the_log() -> None:
    """States follow each other without a gap, and end where the log says."""
    tell = dict(LOGS)["newcomer_never_resumes"]
    log: list[AnyRecord] = tell().fleet.log
    opened = next(record for record in log if isinstance(record, IncidentOpened))
    trace = incident_trace(log, opened.incident)
    states = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (CONTROLLER, 0)]
    moves = [r for r in log if isinstance(r, IncidentMoved) and r.incident == opened.incident]
    assert [e["name"] for e in states] == ["open", *(move.to.lower() for move in moves[:-1])]
    end = max(e["ts"] + e["dur"] for e in states)
    assert end == pytest.approx((moves[-1].at - opened.onset) / 1000, abs=1)
    assert end > 60_000_000, "the newcomer is waited for"


def test_an_unknown_incident_has_no_events() -> None:
    """Said by an empty trace, not by an exception."""
    assert incident_trace([], "lm-i9")["traceEvents"] == []
    assert incident_evidence([], "lm-i9") == []
    assert incident_stacks([], "lm-i9") == ()
