"""People decide at the terminal: against the real API, and the real mind behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decide_rig import serving, write_log
from tests.core.fleet import Fleet, running

from keepstep.cli import dirs
from keepstep.cli.main import main
from keepstep.core.decide.proposals import propose
from keepstep.core.draft import Draft
from keepstep.model.ids import NodeId, Rank
from keepstep.model.settings import Policy
from keepstep.model.stacks import Frame

FOR_EVER_S = 4e9
"""The fleet's clock stands at the beginning of 1970, the controller's does not."""


def suspected(policy: Policy) -> Fleet:
    """A job with a resolved incident, and a node that somebody suspects."""
    fleet = running(standby_nodes=1, policy=policy)
    fleet.kill(0)
    fleet.pump()
    draft = Draft(fleet.job, fleet.now, policy)
    propose(
        draft, kind="swap", nodes=(NodeId("n1"),), ranks=(Rank(2), Rank(3)), reason="node n1 is slow",
        evidence=("1.3 x the median",), probability=0.9,
    )  # fmt: skip
    for record in draft.records:
        fleet.mind.evolve(record)
        fleet.log.append(record)
    return fleet


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(suspected(Policy(mode="assist", approve_s=FOR_EVER_S)), tmp_path / "log.sqlite") as address:
        monkeypatch.setenv("KEEPSTEP_CONTROLLER_URL", address)
        yield address


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = told(capsys, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.usefixtures("server")
def test_a_proposal_from_the_list_to_its_undoing(capsys: pytest.CaptureFixture[str]) -> None:
    """Listed with what holds it, tried dry, approved, carried out, taken back; each word said twice is quiet."""
    (row,) = answered(capsys, "proposals")["proposals"]
    assert (row["id"], row["state"], row["nodes"], row["ranks"]) == ("lm-p1", "PROPOSED", ["n1"], "2-3")
    assert row["held"] == "mode assist: waits for a person"
    assert {"assist", "lm-p1"} <= set(told(capsys, "status", "-o", "wide")[1].split())
    code, out, err = told(capsys, "approve", "p1", "--dry-run")
    assert (code, out) == (0, "")
    assert "would take node n1 out of job lm" in err
    assert "if that is wrong" in err
    code, _, err = told(capsys, "approve", "p1")
    assert code == 64, "without a terminal nobody is asked"
    assert "--yes" in err
    code, _, err = told(capsys, "approve", "p1", "--yes", "--why", "it is slow indeed")
    assert code == 0
    assert "proposal lm-p1 APPROVED" in err
    assert "it is slow indeed" in err
    assert "node n1 QUARANTINED" in err, "it is carried out by the same word"
    again = answered(capsys, "approve", "lm-p1", "--yes")
    assert (again["already"], again["events"]) == (True, [])
    assert answered(capsys, "job")["automation"]["evicted"] == ["n1"]
    code, _, err = told(capsys, "reject", "p1")
    assert code == 1
    assert "`keepstep undo lm-p1` takes it back" in err
    assert told(capsys, "undo", "n1", "--dry-run")[0] == 0
    assert answered(capsys, "undo", "n1", "--yes")["already"] is False
    assert answered(capsys, "undo", "p1", "--yes")["already"] is True
    assert answered(capsys, "proposals")["proposals"] == []
    (row,) = answered(capsys, "proposals", "--all")["proposals"]
    assert row["state"] == "UNDONE"


@pytest.mark.usefixtures("server")
def test_freeze_thaw_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is approved in a frozen job; the answer says how to go on."""
    assert answered(capsys, "freeze", "lm", "--why", "maintenance")["already"] is False
    assert answered(capsys, "freeze", "lm")["already"] is True
    assert answered(capsys, "job")["automation"]["mode"] == "frozen"
    code, _, err = told(capsys, "approve", "p1", "--yes")
    assert code == 1
    assert "`keepstep thaw lm` first" in err
    assert told(capsys, "mode", "lm", "auto")[0] == 1
    answered(capsys, "thaw", "lm")
    assert answered(capsys, "job")["automation"]["mode"] == "assist"
    answered(capsys, "mode", "lm", "auto")
    assert answered(capsys, "mode", "lm", "auto")["already"] is True
    code, _, err = told(capsys, "mode", "lm", "autos")
    assert code == 64
    assert "did you mean auto?" in err


@pytest.mark.usefixtures("server")
def test_marks_on_incidents(capsys: pytest.CaptureFixture[str]) -> None:
    """Acknowledged by name or number; what cannot be merged says why."""
    assert answered(capsys, "incident", "ack", "i1")["already"] is False
    assert answered(capsys, "incident", "ack", "lm-i1")["already"] is True
    (row,) = answered(capsys, "incidents")["incidents"]
    assert row["acked"]
    code, _, err = told(capsys, "incident", "merge", "i1", "i1")
    assert code == 1
    assert "part of itself" in err
    code, _, err = told(capsys, "incident", "undo", "i1", "--yes")
    assert code == 1
    assert "no living node" in err
    assert told(capsys, "incident", "approve", "i1", "--yes")[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("approve", "p7", "--yes"), "`keepstep proposals lm --all`"),
        (("undo", "n9", "--yes"), "no proposal, incident or node n9"),
        (("incident", "ack", "i9"), "no incident lm-i9"),
        (("freeze", "other"), "which job"),
        (("incident", "i1", "--trace", "-", "--evidence"), "--trace -"),
        (("incident", "i1", "--trace", "no/such/place/x.json"), "cannot be written"),
    ],
)
@pytest.mark.usefixtures("server")
def test_mistakes_name_the_thing_and_the_way_out(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = told(capsys, *words)
    assert code in (1, 64)
    assert said in err
    assert err.count("error: ") == 1


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a run that is over, with a stall for which stacks were taken."""
    fleet = running()
    for rank in range(4):
        fleet.places[Rank(rank)] = (Frame("all_reduce", "torch/distributed.py", 9), Frame("train", "train.py", 40))
    fleet.places[Rank(3)] = (Frame("spin", "train.py", 7),)
    fleet.later(12.0)
    for rank in range(3):
        fleet.stall(rank, started=101, finished=100)
    fleet.stall(3, started=100, finished=100)
    fleet.pump()
    fleet.later(1.0)
    assert fleet.job.incident is None
    write_log(fleet, dirs.runs(tmp_path) / "lm")
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("old_run")
def test_what_is_behind_an_incident_is_read_from_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Evidence with its sources and the stacks that were taken, without any controller; as text and as JSON."""
    code, out, _ = told(capsys, "incident", "i1", "--evidence", "--stacks")
    assert code == 0
    assert "progress  rank 3 idle for 12.0 s, outside of collective 100" in out
    assert "verdict" in out
    assert "spin (train.py:7)" in out
    answer = answered(capsys, "incident", "i1", "--evidence", "--stacks")
    assert {"progress", "verdict"} <= {piece["source"] for piece in answer["evidence"]}
    assert len(answer["processes"]) == 4
    assert answer["odd_ranks"] == [3]


def test_the_trace_is_written_for_perfetto(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of trace events; its shape is proven in the tests of ``core.trace``."""
    path = old_run / "out.json"
    code, _, err = told(capsys, "incident", "i1", "--trace", str(path))
    assert code == 0
    assert "ui.perfetto.dev" in err
    written = json.loads(path.read_text())
    assert told(capsys, "incident", "i1", "--trace", "-")[1] == json.dumps(written) + "\n"
    assert len(written["traceEvents"]) > 20
    assert told(capsys, "approve", "p1", "--yes")[0] == 1
