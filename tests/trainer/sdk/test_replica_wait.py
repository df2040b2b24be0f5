"""How long a step waits for the copy of the step before it on another node."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.notes import Note
from keepstep.trainer import gate
from keepstep.trainer.gate import GAP_S, REPLICA_AGAIN_S, REPLICA_WAIT_S, Gate, needs_replica


class Clock:
    """Virtual seconds; sleeping is what makes them pass."""

    def __init__(self) -> None:
        self.now = 100.0
        self.monotonic_ns = time.monotonic_ns

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_buddy_that_is_away_costs_one_wait_and_not_one_per_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gap is said once, later steps go on at once, and protection comes back by itself."""
    clock = Clock()
    monkeypatch.setattr(gate, "time", clock)
    safe = False
    told: list[Note] = []
    copies: Any = SimpleNamespace(
        replicated=lambda: safe,
        waited_s=0.0,
        notes=SimpleNamespace(tell=told.append),
        lag=lambda: (7, 6),
        keeper_away=False,
    )
    door = Gate(copies, 0, lambda: False)

    def waited() -> float:
        before = clock.now
        door.wait(7)
        return clock.now - before

    assert REPLICA_WAIT_S <= waited() < REPLICA_WAIT_S + 0.01
    assert waited() == 0.0
    clock.now += REPLICA_AGAIN_S
    assert waited() >= REPLICA_WAIT_S
    assert capsys.readouterr().err.count("no copy on another node") == 1
    safe = True
    assert waited() == 0.0
    assert "rank 0 step 7: another node has copies again" in capsys.readouterr().err
    safe = False
    assert waited() >= REPLICA_WAIT_S
    assert capsys.readouterr().err.count("no copy on another node") == 1
    assert told == [], "the keeper is there, and tells the log with the cause"
    assert copies.waited_s >= 3 * REPLICA_WAIT_S


def test_a_wait_ends_when_another_epoch_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery that waits must not wait for the copies of the epoch that it ends, and no gap is told."""
    clock = Clock()
    monkeypatch.setattr(gate, "time", clock)
    told: list[Note] = []
    copies: Any = SimpleNamespace(replicated=lambda: False, waited_s=0.0, notes=SimpleNamespace(tell=told.append))
    before = clock.now
    Gate(copies, 0, lambda: clock.now > 100.5).wait(7)
    assert clock.now - before < 1.0
    assert told == []


def test_a_gap_is_told_where_no_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that lags a step behind is no gap; one that has brought nothing new for seconds is, and its end is.

    Without a keeper on this node nobody else would tell the log, so the rank does."""
    clock = Clock()
    monkeypatch.setattr(gate, "time", clock)
    told: list[Note] = []
    lag = (1, 0)
    copies: Any = SimpleNamespace(
        lag=lambda: lag, waited_s=0.0, notes=SimpleNamespace(tell=told.append), keeper_away=True
    )
    door = Gate(copies, 3, lambda: False)
    for step in range(1, 9):
        lag = (step, step - 1)
        door.look(step)
        clock.now += 0.9 * GAP_S
    assert told == []
    for step in range(9, 12):
        lag = (step, 7)
        door.look(step)
        clock.now += 0.9 * GAP_S
    assert [(note.what, note.rank) for note in told] == [("gap", 3)]
    lag = (12, 11)
    door.look(12)
    assert [note.what for note in told] == ["gap", "closed"]


@pytest.mark.parametrize(
    ("snapshot_every", "replicated", "waits"),
    [(1, False, True), (1, True, True), (4, False, True), (4, True, False), (0, False, False), (0, True, False)],
)
def test_plain_ddp_waits_for_its_copy_as_well(snapshot_every: int, replicated: bool, waits: bool) -> None:
    """The random state of a rank on a lost node is nowhere but in its copy: a copy that lags by two steps would let
    replicated state go on with other dropout masks, and the losses would differ from then on."""
    assert needs_replica(snapshot_every, replicated) is waits
