"""How long a step waits for the copy of the step before it on another node."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.trainer import loop_torch
from keepstep.trainer.loop_torch import REPLICA_AGAIN_S, REPLICA_WAIT_S, Loop, needs_replica


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
    monkeypatch.setattr(loop_torch, "time", clock)
    safe = False
    session: Any = SimpleNamespace(
        state=None, token="", snap_dir=Path(), rank=0,
        snapshots=SimpleNamespace(replicated=lambda: safe), control=SimpleNamespace(pending=None),
    )  # fmt: skip
    loop = Loop(session, 10, 0)

    def waited() -> float:
        before = clock.now
        loop._await_replica()
        return clock.now - before

    assert REPLICA_WAIT_S <= waited() < REPLICA_WAIT_S + 0.01
    assert waited() == 0.0
    clock.now += REPLICA_AGAIN_S
    assert waited() >= REPLICA_WAIT_S
    assert capsys.readouterr().err.count("no copy on another node") == 1
    safe = True
    assert waited() == 0.0
    safe = False
    assert waited() >= REPLICA_WAIT_S
    assert capsys.readouterr().err.count("no copy on another node") == 1


@pytest.mark.parametrize(
    ("snapshot_every", "replicated", "waits"),
    [(1, False, True), (1, True, True), (4, False, True), (4, True, False), (0, False, False), (0, True, False)],
)
def test_plain_ddp_waits_for_its_copy_as_well(snapshot_every: int, replicated: bool, waits: bool) -> None:
    """The random state of a rank on a lost node is nowhere but in its copy: a copy that lags by two steps would let
    replicated state go on with other dropout masks, and the losses would differ from then on."""
    assert needs_replica(snapshot_every, replicated) is waits
