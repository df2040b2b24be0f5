"""Pages: they are there before somebody fills them, their contents stay, and nobody else has to wait meanwhile."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint import pages
from keepstep.checkpoint.slot import HEADER, Slot

SIZE = 32 * 1024 * 1024 + 3 * mmap.PAGESIZE
COUNT = SIZE // mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """A fresh file in memory, mapped, with nothing behind it yet."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, SIZE)
    mapped = mmap.mmap(fd, SIZE)
    os.close(fd)
    yield mapped
    mapped.close()


def faults(work: Callable[[], None]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def fill(memory: mmap.mmap) -> None:
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1


def test_whoever_fills_populated_memory_pays_no_faults(memory: mmap.mmap) -> None:
    pages.populate(memory)
    assert faults(lambda: fill(memory)) < COUNT // 20


def test_memory_that_was_not_populated_pays_one_per_page(memory: mmap.mmap) -> None:
    """Else the test above would prove nothing."""
    assert faults(lambda: fill(memory)) > COUNT // 20


def test_beside_it_happens_in_another_thread(memory: mmap.mmap) -> None:
    thread = pages.populate_beside(memory)
    assert thread is not threading.current_thread()
    thread.join(60)
    assert faults(lambda: fill(memory)) < COUNT // 20


def test_contents_stay(memory: mmap.mmap) -> None:
    for at in range(0, SIZE, 123_457):
        memory[at] = at % 251
    pages.populate(memory)
    assert all(memory[at] == at % 251 for at in range(0, SIZE, 123_457))


class _Old:
    """The C library of a system whose kernel does not know the advice, or has no memory."""

    def __init__(self, number: int) -> None:
        self._number = number

    def madvise(self, *_: object) -> int:
        ctypes.set_errno(self._number)
        return -1


def test_an_older_kernel_gets_one_store_per_page(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    memory[5 * mmap.PAGESIZE] = 7
    monkeypatch.setattr(pages, "_libc", _Old(errno.EINVAL))
    pages.populate(memory)
    assert memory[5 * mmap.PAGESIZE] == 7
    assert faults(lambda: fill(memory)) < COUNT // 20


def test_no_memory_is_an_error_that_says_so(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_libc", _Old(errno.ENOMEM))
    with pytest.raises(OSError, match="Cannot allocate memory: bytes 0 to"):
        pages.populate(memory)


def test_the_system_call_lets_go_of_the_interpreter() -> None:
    """Held for a second per gigabyte, a process with much state would neither beat nor answer. ``PyDLL`` holds it."""
    assert type(pages._libc) is ctypes.CDLL


def test_a_slot_reserves_with_its_pages(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "rank0.0", create=True)
    slot.reserve(HEADER + SIZE)
    assert slot.size >= HEADER + SIZE
    assert faults(lambda: fill(slot.memory)) < COUNT // 20
    slot.close()
