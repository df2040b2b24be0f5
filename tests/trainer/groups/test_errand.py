"""Errands: blocking work that one can walk away from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.trainer import errand as module
from keepstep.trainer.errand import Errand, TooManyErrands


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Blocks what waits for it until the test ends at the latest."""
    gate = threading.Event()
    yield gate
    gate.set()


def never() -> bool:
    return False


def test_result_and_error_come_back() -> None:
    """What the call returned is returned; what it raised is raised."""
    bell = threading.Condition()
    good: Errand[int] = Errand(lambda: 7, bell=bell, discard=print)
    assert good.wait(limit_s=5, stop=never)
    assert good.result() == 7
    bad: Errand[Any] = Errand(lambda: 1 / 0, bell=bell, discard=print)
    assert bad.wait(limit_s=5, stop=never)
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_a_stop_ends_the_wait_and_the_late_result_is_discarded(gate: threading.Event) -> None:
    """Who is told to stop does not wait for the call; what it makes later is thrown away, not leaked."""
    bell, stopped, thrown = threading.Condition(), threading.Event(), threading.Event()
    late: Errand[bool] = Errand(gate.wait, bell=bell, discard=lambda _: thrown.set())

    def stop() -> None:
        with bell:
            stopped.set()
            bell.notify_all()

    before = Errand.abandoned()
    threading.Timer(0.05, stop).start()
    assert not late.wait(limit_s=30, stop=stopped.is_set)
    assert Errand.abandoned() == before + 1
    gate.set()
    assert thrown.wait(5)


def test_the_limit_ends_the_wait(gate: threading.Event) -> None:
    """Nobody waits for ever."""
    slow: Errand[bool] = Errand(gate.wait, bell=threading.Condition(), discard=lambda _: None)
    assert not slow.wait(limit_s=0.02, stop=never)


def test_abandoned_threads_are_bounded(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many are stuck, the next one is refused with a sentence."""
    first: Errand[bool] = Errand(gate.wait, bell=threading.Condition(), discard=lambda _: None)
    assert not first.wait(limit_s=0.01, stop=never)
    monkeypatch.setattr(module, "MAX_ABANDONED", 1)
    with pytest.raises(TooManyErrands, match="restart the process"):
        Errand(gate.wait, bell=threading.Condition(), discard=lambda _: None)
