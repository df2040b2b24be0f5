"""Slots: one version of one rank's state as a mapped file that is either complete or does not count.

A rank owns two such files and always writes the one that nobody would resume from. The header's state word is
cleared before the first byte changes and set, by a single eight-byte store, after the last one: a writer that is
killed at any instant leaves this version invalid and the other one intact.

Layout: one page of header | tensors, each aligned to 64 bytes | description (msgpack). The keeper copies the bytes as
they are to another node, where they mean the same.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from keepstep.checkpoint.exceptions import SlotFull, SlotInvalid

HEADER = 4096
ALIGN = 64
MAGIC = 0x4B53_534C_4F54_0001
VALID = 0x600D_600D
GROWTH = 1.02
"""A file that has to grow gets a little more than asked: small state of varying size must not re-map each step."""

_MAGIC, _STATE, _STEP, _EPOCH, _DATA, _META, _META_CRC, _ACKED, _SERIAL = range(9)
_WORDS = 16


class Version(Struct, frozen=True, order=True):
    """Identity of a state: committed steps, and the epoch in which that step was committed.

    The epoch tells a state apart from the one of a fenced-off history that happens to have the same step number.
    """

    step: int
    epoch: int


class TensorEntry(Struct, frozen=True, array_like=True):
    """Where one tensor lies. ``like`` says how a process that lacks it makes it: ``param`` or ``plain``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    like: str = "plain"
    device: str = "cpu"


class Description(Struct, frozen=True, kw_only=True):
    """Everything but the tensors' bytes."""

    tensors: tuple[TensorEntry, ...] = ()
    plain: bytes = b""
    key: str = ""
    full: bool = True
    """False for the small private part (buffers, random state, data position) that is kept when snapshots are off."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Description).decode


def align(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets from the start of the file for tensors of these sizes, and the end of the data."""
    offsets, end = [], HEADER
    for size in sizes:
        offsets.append(end)
        end = align(end + size)
    return offsets, end


class Slot:
    """One file. A writer calls ``begin``, fills ``memory``, then ``complete``; readers look at ``version``."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o600)
        try:
            if os.fstat(self._fd).st_size < HEADER:
                if not create:
                    raise SlotInvalid(f"{path}: {os.fstat(self._fd).st_size} bytes are less than a header")
                self._reserve(HEADER)
            self._map()
        except BaseException:
            os.close(self._fd)
            raise
        if create and self._words[_MAGIC] != MAGIC:
            self._words[_STATE] = 0
            self._words[_ACKED] = -1
            self._words[_MAGIC] = MAGIC

    def _map(self) -> None:
        self.size = os.fstat(self._fd).st_size
        self.memory = mmap.mmap(self._fd, self.size)
        self._words = memoryview(self.memory)[: _WORDS * 8].cast("q")

    def _reserve(self, size: int) -> None:
        """Allocate for real: writing into a hole of a full tmpfs would kill the process with SIGBUS."""
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise SlotFull(
                f"{self.path}: no room for {size} bytes ({error.strerror}); free memory, use fewer ranks per node, or "
                f"run with --snapshot-every 0"
            ) from error

    def grow(self, size: int) -> bool:
        """Make room for ``size`` bytes; true when ``memory`` is a new mapping and views into the old one are stale."""
        if size <= self.size:
            return False
        self._reserve(int(size * GROWTH) + HEADER)
        self._map()
        return True

    # ---------------------------------------------------------------- writing

    def begin(self) -> None:
        """From here until ``complete`` this version does not exist."""
        self._words[_STATE] = 0
        self._words[_SERIAL] += 1
        self._words[_ACKED] = -1

    def complete(self, version: Version, data_end: int, description: Description) -> None:
        """Add the description behind the data and make the version count, in this order."""
        body = _encode(description)
        self.grow(data_end + len(body))
        self.memory[data_end : data_end + len(body)] = body
        self._words[_STEP] = version.step
        self._words[_EPOCH] = version.epoch
        self._words[_DATA] = data_end
        self._words[_META] = len(body)
        self._words[_META_CRC] = zlib.crc32(body)
        self._words[_STATE] = VALID

    def invalidate(self) -> None:
        self._words[_STATE] = 0
        self._words[_SERIAL] += 1

    def adopt(self, header: bytes) -> None:
        """Take over the header of a version whose bytes have been received; the state word comes last."""
        words = memoryview(header)[: _WORDS * 8].cast("q")
        for index in (_STEP, _EPOCH, _DATA, _META, _META_CRC):
            self._words[index] = words[index]
        self._words[_STATE] = VALID

    # ---------------------------------------------------------------- reading

    @property
    def version(self) -> Version | None:
        """What this file holds; ``None`` while it is being written or after its writer died."""
        words = self._words
        if words[_MAGIC] != MAGIC or words[_STATE] != VALID:
            return None
        return Version(words[_STEP], words[_EPOCH])

    @property
    def serial(self) -> int:
        """Changes whenever somebody starts to overwrite; a reader compares it before and after."""
        return int(self._words[_SERIAL])

    @property
    def used(self) -> int:
        """Bytes that make up the version, header included."""
        return int(self._words[_DATA] + self._words[_META])

    @property
    def acked(self) -> int:
        """Step of which another node holds a verified copy; -1 for none. Written by the keeper alone."""
        return int(self._words[_ACKED])

    @acked.setter
    def acked(self, step: int) -> None:
        self._words[_ACKED] = step

    def describe(self) -> Description:
        """Raises ``SlotInvalid`` when the description is torn or damaged."""
        start, length = int(self._words[_DATA]), int(self._words[_META])
        if self.version is None:
            raise SlotInvalid(f"{self.path}: incomplete; its writer was stopped in the middle")
        if start < HEADER or length <= 0 or start + length > os.fstat(self._fd).st_size:
            raise SlotInvalid(f"{self.path}: description at {start}+{length} lies outside the file")
        self.refresh()
        body = self.memory[start : start + length]
        if zlib.crc32(body) != self._words[_META_CRC]:
            raise SlotInvalid(f"{self.path}: description does not match its checksum")
        try:
            return _decode(body)
        except msgspec.DecodeError as error:
            raise SlotInvalid(f"{self.path}: unreadable description: {error}") from error

    def refresh(self) -> None:
        """Map again if the writer has let the file grow since."""
        if os.fstat(self._fd).st_size != self.size:
            self._map()

    def close(self) -> None:
        self._words.release()
        with contextlib.suppress(BufferError):  # a tensor still looks into the mapping; it goes with the last view
            self.memory.close()
        os.close(self._fd)


def header_is_sound(header: bytes) -> bool:
    """Whether bytes received from a peer start like a complete version."""
    if len(header) < HEADER:
        return False
    words = memoryview(header)[: _WORDS * 8].cast("q")
    return words[_MAGIC] == MAGIC and words[_STATE] == VALID and words[_DATA] >= HEADER and words[_META] > 0


def to_overwrite(versions: Sequence[Version | None], step: int) -> int:
    """Index of the file to write ``step`` into: never the newest state below ``step``.

    An incomplete file first, then one of a future that was rolled back, then the oldest.
    """
    for index, version in enumerate(versions):
        if version is None:
            return index
    future = [i for i, v in enumerate(versions) if v is not None and v.step >= step]
    if future:
        return future[0]
    return min(range(len(versions)), key=lambda i: versions[i] or Version(-1, -1))
