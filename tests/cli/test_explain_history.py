"""``keepstep explain --history``: past incidents from event logs, folders of runs, JSON lines, and from anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.core.fleet import running

from keepstep.cli.explain_history import history
from keepstep.cli.main import main
from keepstep.model.facts import UserError
from keepstep.store.sqlite import open_log

FELL = "node-017 kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"


def a_run(folder: Path) -> Path:
    """The log of a controller: a lost GPU whose ranks moved to a spare node, then a bug at job/train.py:41."""
    fleet = running(standby_nodes=1)
    fleet.kill(1, code=1, first_error=(FELL.strip().partition(": ")[2],))
    fleet.pump()
    fleet.train()
    fleet.kill(3, code=1, error=UserError(type="KeyError", message="'lr'", file="/a/job/train.py", line=41, step=9))
    fleet.pump()
    folder.mkdir(parents=True)
    log = open_log(folder / "log.sqlite")
    log.append(fleet.log, expected=0)
    log.close()
    (folder / "exit.json").write_text(json.dumps({"category": "user_code", "code": 1, "culprit": {"node": "n1"}}))
    return folder


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["explain", "--json", *words]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_a_controllers_log_tells_what_was_done_last_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "runs" / "lm")
    log = tmp_path / "new.log"
    log.write_text(FELL)
    for where in (run, run / "log.sqlite", tmp_path / "runs"):
        (match,) = explained(capsys, str(log), "--history", str(where))["similar"]
        assert (match["id"], match["same"], match["done"]) == ("lm-i1", ["cause", "code"], "replace_node")
        assert match["ended"].startswith("RESOLVED")
        assert match["took_s"] is not None
    assert main(["explain", str(log), "--history", str(run)]) == 0
    page = capsys.readouterr()
    assert "  before: lm-i1 (same cause and code, " in page.out
    assert "): replace_node, RESOLVED in " in page.out
    assert "2 earlier incidents" in page.err


def test_the_same_place_in_the_code_is_known_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever the job's files lie this time."""
    run = a_run(tmp_path / "lm")
    log = tmp_path / "new.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/b/job/train.py", line 41, in main\n    x[k]\nKeyError: 3\n'
    )
    said = explained(capsys, str(log), "--history", str(run))["similar"]
    assert [one["same"] for one in said] == [["place"]]


def test_earlier_answers_and_exits_are_history_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of ``explain --json``, rows of ``incidents -o jsonl``, exit.json, beside lines that are none of them."""
    log = tmp_path / "new.log"
    log.write_text(FELL)
    answer = explained(capsys, str(log))
    row = {"id": "old-i4", "category": "infrastructure", "root_cause": "gpu_fell_off_bus: x", "code": "GPU079"}
    row |= {"node": "node-099", "rung": "requeue", "state": "ESCALATED", "opened_at": "2026-01-31T02:14:07Z"}
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "rows.jsonl").write_text("\n".join([json.dumps(row), "no json", "[1, null]", "{}", "\xff"]))
    (kept / "answer.json").write_text(json.dumps(answer))
    (kept / "list.json").write_text(
        json.dumps({"schema": "keepstep.v1/IncidentList", "incidents": [{**row, "id": "i5"}]})
    )
    (kept / "run1").mkdir()
    (kept / "run1" / "exit.json").write_text(
        json.dumps({"category": "infrastructure", "code": 138, "incident": "r-i1", "culprit": {"node": "node-017"}})
    )
    (kept / "log.txt").write_text("anything")
    (kept / "broken.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 500)
    said = explained(capsys, str(log), "--history", str(kept))["similar"]
    assert [one["id"] for one in said] == ["i5", "old-i4", "kept/answer.json", "r-i1"]
    assert said[3]["same"] == ["node"]
    assert said[3]["ended"] == "left with code 138"


def test_a_damaged_log_is_passed_over_and_a_missing_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "lm")
    whole = (run / "log.sqlite").read_bytes()
    for data in (
        whole[: len(whole) // 2],
        b"",
        b"SQLite format 3\0" + bytes(600),
        whole[:5000] + b"\xff" * 4000 + whole[9000:],
    ):
        (run / "log.sqlite").write_bytes(data)
        found, passed = history([str(run)])
        assert passed == 1 or found == [] or len(found) <= 2
    assert main(["explain", "--json", "79", "--history", str(tmp_path / "nowhere")]) != 0
    assert "there is no history" in capsys.readouterr().err


def test_without_history_the_field_is_there_and_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "new.log"
    log.write_text(FELL)
    said = explained(capsys, str(log))
    assert said["similar"] == []
    assert said["code"] == "GPU079"
