"""What a node's own memory adds to the controller's answer."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import show
from keepstep.cli.local import add_local
from keepstep.cli.where import Where
from keepstep.model import env
from keepstep.model.beat import LAYOUT, WORDS, Word


class Run:
    """A run directory with one node here; the other one is elsewhere. Stands in for a source."""

    live = True

    def __init__(self, root: Path) -> None:
        self.run_dir: Path | None = root / "run"
        self.node_dir = root / "a"
        (self.node_dir / env.BEAT_DIR).mkdir(parents=True)
        (root / "run/nodes").mkdir(parents=True)
        (root / "run/nodes/a.json").write_text(json.dumps({"node": "a", "node_dir": str(self.node_dir)}))

    def status(self) -> dict[str, Any]:
        return {"jobs": [{"job": "j", "step": 1, "incident_open": None}]}

    def job(self, job: str) -> dict[str, Any]:
        return answer("a")

    def slot(self, name: str, pid: int, start: int) -> None:
        (self.node_dir / "slots.json").write_text(json.dumps({"slots": {name: {"pid": pid, "start": start}}}))

    def beat(self, name: str, step: int) -> None:
        words = [0] * WORDS
        words[Word.LAYOUT], words[Word.STEP] = LAYOUT, step
        (self.node_dir / env.BEAT_DIR / name).write_bytes(struct.pack(f"={WORDS}q", *words))


def answer(*nodes: str) -> dict[str, Any]:
    """A job's answer with one rank on each of these nodes, all of them at step 1."""
    ranks = [{"rank": rank, "node": node, "slot": f"r{rank}e1", "step": 1} for rank, node in enumerate(nodes)]
    return {"job": "j", "step": 1, "world_size": len(nodes), "ranks": ranks}


def own_start() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_rank_of_this_machine_gets_its_pid_and_its_step(run: Run) -> None:
    """All ranks are here, so the job's own step is as fresh as theirs."""
    run.slot("r0e1", os.getpid(), own_start())
    run.beat("r0e1", 40)
    job = add_local(run, answer("a"))  # type: ignore[arg-type]
    assert (job["ranks"][0]["pid"], job["ranks"][0]["step"], job["step"]) == (os.getpid(), 40, 40)


def test_a_rank_elsewhere_stays_as_the_controller_knows_it(run: Run) -> None:
    """No process id is invented, and the job's step is not raised on the word of some ranks."""
    run.slot("r0e1", os.getpid(), own_start())
    run.beat("r0e1", 40)
    job = add_local(run, answer("a", "b"))  # type: ignore[arg-type]
    assert (job["ranks"][1]["pid"], job["ranks"][1]["step"], job["step"]) == (None, 1, 1)


def test_a_pid_that_was_given_away_is_not_shown(run: Run) -> None:
    """Another process has the number now: whoever reads it might kill that one."""
    run.slot("r0e1", os.getpid(), own_start() + 1)
    assert add_local(run, answer("a"))["ranks"][0]["pid"] is None  # type: ignore[arg-type]


def test_nothing_here_changes_nothing(run: Run) -> None:
    """The node's memory is gone after the end of the job; an answer over the network has no run directory at all."""
    assert add_local(run, answer("a"))["step"] == 1  # type: ignore[arg-type]
    run.run_dir = None
    assert add_local(run, answer("a"))["ranks"][0]["pid"] is None  # type: ignore[arg-type]


def test_status_shows_the_present_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller last heard of step 1; what is printed is the step of this moment."""
    run.beat("r0e1", 40)
    monkeypatch.setattr(show, "find", lambda *_: run)
    assert show.show_status(Where(), "", "json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["step"] == 40
