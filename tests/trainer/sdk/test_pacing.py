"""What a rank says of its choices: to people once, and to the log with the numbers behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.notes import Note
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.trainer import pacing_torch
from keepstep.trainer.pacing_torch import Pacing


class Rank:
    """One rank's pacing over a step of 100 ms, with a budget of 1 %."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.now, self.large = 50.0, True
        monkeypatch.setattr(pacing_torch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.told: list[Note] = []
        self.snapshots: Any = SimpleNamespace(
            config=CheckpointConfig(job=JobId("j"), policy=CheckpointPolicy(overhead=0.01)), waited_s=0.0,
            whole=True, copied_s=None, lag=lambda: (7, 6), notes=SimpleNamespace(tell=self.told.append),
        )  # fmt: skip
        self.pacing = Pacing(self.snapshots, rank, 1000)
        self.pacing.restart(0, 1)

    def steps(self, first: int, last: int, copy_s: float) -> None:
        for _ in range(first, last + 1):
            self.now += 0.1 + copy_s
            self.snapshots.waited_s += copy_s
            self.pacing.step()
            self.snapshots.copied_s = None if self.pacing.overlap and self.large else copy_s
            self.pacing.saved(full=True)


def test_the_interval_and_its_reason_stand_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot of 0.4 ms in a step of 100 ms may be taken each time; one of 3.5 ms every fourth step."""
    rank = Rank(monkeypatch)
    monkeypatch.setattr(rank.pacing.pace, "_mode", "blocking")
    monkeypatch.setattr(pacing_torch.dist, "all_reduce", lambda *_, **__: None)
    rank.steps(1, 10, 0.0035)
    assert rank.pacing.agree(10)
    (note,) = rank.told
    assert (note.what, note.tier, note.step, note.rank) == ("interval", "memory", 10, 0)
    assert note.why == (
        "every 4 steps instead of 1: here a snapshot costs 3.5 ms of a step of 100.0 ms, and may take 1.00%"
    )
    assert note.why in capsys.readouterr().err


def test_the_log_hears_when_copies_move_beside_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time that made it so; rank 0 speaks for all, and a step like the one before changes nothing."""
    rank = Rank(monkeypatch)
    rank.steps(1, 9, 0.02)
    other = Rank(monkeypatch, 1)
    other.steps(1, 9, 0.02)
    assert rank.pacing.overlap
    assert other.pacing.overlap
    (note,) = rank.told
    assert note.what == "interval"
    assert note.why == (
        "every step, copied beside the next step: the copy takes 20.0 ms of a step of 100.0 ms, and steps may wait "
        "1.00% for it"
    )
    assert other.told == []
    small = Rank(monkeypatch)
    small.large = False  # below ``OVERLAP_FROM`` every copy blocks, whatever it costs
    small.steps(1, 9, 0.02)
    assert small.told == []


def test_not_waiting_for_the_other_node_is_a_choice_and_no_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies go on, so nothing is opened that somebody would have to close."""
    rank = Rank(monkeypatch, 3)
    gate: Any = SimpleNamespace(too_dear=lambda step_s, share: True)
    assert rank.pacing.too_dear(gate)
    (note,) = rank.told
    assert (note.what, note.tier, note.step, note.rank) == ("interval", "peer", 7, 3)
    assert "steps no longer wait for the copy on another node: that costs more than 1.00%" in note.why
    assert "rank 3: snapshots every step" in capsys.readouterr().err
