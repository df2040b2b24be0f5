"""Flight: the trainer's side of flight memory. A few stores per collective, no system call, no lock.

The layout is ``model.flight``. Each group has a ``Track``; it is renewed when the group is connected anew, so that all
members count from one again, and what an older epoch still had in the air counts no more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

from keepstep.model.flight import (
    ENTRY_WORDS,
    HEAD_WORDS,
    LAYOUT,
    RING,
    ROW_WORDS,
    ROWS,
    SIZE,
    STRIDE,
    TEXT_AT,
    TEXT_SIZE,
    WORD,
    Entry,
    Head,
    Row,
)
from keepstep.model.position import fold_members

_ENTRY = struct.Struct(f"={ENTRY_WORDS}q")
_put = _ENTRY.pack_into
_RING_AT = ROW_WORDS * WORD
_FINISHED, _OVER = int(Row.FINISHED), int(Entry.OVER)


class Track:
    """One stream of operations: a group's collectives, or its messages."""

    __slots__ = ("_at", "_finished", "_ring", "_words", "launched", "memory")

    def __init__(self, memory: mmap.mmap | bytearray, words: memoryview, at: int) -> None:
        self.memory = memory
        self._words: memoryview | None = words
        self._at = at
        self._ring = at * WORD + _RING_AT
        self.launched = 0
        self._finished = 0

    def launch(self, code: int, elements: int) -> int:
        """An operation is about to be launched; returns its number, from 1."""
        number = self.launched + 1
        words = self._words
        if words is not None:
            _put(self.memory, self._ring + number % RING * _ENTRY.size, number, code, elements, monotonic_ns(), 0)
            words[self._at] = number
        self.launched = number
        return number

    def finish(self, number: int) -> None:
        """It is over, well or not; on any thread."""
        words = self._words
        if words is None:
            return
        self._finished += 1
        words[self._at + _FINISHED] = self._finished
        entry = self._at + ROW_WORDS + number % RING * ENTRY_WORDS
        if words[entry] == number:
            words[entry + _OVER] = 1

    def retire(self) -> None:
        """Nothing of it counts from now on."""
        self._words = None


class Flight:
    """The streams of one process. Without a path, or where there is no room for the file, it is private memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory = _open(path)
        self._words = memoryview(self._memory).cast("q")
        self._lock = threading.Lock()
        self._tracks: dict[tuple[str, bool], Track] = {}
        self._rows: dict[tuple[str, bool], int] = {}
        self._free: list[int] = []
        self._text_used = 0
        self._words[Head.PID] = os.getpid()
        self._words[Head.LAYOUT] = LAYOUT

    def track(self, group: str, ranks: Sequence[int], *, messages: bool = False) -> Track:
        """The stream of a group that has just been connected; an earlier one of it counts no more.

        Args:
            ranks: its members by their rank in the world.
        """
        key = group, messages
        with self._lock:
            if old := self._tracks.get(key):
                old.retire()
            row = self._rows.get(key)
            self._words[Head.VERSION] += 1
            try:
                row = self._add(key, ranks) if row is None else self._clear(row)
            finally:
                self._words[Head.VERSION] += 1
            if row is None:
                scratch = bytearray(STRIDE * WORD)
                track = Track(scratch, memoryview(scratch).cast("q"), 0)
            else:
                self._rows[key] = row
                track = Track(self._memory, self._words, _at(row))
            self._tracks[key] = track
            return track

    def forget(self, group: str) -> None:
        """The group has been destroyed."""
        with self._lock:
            for key in ((group, False), (group, True)):
                if track := self._tracks.pop(key, None):
                    track.retire()
                row = self._rows.pop(key, None)
                if row is not None:
                    self._words[Head.VERSION] += 1
                    self._words[_at(row) + Row.LENGTH] = 0
                    self._words[Head.VERSION] += 1
                    self._free.append(row)

    def _clear(self, row: int) -> int:
        at = _at(row)
        self._words[at + Row.LAUNCHED] = self._words[at + Row.FINISHED] = 0
        return row

    def _add(self, key: tuple[str, bool], ranks: Sequence[int]) -> int | None:
        text = f"{key[0]}\0{fold_members(ranks)}".encode()
        words, used = self._words, self._words[Head.ROWS]
        fresh = self._text_used + len(text) <= TEXT_SIZE
        row = next((row for row in self._free if self._room(row) >= len(text)), None)
        if row is not None:
            self._free.remove(row)
        elif used < ROWS and fresh:
            row = used
            words[_at(row) + Row.TEXT] = self._text_used
            self._text_used += len(text)
            words[Head.ROWS] = used + 1
        else:
            words[Head.DROPPED] += 1
            return None
        at = _at(self._clear(row))
        start = TEXT_AT + words[at + Row.TEXT]
        self._memory[start : start + len(text)] = text
        words[at + Row.MESSAGES] = int(key[1])
        words[at + Row.LENGTH] = len(text)
        return row

    def _room(self, row: int) -> int:
        """Bytes of text up to the next row's."""
        begins = self._words[_at(row) + Row.TEXT]
        later = [self._words[_at(other) + Row.TEXT] for other in range(self._words[Head.ROWS])]
        return min((begin for begin in later if begin > begins), default=self._text_used) - begins


def _at(row: int) -> int:
    """Index of the row's first word."""
    return HEAD_WORDS + row * STRIDE


def _open(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, SIZE)
    with contextlib.suppress(OSError):  # training goes on without, and positions are not told
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, SIZE)
            return mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
    return mmap.mmap(-1, SIZE)
