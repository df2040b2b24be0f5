"""Work that all wait for: asked about again and again, given up together, counted in the heartbeat."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from keepstep.model.beat import Word
from keepstep.trainer import together_torch
from keepstep.trainer.beat import Beat
from keepstep.trainer.together_torch import Together


def test_nobody_waits_in_one_collective_for_as_long_as_another_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that still works answers every now and then; the outcome is given when the last one has its own."""
    monkeypatch.setattr(together_torch, "ASK_EVERY_S", 0.001)
    answers: list[bool] = []
    go_on = threading.Event()

    def everybody(good: bool) -> bool:
        answers.append(good)
        if len(answers) == 3:
            go_on.set()
            monkeypatch.setattr(together_torch, "ASK_EVERY_S", 10.0)
        return good and len(answers) > 4  # another rank needs a little longer

    monkeypatch.setattr(together_torch, "everybody", everybody)
    assert Together(lambda: False).run(lambda: go_on.wait(10) and "whole") == "whole"
    assert answers == [False, False, False, True, True]


def test_work_for_ranks_that_are_gone_ends_before_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective breaks: the thread that fills this rank's memory must not go on beside what comes next."""
    monkeypatch.setattr(together_torch, "ASK_EVERY_S", 0.001)
    together = Together(lambda: False)
    ended = threading.Event()

    def work() -> None:
        for _ in range(10_000):
            if together.in_vain():
                ended.set()
                return
            threading.Event().wait(0.001)

    def everybody(good: bool) -> bool:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(together_torch, "everybody", everybody)
    with pytest.raises(RuntimeError, match="closed by peer"):
        together.run(work)
    assert ended.is_set()
    monkeypatch.setattr(together_torch, "everybody", lambda good: good)
    assert together.run(lambda: together.in_vain()) is False


def test_what_the_work_raised_is_raised_once_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together_torch, "everybody", lambda good: good)

    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        Together(lambda: False).run(work)


def test_bytes_are_counted_from_any_thread_and_begin_anew_with_an_epoch(tmp_path: Path) -> None:
    """Each arrival is a sign of life, and none is lost."""
    beat = Beat(tmp_path / "b" / "s0")
    before = beat.read(Word.BEAT_NS)
    threads = [threading.Thread(target=lambda: [beat.arrived(3) for _ in range(1000)]) for _ in range(8)]
    beat.restoring(True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (beat.read(Word.ARRIVED), beat.read(Word.RESTORING)) == (24_000, 1)
    assert beat.read(Word.BEAT_NS) > before
    beat.restoring(False)
    assert beat.read(Word.RESTORING) == 0
    beat.epoch(2, 5)
    assert beat.read(Word.ARRIVED) == 0
