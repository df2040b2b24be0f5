"""Heartbeat of the trainer: stores into mapped memory that the agent reads. No system call, no lock in a step."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from time import monotonic_ns

from keepstep.model.beat import LAYOUT, SIZE, Phase, Word
from keepstep.trainer.spent import SPENT, Spent


class Beat:
    """The words of one slot. Without a path it is private memory: the same code then runs under no agent.

    Args:
        spent: where the time of this process's steps is counted.
    """

    def __init__(self, path: Path | None = None, spent: Spent = SPENT) -> None:
        self._spent, self._before = spent, spent.sums()
        self._steady = False
        """Nothing but training since the last commit."""
        self._memory = mmap.mmap(-1, SIZE) if path is None else _map(path)
        self._words = memoryview(self._memory).cast("q")
        self._words[Word.PID] = os.getpid()
        self._arriving = threading.Lock()
        self.phase(Phase.SETUP)
        self._words[Word.LAYOUT] = LAYOUT

    def phase(self, phase: Phase) -> None:
        self._words[Word.PHASE] = phase
        self._words[Word.BEAT_NS] = monotonic_ns()
        if phase is not Phase.STEP:
            self._steady = False

    @property
    def current(self) -> Phase:
        return Phase(self._words[Word.PHASE])

    def read(self, word: Word) -> int:
        return self._words[word]

    def epoch(self, epoch: int, step: int) -> None:
        """A new epoch begins: step times are not measured across it."""
        if epoch != self._words[Word.EPOCH]:
            self._words[Word.FIRST_NS] = 0
        self._words[Word.EPOCH] = epoch
        self._words[Word.STEP] = step
        self._words[Word.STEP_NS] = 0
        self._words[Word.COMMIT_NS] = 0
        self._steady = False
        self._words[Word.ARRIVED] = 0
        self._words[Word.RESTORING] = 0
        self._words[Word.BEAT_NS] = monotonic_ns()

    def commit(self, step: int) -> None:
        words, now = self._words, monotonic_ns()
        before = words[Word.COMMIT_NS]
        words[Word.STEP_NS] = now - before if before else 0
        self._account(now - before)
        if not words[Word.FIRST_NS]:
            words[Word.FIRST_NS] = now
        words[Word.COMMIT_NS] = now
        words[Word.STEP] = step
        words[Word.BEAT_NS] = now

    def _account(self, took_ns: int) -> None:
        """Add what the step took to the sums, if it was one like any other."""
        words, before, after = self._words, self._before, self._spent.sums()
        self._before = after
        if self._steady:
            words[Word.PACED_NS] += took_ns
            words[Word.WAIT_NS] += after[0] - before[0]
            words[Word.DATA_NS] += after[1] - before[1]
            words[Word.GC_NS] += after[2] - before[2]
            words[Word.SAVE_NS] += after[3] - before[3]
            words[Word.SIZE] += after[4] - before[4]
            words[Word.PACED] += 1
        self._steady = True

    def collective(self, started: int, finished: int) -> None:
        words = self._words
        words[Word.STARTED] = started
        words[Word.FINISHED] = finished
        words[Word.BEAT_NS] = monotonic_ns()

    def restoring(self, going: bool) -> None:
        """This rank begins, or has ended, to bring its state."""
        self._words[Word.RESTORING] = going
        self._words[Word.BEAT_NS] = monotonic_ns()

    def arrived(self, size: int) -> None:
        """So many more bytes of it are here; from any thread."""
        with self._arriving:
            self._words[Word.ARRIVED] += size
            self._words[Word.BEAT_NS] = monotonic_ns()

    def freed(self) -> None:
        """The main thread is out of its collective after an abort."""
        self._words[Word.ABORT_NS] = monotonic_ns()
        self._words[Word.BEAT_NS] = self._words[Word.ABORT_NS]


def _map(path: Path) -> mmap.mmap:
    """The agent has made the file; a worker that is older than its directory makes it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < SIZE:
            os.posix_fallocate(fd, 0, SIZE)
        return mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)
