"""Slots: one version of one rank's state as a mapped file that is either complete or does not count.

A rank owns two such files and always writes the one that nobody would resume from. The header's state word is
cleared before the first byte changes and set, by a single eight-byte store, after the last one: a writer that is
killed at any instant leaves this version invalid and the other one intact.

Layout: one page of header | tensors, each aligned to 64 bytes | description (msgpack). The keeper *seals* a version by
adding the checksums of its chunks, and copies the bytes as they are to another node, where they mean the same. The
checksums are a small file beside the slot, put there whole: a sealer that was held up while the trainer went on must
not be able to write into what came after.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from keepstep.checkpoint import pages, sums
from keepstep.checkpoint.exceptions import SlotDamaged, SlotFull, SlotInvalid

HEADER = 4096
ALIGN = 64
MAGIC = 0x4B53_534C_4F54_0002
GROWTH = 1.02
"""A file that has to grow gets a little more than asked: small state of varying size must not re-map each step."""

_MAGIC, _STATE, _STEP, _EPOCH, _DATA, _META, _META_SUM, _ACKED, _SERIAL, _SEALED, _PIN = range(11)
_WORDS = 16
_IDENTITY = (_MAGIC, _STEP, _EPOCH, _DATA, _META, _META_SUM)
_FORMAT = struct.Struct(f"<{len(_IDENTITY)}q")
_SUM = struct.Struct("<q")


class Version(Struct, frozen=True, order=True):
    """Identity of a state: committed steps, and the epoch in which that step was committed.

    The epoch tells a state apart from the one of a fenced-off history that happens to have the same step number.
    """

    step: int
    epoch: int


class TensorEntry(Struct, frozen=True, array_like=True):
    """Where one tensor lies.

    Attributes:
        like: how a process that lacks it makes it: ``param`` or ``plain``.
        global_shape: of the distributed tensor that this is a piece of; empty where it is whole by itself.
        corner: where in that tensor this piece begins, one offset per dimension.
        primary: whether this rank writes it to durable tiers; of equal copies on several ranks exactly one is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    like: str = "plain"
    device: str = "cpu"
    global_shape: tuple[int, ...] = ()
    corner: tuple[int, ...] = ()
    primary: bool = True


class Description(Struct, frozen=True, kw_only=True):
    """Everything but the tensors' bytes."""

    tensors: tuple[TensorEntry, ...] = ()
    plain: bytes = b""
    key: str = ""
    world_size: int = 1
    replicated: bool = False
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
        self._table = path.with_name(f"{path.name}.sums")
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

    def reserve(self, size: int, *, beside: bool = False) -> None:
        """Make room for ``size`` bytes and touch every page, so that no step pays for page faults.

        Args:
            beside: come back at once and touch them from the front meanwhile, for somebody who fills them in order.
        """
        self.grow(size)
        if beside:
            pages.populate_beside(self.memory)
        else:
            pages.populate(self.memory)

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

    def make_room(self, data_end: int, description: Description) -> bytes:
        """Let the file be large enough for such a version, so that ``complete`` will not have to map it anew.

        Returns:
            The description as ``complete`` takes it, too.
        """
        body = _encode(description)
        self.grow(data_end + len(body))
        return body

    def complete(self, version: Version, data_end: int, description: Description | bytes) -> None:
        """Add the description behind the data and make the version count, in this order."""
        body = description if isinstance(description, bytes) else _encode(description)
        end = data_end + len(body)
        self.grow(end)
        self.memory[data_end:end] = body
        self._words[_STEP] = version.step
        self._words[_EPOCH] = version.epoch
        self._words[_DATA] = data_end
        self._words[_META] = len(body)
        self._words[_META_SUM] = _signed(sums.digest(body))
        self._words[_STATE] = _identity(self._words)

    def invalidate(self) -> None:
        self._words[_STATE] = 0
        self._words[_SERIAL] += 1

    def adopt(self, header: bytes) -> None:
        """Take over the header of a version whose bytes have been received; the state word comes last."""
        words = memoryview(header)[: _WORDS * 8].cast("q")
        for index in (_STEP, _EPOCH, _DATA, _META, _META_SUM):
            self._words[index] = words[index]
        self._words[_STATE] = _identity(self._words)

    # ---------------------------------------------------------------- checksums

    def seal(self, table: Sequence[int] | None = None) -> None:
        """Add the checksums of the version's chunks.

        Args:
            table: checksums that are known already; they are computed where left out.

        Raises:
            SlotInvalid: there is no version, or the writer began to overwrite it meanwhile.
        """
        version, serial = self.version, self.serial
        if version is None:
            raise SlotInvalid(f"{self.path}: incomplete; there is nothing to seal")
        self.refresh()
        found = list(table) if table is not None else self._compute(self.used)
        body = _SUM.pack(serial) + b"".join(_SUM.pack(_signed(number)) for number in found)
        fresh = self._table.with_name(f"{self._table.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            fresh.write_bytes(_SUM.pack(_signed(sums.digest(body))) + body)
            if self.serial != serial:
                raise SlotInvalid(f"{self.path}: was overwritten while it was being sealed")
            os.replace(fresh, self._table)
        except OSError as error:
            raise SlotFull(f"{self.path}: no room for its checksums ({error.strerror}); free memory") from error
        finally:
            fresh.unlink(missing_ok=True)
        self._words[_SEALED] = serial

    @property
    def sealed(self) -> bool:
        """Whether this version has its checksums."""
        return self.version is not None and self._words[_SEALED] == self._words[_SERIAL]

    def table(self) -> list[int]:
        """The checksums of a sealed version's chunks, which cover the bytes from ``HEADER`` to ``used``.

        Raises:
            SlotInvalid: not sealed.
            SlotDamaged: the checksums themselves have changed.
        """
        if not self.sealed:
            raise SlotInvalid(f"{self.path}: has no checksums yet")
        serial, expected = self.serial, _count(self.used)
        try:
            data = self._table.read_bytes()
        except OSError as error:
            raise SlotInvalid(f"{self.path}: its checksums cannot be read: {error}") from error
        digest, body = data[: _SUM.size], data[_SUM.size :]
        if digest != _SUM.pack(_signed(sums.digest(body))):
            raise SlotDamaged(f"{self.path}: the table of checksums is damaged")
        found = [number for (number,) in _SUM.iter_unpack(body)]
        if found[0] != serial or len(found) != expected + 1:
            raise SlotInvalid(f"{self.path}: its checksums are those of another version")
        return [number & _MASK for number in found[1:]]

    def verify(self) -> None:
        """Compare every byte of a sealed version with its checksum.

        Raises:
            SlotInvalid: not sealed.
            SlotDamaged: names the step and the bytes that differ.
        """
        expected = self.table()
        found = self._compute(self.used)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a != b:
                start = HEADER + number * sums.CHUNK
                raise SlotDamaged(
                    f"{self.path} step {self._words[_STEP]}: bytes {start} to {min(start + sums.CHUNK, self.used)} do "
                    f"not match their checksum"
                )

    def _compute(self, end: int) -> list[int]:
        with memoryview(self.memory) as whole, whole[HEADER:end] as view:
            return sums.table(view)

    # ---------------------------------------------------------------- holding a version for the durable tiers

    def pin(self) -> None:
        """Ask that this version stay until the archiver has written it; the next ``begin`` ends that, too."""
        self._words[_PIN] = self._words[_SERIAL]

    def unpin(self) -> None:
        self._words[_PIN] = 0

    @property
    def pinned(self) -> bool:
        return self.version is not None and self._words[_PIN] == self._words[_SERIAL]

    # ---------------------------------------------------------------- reading

    @property
    def version(self) -> Version | None:
        """What this file holds; ``None`` while it is being written or after its writer died."""
        words = self._words
        if words[_MAGIC] != MAGIC or words[_STATE] != _identity(words):
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
    def data_end(self) -> int:
        """Where the tensors' bytes end and the description begins."""
        return int(self._words[_DATA])

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
        if _signed(sums.digest(body)) != self._words[_META_SUM]:
            raise SlotInvalid(f"{self.path}: description does not match its checksum")
        try:
            return _decode(body)
        except msgspec.DecodeError as error:
            raise SlotInvalid(f"{self.path}: unreadable description: {error}") from error

    def refresh(self) -> None:
        """Map again if the writer has let the file grow since."""
        if os.fstat(self._fd).st_size != self.size:
            self._map()

    def fileno(self) -> int:
        """The file itself, to see whether it is still the one of that name."""
        return self._fd

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
    return words[_MAGIC] == MAGIC and words[_STATE] == _identity(words) and words[_DATA] >= HEADER and words[_META] > 0


def to_overwrite(versions: Sequence[Version | None], step: int, pinned: Collection[int] = ()) -> int:
    """Index of the file to write ``step`` into: never the newest state below ``step``, nor a pinned one if avoidable.

    An incomplete file first, then one of a future that was rolled back, then the oldest.
    """
    for index, version in enumerate(versions):
        if version is None:
            return index
    future = [i for i, v in enumerate(versions) if v is not None and v.step >= step]
    if future:
        return future[0]
    by_age = sorted(range(len(versions)), key=lambda i: versions[i] or Version(-1, -1))
    return next((index for index in by_age[:-1] if index not in pinned), by_age[0])


_MASK = (1 << 64) - 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _count(end: int) -> int:
    return -(-(end - HEADER) // sums.CHUNK)


def _identity(words: memoryview) -> int:
    """The state word of a complete version: a checksum of the words that say what it is. Never 0."""
    return _signed(sums.digest(_FORMAT.pack(*(words[index] for index in _IDENTITY)))) or 1
