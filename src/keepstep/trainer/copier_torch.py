"""Copier: moves tensors to or from mapped memory in chunks that any thread may take.

Three ways were measured against each other for 1 GB in tensors of a transformer's sizes: torch's grouped copy, one
torch copy per tensor, and the C library's memmove. The last is the fastest with one thread and with several, and it
leaves the interpreter to others while it runs. Small tensors are moved many at a time without letting go of the
interpreter, since taking it back would cost more than the copy.

The C library writes around the caches from a size on that it works out of the machine's cache, and in a virtual
machine that is often far too large; so the agent names a size when it starts trainers (``agent.environ.streaming``).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 8 * 1024 * 1024
"""Bytes that one thread takes at a time: small enough to share evenly, large enough to be all copy."""
SMALL = 64 * 1024
"""Bytes up to which a run is moved without letting other threads of the interpreter in."""
ALONE = 4 * 1024 * 1024
"""A copy up to this size is done where it is asked for: waking a helper would take as long."""
MOST_THREADS = 8
"""More do not copy faster: the memory is the limit."""

_MOVE_TYPE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_ADDRESS = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
move = ctypes.CFUNCTYPE(*_MOVE_TYPE)(_ADDRESS)
move_small = ctypes.PYFUNCTYPE(*_MOVE_TYPE)(_ADDRESS)


class Run(NamedTuple):
    """Bytes that lie in one piece at both ends, by address."""

    to: int
    start: int
    size: int


Chunk = Callable[[], None]


def copy_threads() -> int:
    """Threads for a copy that everybody waits for: this rank's share of the cores it may use."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


def flat(tensor: Tensor) -> bool:
    """Whether the tensor's bytes are one run of host memory."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()


def runs(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[list[Run], list[tuple[Tensor, Tensor]]]:
    """What can be moved by address, and the pairs that torch has to copy: strided, or of different types."""
    found: list[Run] = []
    odd: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if not source.nbytes:
            continue
        if flat(target) and flat(source) and target.dtype == source.dtype and source.data_ptr():
            found.append(Run(target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            odd.append((target, source))
    return found, odd


def plan(found: Iterable[Run], odd: Sequence[tuple[Tensor, Tensor]] = ()) -> list[Chunk]:
    """Chunks of about equal size: large runs are cut, small ones are put together."""
    chunks: list[Chunk] = []
    group: list[Run] = []
    held = 0
    for run in found:
        if run.size > SMALL:
            chunks += [_large(run, at, min(CHUNK, run.size - at)) for at in range(0, run.size, CHUNK)]
            continue
        group.append(run)
        held += run.size
        if held >= CHUNK:
            chunks.append(_small(group))
            group, held = [], 0
    if group:
        chunks.append(_small(group))
    if odd:
        chunks.append(_strange(odd))
    return chunks


def _large(run: Run, at: int, size: int) -> Chunk:
    to, start = run.to + at, run.start + at

    def copy() -> None:
        move(to, start, size)

    return copy


def _small(group: list[Run]) -> Chunk:
    def copy() -> None:
        for to, start, size in group:
            move_small(to, start, size)

    return copy


def _strange(odd: Sequence[tuple[Tensor, Tensor]]) -> Chunk:
    targets, sources = [target for target, _ in odd], [source for _, source in odd]

    def copy() -> None:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    return copy


class Job:
    """Chunks on their way; whoever calls ``help`` takes part until none is left to take.

    Args:
        intact: asked by whoever copies the last chunk, before anybody is told that the job is done: whether what was
            copied is still what it was when the job began.
    """

    def __init__(self, chunks: Iterable[Chunk], intact: Callable[[], bool] | None = None) -> None:
        self._left = deque(chunks)
        self._open = len(self._left)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._intact = intact
        self._error: BaseException | None = None
        self.intact = True
        if not self._open:
            self._over.set()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def help(self) -> None:
        """Copy chunks until all are taken; others may still be busy with theirs."""
        while True:
            try:
                chunk = self._left.popleft()
            except IndexError:
                return
            try:
                if self._error is None:
                    chunk()
            except BaseException as error:  # told to whoever waits
                self._error = error
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                if self._intact is not None and self._error is None:
                    self.intact = self._intact()
                self._over.set()

    def settle(self) -> None:
        """Until no chunk is being copied any more, doing a part of it; what went wrong is for ``wait`` to say."""
        self.help()
        self._over.wait()

    def wait(self) -> None:
        """The same; raises what went wrong with any chunk."""
        self.settle()
        if self._error is not None:
            raise self._error


class Copier:
    """Helper threads, started when there is something for them to do. They never outlive the process.

    Args:
        threads: that copy at the same time, the calling one included.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or copy_threads()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()

    def run(self, chunks: Sequence[Chunk], total: int) -> None:
        """Copy now, with everybody's help, and return when all is done."""
        job = Job(chunks)
        for _ in range(min(self.threads, len(chunks)) - 1 if total > ALONE else 0):
            self.give(job.help)
        job.wait()

    def give(self, work: Callable[[], None]) -> None:
        """Have a helper thread do this; it must not raise."""
        with self._lock:
            if self._started < self.threads:
                self._started += 1
                threading.Thread(target=_serve, args=(self._queue,), name="ks-copy", daemon=True).start()
        self._queue.put(work)

    def close(self) -> None:
        """Let the helpers go; a later ``give`` starts new ones."""
        with self._lock:
            for _ in range(self._started):
                self._queue.put(None)
            self._started = 0


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # it may hold the last reference to a mapping
