"""Arrival: a version that is coming in, chunk by chunk, straight into the memory where it will lie.

A chunk counts when its bytes match their checksum; the version counts when all chunks do. A transfer that breaks off
leaves its arrival on the ``Shelf``, and the next one of the same version asks only for what is missing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from keepstep.checkpoint import pair, sums
from keepstep.checkpoint.exceptions import CheckpointError, SlotInvalid
from keepstep.checkpoint.slot import HEADER, Slot, Version, align, header_is_sound

MAX_SLOT = 1 << 42
"""Bytes; a larger announcement is a protocol error, not a reason to allocate."""
_SUM_BYTES = 8


class Passport(Struct, frozen=True, kw_only=True):
    """What identifies a version's bytes, chunk by chunk.

    Attributes:
        size: bytes of the version, header included.
        header: the first page of its file; it also holds words that change while the version stays the same.
        table: the checksum of each chunk behind the header.
    """

    version: Version
    size: int
    header: bytes
    table: tuple[int, ...]

    def check(self) -> None:
        """Raises ``SlotInvalid`` when this cannot be a version."""
        name = f"step {self.version.step}"
        if not HEADER < self.size <= MAX_SLOT:
            raise SlotInvalid(f"{name}: a version of {self.size} bytes cannot be right")
        if len(self.table) != chunk_count(self.size):
            raise SlotInvalid(f"{name}: {len(self.table)} checksums for {chunk_count(self.size)} chunks")
        if not header_is_sound(self.header):
            raise SlotInvalid(f"{name}: the header is not one of a complete version")

    def same(self, other: Passport) -> bool:
        return (self.version, self.size, self.table) == (other.version, other.size, other.table)

    def same_bytes(self, slot: Slot) -> bool:
        """Whether ``slot`` holds, sealed, exactly this."""
        if slot.version != self.version or not slot.sealed or slot.used != self.size:
            return False
        try:
            return tuple(slot.table()) == self.table
        except CheckpointError:
            return False


def chunk_count(size: int) -> int:
    return -(-(size - HEADER) // sums.CHUNK)


def pack_table(table: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(table)}Q", *table)


def unpack_table(data: bytes | bytearray) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // _SUM_BYTES}Q", data)


class Arrival:
    """Takes one version into ``slot``, which holds no version from here until ``finish``.

    Args:
        trusted: a slot that holds this very version with these checksums is taken as it is; otherwise each of its
            chunks is checked again, and those that do not match are asked for.
    """

    def __init__(self, slot: Slot, passport: Passport, *, trusted: bool = True) -> None:
        passport.check()
        self.slot, self.passport = slot, passport
        self.done = trusted and passport.same_bytes(slot)
        self._sound = bytearray(b"\1" if self.done else b"\0") * chunk_count(passport.size)
        there = slot.version == passport.version and slot.used == passport.size
        if not self.done:
            slot.begin()
            room = align(passport.size) + _SUM_BYTES * len(passport.table)
            if room > slot.size:
                slot.reserve(room, beside=True)
        self._serial = slot.serial
        if there and not self.done:
            for number in range(len(self._sound)):
                self.check(number)

    @property
    def alive(self) -> bool:
        """Whether nobody else has begun to write here since."""
        return self.slot.serial == self._serial and (self.slot.version is not None) == self.done

    def missing(self) -> list[int]:
        """Numbers of the chunks that are not here yet, or not sound."""
        return [number for number, sound in enumerate(self._sound) if not sound]

    @property
    def received(self) -> int:
        """Bytes that are here and sound."""
        count = sum(self._sound)
        short = count and self._sound[-1]
        return count * sums.CHUNK - (len(self._sound) * sums.CHUNK - (self.passport.size - HEADER) if short else 0)

    def view(self, number: int) -> memoryview:
        """Where the bytes of a chunk go. Release it soon."""
        start = HEADER + number * sums.CHUNK
        return memoryview(self.slot.memory)[start : min(start + sums.CHUNK, self.passport.size)]

    def nbytes(self, first: int, behind: int) -> int:
        """Bytes of these chunks together."""
        return min(HEADER + behind * sums.CHUNK, self.passport.size) - (HEADER + first * sums.CHUNK)

    def check(self, number: int) -> bool:
        """Whether a chunk that has been filled is what it should be; it counts from here on if so."""
        with self.view(number) as view:
            sound = sums.digest(view) == self.passport.table[number]
        self._sound[number] = sound
        return sound

    def finish(self) -> Path:
        """All bytes are here and sound: from now on the version counts."""
        if self.done:
            return self.slot.path
        version, missing = self.passport.version, self.missing()
        if missing:
            raise SlotInvalid(
                f"{self.slot.path.name} step {version.step}: {len(missing)} of {len(self._sound)} chunks are missing"
            )
        self.check_alone()
        self.slot.adopt(self.passport.header)
        if self.slot.version != version or self.slot.used != self.passport.size:
            self.slot.invalidate()
            raise SlotInvalid(f"{self.slot.path.name}: holds {self.slot.version} where {version} was announced")
        self.slot.seal(self.passport.table)
        self.done = True
        return self.slot.path

    def check_alone(self) -> None:
        """A sender that was cut off and came back writes here anew; the rest of its first try must not mix in."""
        if not self.alive:
            name, step = self.slot.path.name, self.passport.version.step
            raise SlotInvalid(f"{name} step {step}: a newer transfer has begun")


class Shelf:
    """The files for one rank's versions in one directory, kept open and mapped: pages stay present between versions."""

    def __init__(self, directory: Path, rank: int, *, trusted: bool = True) -> None:
        self._directory, self._rank, self._trusted = directory, rank, trusted
        self._pair: pair.Pair | None = None
        self._arrival: Arrival | None = None

    def arrival(self, passport: Passport) -> Arrival:
        """The one that broke off, when it was of the same bytes; else a new one."""
        before = self._arrival
        if before is not None and before.passport.same(passport) and self._in_place() and before.alive:
            return before
        self._arrival = None
        passport.check()
        files = self._files()
        slot = files.find(passport.version) or files.slots[files.target(passport.version.step)]
        self._arrival = Arrival(slot, passport, trusted=self._trusted)
        return self._arrival

    @property
    def received(self) -> int:
        """Bytes that are here of what was begun last."""
        return self._arrival.received if self._arrival is not None else 0

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._pair = self._arrival = None

    def _files(self) -> pair.Pair:
        if not self._in_place():
            self.close()
            self._pair = pair.Pair(self._directory, self._rank)
        assert self._pair is not None
        for slot in self._pair.slots:
            slot.refresh()
        return self._pair

    def _in_place(self) -> bool:
        """Whether the files that are open are still those that have the names."""
        if self._pair is None:
            return False
        try:
            return all(os.path.samestat(os.stat(slot.path), os.fstat(slot.fileno())) for slot in self._pair.slots)
        except OSError:
            return False
