"""Where the time of a step goes, in numbers that can be worked out by hand; the clock is the test's."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from keepstep.model.beat import Phase, Word
from keepstep.trainer import beat as beat_module
from keepstep.trainer import spent as spent_module
from keepstep.trainer import waits as waits_module
from keepstep.trainer.beat import Beat
from keepstep.trainer.data import StepData
from keepstep.trainer.spent import SPENT, Spent, elements
from keepstep.trainer.waits import Waits

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1_000 * MS

    def __call__(self) -> int:
        return self.now

    def later(self, ms: float) -> None:
        self.now += int(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (beat_module, spent_module, waits_module):
        monkeypatch.setattr(module, "monotonic_ns", made)
    return made


def test_a_thread_that_waits_is_counted_once(clock: Clock) -> None:
    """A wait within a wait adds nothing, and what is computed between two waits is not counted."""
    waits = Waits()
    waits.enter()
    clock.later(3)
    waits.enter()
    clock.later(2)
    waits.leave()
    waits.leave()
    clock.later(50)
    waits.enter()
    clock.later(1)
    waits.leave()
    assert waits.settle() == 6 * MS


def test_another_threads_wait_is_not_trainings(clock: Clock) -> None:
    """Who waits beside training holds up nobody."""
    waits = Waits()

    def wait() -> None:
        waits.enter()
        clock.later(9)
        waits.leave()

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert waits.settle() == 0


def test_the_thread_that_trains_may_be_another_one(clock: Clock) -> None:
    """It says so, and is counted from then on."""
    waits = Waits()

    def train() -> None:
        waits.here()
        waits.enter()
        clock.later(4)
        waits.leave()

    other = threading.Thread(target=train)
    other.start()
    other.join()
    assert waits.settle() == 4 * MS


def test_the_last_bucket_of_a_backward_is_waited_for(clock: Clock) -> None:
    """Two buckets: the first ends while gradients are still computed, and only the last one's end holds up the step."""
    waits = Waits()
    waits.launched()
    waits.promised()
    clock.later(5)
    waits.kept()  # beside computing
    clock.later(20)
    waits.launched()
    waits.promised()
    clock.later(7)
    waits.kept()
    clock.later(30)  # the optimizer
    assert waits.settle() == 7 * MS
    assert waits.settle() == 7 * MS, "counted once"


def test_a_reduction_of_the_scripts_own_after_backward_loses_nothing(clock: Clock) -> None:
    """The tail of backward counts when the thread is next seen waiting, and is not counted twice."""
    waits = Waits()
    waits.launched()
    waits.promised()
    clock.later(7)
    waits.kept()
    clock.later(10)
    waits.launched()
    waits.enter()
    clock.later(2)
    waits.leave()
    assert waits.settle() == 9 * MS


def test_only_steady_steps_are_summed(clock: Clock) -> None:
    """A first commit, one with an evaluation before it and one behind a rollback say nothing about the pace."""
    spent = Spent(Waits())
    beat = Beat(spent=spent)
    beat.epoch(1 << 16, 0)

    def step(ms: float, data: int = 0) -> None:
        beat.phase(Phase.STEP)
        clock.later(ms)
        spent.data_ns += data * MS
        beat.commit(beat.read(Word.STEP) + 1)

    step(500, data=100)  # the first one of an epoch: nothing to measure it from
    first = beat.read(Word.FIRST_NS)
    assert first == clock.now
    step(10, data=2)
    step(12, data=3)
    assert (beat.read(Word.PACED), beat.read(Word.PACED_NS), beat.read(Word.DATA_NS)) == (2, 22 * MS, 5 * MS)
    beat.phase(Phase.EVALUATION)
    clock.later(300)
    step(10, data=50)
    assert beat.read(Word.PACED) == 2
    step(10)
    assert (beat.read(Word.PACED), beat.read(Word.DATA_NS)) == (3, 5 * MS)
    assert beat.read(Word.FIRST_NS) == first
    beat.epoch(1 << 16, 2)
    assert beat.read(Word.FIRST_NS) == first, "a rollback within an epoch does not begin the count of windows anew"
    step(10)
    assert beat.read(Word.PACED) == 3
    beat.epoch(2 << 16, 2)
    assert beat.read(Word.FIRST_NS) == 0


def test_size_of_what_a_script_feeds() -> None:
    """Tensors in tuples, dicts and lists; what has no size counts for nothing, long lists are estimated."""
    assert elements((torch.ones(4, 3), torch.ones(4))) == 16
    assert elements({"ids": torch.ones(2, 8), "text": "abc", "n": 5}) == 16
    assert elements([torch.ones(2)] * 1000) == 2000
    assert elements("abc") == elements(None) == elements([]) == elements(7) == 0
    assert elements([[[[torch.ones(1)]]]]) == 0, "there is an end to how deep it looks"


def test_data_of_the_sdk_is_timed_and_measured() -> None:
    """A slow data set shows in the time and the size of what it gave."""

    class Slow:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.002)
            return torch.ones(5)

    data = StepData(Slow(), 4, collate=torch.stack)
    took, size = SPENT.data_ns, SPENT.size
    next(data)
    assert SPENT.data_ns - took >= 8 * MS
    assert SPENT.size - size == 20


def test_collections_are_timed() -> None:
    """A collection that the interpreter makes is found in the sum."""
    spent = Spent(Waits())
    spent.watch_collections()
    spent.watch_collections()
    try:
        rubbish = []
        for _ in range(2000):
            ring: list[object] = []
            ring.append(ring)
            rubbish.append(ring)
        del rubbish, ring
        gc.collect()
        once = spent.gc_ns
        assert once > 0
        assert gc.callbacks.count(spent._collected) == 1
    finally:
        gc.callbacks.remove(spent._collected)


def test_a_commit_is_cheap() -> None:
    """All that is counted costs a step a few microseconds, whatever the agent does with it."""
    beat = Beat(spent=Spent(Waits()))
    beat.phase(Phase.STEP)
    rounds, best = 2000, float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for index in range(rounds):
            beat.commit(index)
        best = min(best, (time.perf_counter() - began) / rounds)
    assert best < 20e-6, f"{best * 1e6:.1f} us per commit"
