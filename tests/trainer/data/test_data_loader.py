"""StepLoader: real worker processes that run ahead, are rolled back, die, and go away with their trainer."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from keepstep.trainer.data import StepData
from keepstep.trainer.loader_torch import StepLoader
from tests.trainer.data.sources import through_a_file

WORKERS = [(0, False), (2, False), (2, True)]
EXIT_LIMIT_MS = 20_000
"""Far above what a kill takes, far below the five seconds after which torch's workers look for their parent, twice."""


class Numbers:
    """Samples that say what they are, where and with which luck they were made."""

    def __init__(self, size: int = 40, *, fail_once: tuple[int, Path] | None = None, made: Any = None) -> None:
        self.size, self.fail_once, self.made = size, fail_once, made

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.made is not None:
            self.made.release()
        if self.fail_once is not None and index == self.fail_once[0] and not self.fail_once[1].exists():
            self.fail_once[1].touch()
            if get_worker_info() is None:
                raise OSError("bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        return index, random.random(), float(torch.rand(())), float(numpy.random.rand())


def numbers(batch: Any) -> list[int]:
    return [sample[0] for sample in batch]


def made(workers: tuple[int, bool], dataset: Any = None, **options: Any) -> StepLoader:
    count, persistent = workers
    return StepLoader(
        dataset if dataset is not None else Numbers(), 3, collate=list, num_workers=count,
        persistent_workers=persistent, **{"seed": 9, "rank": 1, "world_size": 2, **options},
    )  # fmt: skip


@pytest.mark.parametrize("workers", WORKERS)
def test_the_order_is_that_of_step_data(workers: tuple[int, bool]) -> None:
    """The same samples in the same batches, over the seam between passes, and either loads the other's state."""
    plain = StepData(range(40), 3, seed=9, rank=1, world_size=2)
    loader = made(workers)
    assert [numbers(next(loader)) for _ in range(9)] == [next(plain) for _ in range(9)]
    plain.load_state_dict(loader.state_dict())
    assert numbers(next(loader)) == next(plain)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_rollback_in_place_throws_prepared_batches_away(workers: tuple[int, bool]) -> None:
    """The state is what training has taken; put back, the same batches come again with the same luck, and go on."""
    loader = made(workers)
    next(loader)
    saved = through_a_file(loader.state_dict())
    assert saved["position"] == 6
    first = [next(loader) for _ in range(4)]
    loader.load_state_dict(saved)
    again = [next(loader) for _ in range(6)]
    assert again[:4] == first
    loader.load_state_dict(saved)
    loader.load_state_dict(saved)
    assert [next(loader) for _ in range(6)] == again


def test_workers_do_run_ahead() -> None:
    """More samples are made than training has taken; the state counts only the taken ones."""
    counter = multiprocessing.get_context("fork").Semaphore(0)
    loader = made((1, False), Numbers(made=counter), prefetch_factor=4)
    next(loader)
    next(loader)
    for _ in range(5 * 3):
        assert counter.acquire(timeout=60)
    assert loader.state_dict()["position"] == 12


def test_luck_belongs_to_the_sample() -> None:
    """Random augmentation is the same with any number of workers, any number of ranks, and after a restore."""
    want = [sample for loader in (made((0, False), rank=r) for r in range(2)) for sample in next(loader)]
    assert len({sample[1] for sample in want}) == len({sample[2] for sample in want}) == 6
    alone = StepLoader(Numbers(), 6, seed=9, collate=list, num_workers=2)
    assert next(alone) == want


@pytest.mark.parametrize("workers", WORKERS)
def test_the_trainers_own_random_numbers_are_left_alone(workers: tuple[int, bool]) -> None:
    """Making samples and starting workers draws nothing: dropout after a rollback is what it would have been."""
    random.seed(1)
    torch.manual_seed(1)
    numpy.random.seed(1)
    want = random.random(), float(torch.rand(())), float(numpy.random.rand())
    random.seed(1)
    torch.manual_seed(1)
    numpy.random.seed(1)
    loader = made(workers)
    saved = loader.state_dict()
    next(loader)
    loader.load_state_dict(saved)
    next(loader)
    assert (random.random(), float(torch.rand(())), float(numpy.random.rand())) == want


@pytest.mark.parametrize("workers", WORKERS)
def test_a_worker_that_dies_is_torchs_error_and_loses_nothing(workers: tuple[int, bool], tmp_path: Path) -> None:
    """The error is the usual one; whoever catches it gets the batch that failed, and then the next, not a later one."""
    loader = made(workers, Numbers(fail_once=(10, tmp_path / "failed")), shuffle=False)

    def take() -> None:
        for _ in range(3):
            next(loader)

    error, words = (OSError, "bad sample") if workers[0] == 0 else (RuntimeError, r"worker \(pid.*(killed|exited)")
    with pytest.raises(error, match=words):
        take()
    position = loader.position
    assert position in (0, 6)  # torch tells of a dead worker as soon as it can, maybe before its batch is due
    assert [numbers(next(loader)) for _ in range(2)] == [[p + 3, p + 4, p + 5] for p in (position, position + 6)]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_end_of_the_last_pass(persistent: bool) -> None:
    """Ends where StepData ends, again and again, and can be rolled back from there."""
    loader = made((1, persistent), Numbers(13), passes=1)
    saved = loader.state_dict()
    first = [numbers(batch) for batch in loader]
    assert len(first) == 2
    assert list(loader) == []
    loader.load_state_dict(saved)
    assert [numbers(batch) for batch in loader] == first


def test_a_loader_that_nobody_holds_takes_its_workers_along() -> None:
    """Its workers are gone with the last reference, without waiting for the garbage collector."""
    before = {child.pid for child in multiprocessing.active_children()}
    loader = made((2, True))
    next(loader)
    assert len({child.pid for child in multiprocessing.active_children()} - before) == 2
    del loader
    assert {child.pid for child in multiprocessing.active_children()} <= before


TRAINER = """
    import multiprocessing, sys, time
    from keepstep.trainer.loader_torch import StepLoader

    class Slow(list):
        def __getitem__(self, index):
            if index >= 4:
                time.sleep(1000)
            return index

    loader = StepLoader(Slow(range(100)), 4, shuffle=False, num_workers=2)
    next(loader)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(1000)
"""


def test_workers_die_with_the_trainer() -> None:
    """kill -9 of the trainer: its workers are gone at once, idle or in the middle of a sample."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER)], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert trainer.stdout is not None
    watched = {os.pidfd_open(int(pid)): int(pid) for pid in trainer.stdout.readline().split()}
    try:
        assert len(watched) == 2
        trainer.kill()
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        left = dict(watched)
        while left:
            events = poll.poll(EXIT_LIMIT_MS)
            assert events, f"workers {sorted(left.values())} outlived their trainer"
            for fd, _ in events:
                poll.unregister(fd)
                del left[fd]
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        for fd in watched:
            os.close(fd)


def test_what_cannot_be_asked_by_number_is_sent_to_the_stream() -> None:
    """The message names the class to use."""

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    with pytest.raises(TypeError, match="StepStream"):
        StepLoader(Endless(), 1)  # type: ignore[arg-type]


def test_everything_that_goes_to_a_worker_can_be_sent_there() -> None:
    """Start methods other than fork pickle the data set and what each worker begins with."""
    loader = made((1, False), multiprocessing_context="spawn")
    again = pickle.loads(pickle.dumps((loader._seeded, loader._begin)))
    assert again[0][(3, 5)] == loader._seeded[(3, 5)]


def test_batches_that_a_data_set_makes_by_itself() -> None:
    """``__getitems__`` of the data set is used where there is one."""

    class Several(Numbers):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"{index}" for index in indices]

    loader = made((0, False), Several(), shuffle=False)
    assert next(loader) == ["3", "4", "5"]
