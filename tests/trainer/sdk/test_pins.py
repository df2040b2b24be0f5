"""Pins: what is due for the durable tiers is held, once at a time, and the run does not end before it is written."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.notes import read
from keepstep.checkpoint.slot import Version
from keepstep.model.env import ARCHIVER_SOCKET, NOTES_SOCKET
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.trainer import final, pacing_torch
from keepstep.trainer.exceptions import StepMisused
from keepstep.trainer.final import ABSENT_S, FINAL_WAIT_S, until_durable
from keepstep.trainer.pacing_torch import Pacing, copy_mode
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State


def listen(path: Path) -> socket.socket:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.bind(str(path))
    bell.setblocking(False)
    return bell


def heard(bell: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(bell.recv(4096))
        except BlockingIOError:
            return found


class Rank:
    """One rank with durable tiers every fifth step, and ears where archiver and agent would be."""

    def __init__(self, directory: Path) -> None:
        self.archiver, self.agent = listen(directory / ARCHIVER_SOCKET), listen(directory / NOTES_SOCKET)
        module = nn.Linear(4, 4)
        self.state = State()
        self.state.register({"module": module, "sgd": torch.optim.SGD(module.parameters(), lr=0.1)}, None)
        self.state.bind()
        self.config = CheckpointConfig(job=JobId("j"), policy=CheckpointPolicy(dir="/somewhere", every=5))
        self.keep = Snapshots(directory / "snap", 7, directory / "keeper.sock", self.config)
        self.keep.overlap_from = 0
        self.keep.watch(self.state)
        self.pacing = Pacing(self.keep, 7, 23)
        self.pacing.restart(0, 1)

    def save(self, step: int, *, overlap: bool = False) -> None:
        if self.pacing.full(step):
            self.keep.save(
                self.state,
                Version(step, 1),
                key="k",
                full=True,
                ring=False,
                overlap=overlap,
                pin=self.pacing.durable(step),
            )

    def lift(self) -> None:
        """As the archiver does when it has written what is pinned."""
        for slot in self.keep._full.pinned():
            slot.unpin()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.archiver.close()
    made.agent.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_every_fifth_step_is_held_while_the_others_alternate(rank: Rank, overlap: bool) -> None:
    """The held version stays for as long as it takes; the newest two are there all the time; one due meanwhile is
    skipped, and that is told."""
    for step in range(1, 13):
        rank.save(step, overlap=overlap)
        if step >= 5:
            assert {Version(step, 1), Version(5, 1)} <= set(rank.keep.full())
        if step >= 7:
            assert Version(step - 1, 1) in rank.keep.full()
    assert rank.keep.pins.held() == [5]
    assert heard(rank.archiver) == [b"7 5"]
    (note,) = [read(data) for data in heard(rank.agent)]
    assert note is not None
    assert (note.what, note.tier, note.step, note.rank) == ("skipped", "remote", 10, 7)
    assert "step 5" in note.why
    rank.lift()
    for step in range(13, 17):
        rank.save(step, overlap=overlap)
    rank.keep.settle()
    assert rank.keep.pins.held() == [15]
    assert heard(rank.archiver) == [b"7 15"]


def test_all_ranks_leave_out_what_one_cannot_take(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that one rank lacks makes a generation incomplete: whoever is free leaves it out too, and only the rank
    that is behind tells why."""
    others = 1

    def all_reduce(count: torch.Tensor) -> None:
        count += others

    monkeypatch.setattr(pacing_torch.dist, "all_reduce", all_reduce)
    rank.pacing.agree_to_hold(5)
    assert rank.pacing.held != 5
    assert heard(rank.agent) == []
    others = 0
    rank.pacing.agree_to_hold(10)
    assert rank.pacing.held == 10
    rank.save(10)
    rank.pacing.agree_to_hold(11)
    rank.pacing.agree_to_hold(15)
    assert rank.pacing.held == 10
    (note,) = [read(data) for data in heard(rank.agent)]
    assert note is not None
    assert (note.what, note.step) == ("skipped", 15)
    rank.lift()
    rank.pacing.agree_to_hold(15)
    assert rank.pacing.held == 15
    others = 1
    rank.pacing.agree_to_hold(15)  # the step is done again after a recovery, and now another rank is busy
    assert rank.pacing.held != 15


def test_a_due_step_is_taken_whatever_the_interval(rank: Rank) -> None:
    """With snapshots every 4 steps, or none at all, multiples of 5 and the last step still are full ones."""
    rank.pacing.restart(0, 4)
    assert [step for step in range(24) if rank.pacing.full(step)] == [0, 4, 5, 8, 10, 12, 15, 16, 20, 23]
    rank.pacing.restart(0, 0)
    assert [step for step in range(24) if rank.pacing.full(step)] == [5, 10, 15, 20, 23]


def test_the_end_waits_until_the_last_step_is_written(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """First what is still held, then the last version; the archiver is reminded, should it have missed the bell."""
    rank.save(20)
    rank.save(23)  # due as the last one, but 20 is still held
    assert rank.keep.pins.held() == [20]
    clock = Clock(lambda now: rank.lift() if now in (102.0, 104.0) else None)
    monkeypatch.setattr(final, "time", clock)
    held: list[list[int]] = []
    remind = rank.keep.pins.remind
    monkeypatch.setattr(rank.keep.pins, "remind", lambda: (held.append(rank.keep.pins.held()), remind()))
    socket_path = rank.keep.archiver
    assert until_durable(rank.keep.pins, Version(23, 1), archiver=socket_path, rank=7, stop=lambda: False)
    assert clock.now == 104.0
    assert [20] in held
    assert [23] in held
    assert heard(rank.archiver)[-1] == b"7 23"


class Clock:
    """Virtual seconds in steps of half a second; sleeping is what makes them pass."""

    def __init__(self, at: Any = None) -> None:
        self.now = 100.0
        self._at = at or (lambda now: None)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 0.5
        self._at(self.now)


@pytest.mark.parametrize(("there", "limit"), [(False, ABSENT_S), (True, FINAL_WAIT_S)])
def test_the_end_does_not_wait_for_ever(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool, limit: float
) -> None:
    """Without an archiver, or with one that never gets there, the run ends all the same and says what is not safe."""
    clock = Clock()
    monkeypatch.setattr(final, "time", clock)
    rank.save(23)
    archiver = rank.keep.archiver if there else rank.keep.archiver.with_name("nobody")
    assert not until_durable(rank.keep.pins, Version(23, 1), archiver=archiver, rank=7, stop=lambda: False)
    assert limit <= clock.now - 100.0 <= limit + 1.0
    words = capsys.readouterr().err
    assert "step 23 is the last one; waiting" in words
    assert "not known to be in the durable tiers" in words


def test_a_last_step_without_a_snapshot_is_not_called_durable(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    """Its copy has failed: nothing is pinned, and that must not look like something that has been written."""
    rank.save(22)
    assert not until_durable(rank.keep.pins, Version(23, 1), archiver=rank.keep.archiver, rank=7, stop=lambda: False)
    assert "step 23 has no complete snapshot" in capsys.readouterr().err


def test_a_recovery_ends_the_wait(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's fault at the very end: this process's last state is needed, the loop goes on."""
    clock = Clock()
    monkeypatch.setattr(final, "time", clock)
    rank.save(23)
    stopped = until_durable(
        rank.keep.pins, Version(23, 1), archiver=rank.keep.archiver, rank=7, stop=lambda: clock.now > 101.0
    )
    assert not stopped
    assert clock.now < 102.0


def test_a_wrong_copy_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable, the value and what is allowed."""
    monkeypatch.setenv("KEEPSTEP_COPY", "fast")
    with pytest.raises(StepMisused, match="KEEPSTEP_COPY='fast' is none of auto, blocking, overlapped"):
        copy_mode()


def test_the_keeper_hears_of_a_rollback_once_it_is_true(rank: Rank, tmp_path: Path) -> None:
    """It may have copied the step that is forgotten, and be content: after that it must look again."""
    keeper = listen(tmp_path / "keeper.sock")
    rank.save(1)
    rank.save(2)
    rank.keep.load(rank.state, Version(1, 1), shards=True)
    heard(keeper)
    rank.keep.forget_after(Version(1, 1))
    assert rank.keep.full() == (Version(1, 1),)
    assert heard(keeper) == [b"7 1"]
