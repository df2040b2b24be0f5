"""The end of a run at level 1: as long as there is something to wait for, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.slot import Version
from keepstep.trainer import ending_torch
from keepstep.trainer.ending_torch import Ending, lost_parts

LIMIT_S = 20.0
Outcome = tuple[bool | None, tuple[int, ...]]


class World:
    """Ranks as threads, whose ``gather`` is a barrier."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here, self._shown = threading.local(), [None] * size
        self._barrier = threading.Barrier(size)
        self.rounds = 0
        monkeypatch.setattr(ending_torch, "gather", self._gather)
        monkeypatch.setattr(ending_torch, "ASK_EVERY_S", 0.002)

    def _gather(self, value: Any) -> list[Any]:
        self._shown[self._here.rank] = value
        self._barrier.wait(LIMIT_S)
        rows = list(self._shown)
        self.rounds += self._here.rank == 0
        self._barrier.wait(LIMIT_S)
        return rows

    def run(self, endings: Sequence[Ending]) -> list[Outcome]:
        found: list[Outcome | None] = [None] * len(endings)

        def rank(number: int) -> None:
            self._here.rank = number
            found[number] = endings[number].run()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(endings))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert all(one is not None for one in found), "a rank waits for ever"
        return [one for one in found if one is not None]


def nothing() -> list[int]:
    return []


def quiet(words: str) -> None:
    pass


def test_all_wait_until_the_node_of_rank_0_has_completed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are through at once, nobody has lost anything: rank 0's node is waited for, in many short collectives."""
    world = World(3, monkeypatch)

    def patient() -> bool:
        while world.rounds < 10:
            threading.Event().wait(0.001)
        return True

    endings = [Ending(finish, nothing, quiet) for finish in (patient, lambda: True, lambda: True)]
    assert world.run(endings) == [(True, ())] * 3
    assert world.rounds >= 10


def test_a_part_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2's node is through and its parts are not there: rank 0, which would wait for them, is told who."""
    world, never = World(3, monkeypatch), threading.Event()

    def lost() -> Sequence[int]:
        return [2]

    endings = [
        Ending(lambda: never.wait(LIMIT_S), nothing, quiet), Ending(lambda: True, nothing, quiet),
        Ending(lambda: False, lost, quiet),
    ]  # fmt: skip
    assert world.run(endings) == [(None, (2,)), (True, (2,)), (False, (2,))]
    never.set()


def test_nobody_says_what_is_lost_before_its_own_archiver_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is still being written is not there either."""
    world = World(2, monkeypatch)
    written = threading.Event()

    def writing() -> bool:
        while world.rounds < 5:
            threading.Event().wait(0.001)
        written.set()
        return True

    endings = [
        Ending(lambda: written.wait(LIMIT_S), nothing, quiet),
        Ending(writing, lambda: [] if written.is_set() else [1], quiet),
    ]
    assert world.run(endings) == [(True, ()), (True, ())]


def test_people_hear_every_few_seconds_whom_the_end_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    said: list[str] = []
    seconds = iter(range(1000))

    def patient() -> bool:
        while world.rounds < 13:
            threading.Event().wait(0.001)
        return True

    clock: Callable[[], float] = lambda: float(next(seconds))  # noqa: E731
    world.run([Ending(lambda: True, nothing, said.append, clock), Ending(patient, nothing, quiet)])
    assert said[:2] == ["5 s so far; rank 1 not through yet", "10 s so far; rank 1 not through yet"]


def test_what_cannot_be_seen_from_here_is_lost(tmp_path: Path) -> None:
    """A tier that this node does not reach has not got its parts."""
    assert lost_parts(str(tmp_path / "nowhere"), Version(3, 1), [4, 5]) == [4, 5]
    (tmp_path / "there").mkdir()
    assert lost_parts(str(tmp_path / "there"), Version(3, 1), [4]) == [4]
