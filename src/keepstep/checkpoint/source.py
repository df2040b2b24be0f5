"""Source: the payload of a part, straight from a slot's mapped memory, each byte checked before it goes anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64

from keepstep.checkpoint import sums
from keepstep.checkpoint.exceptions import SlotDamaged, SlotInvalid
from keepstep.checkpoint.slot import HEADER, Description, Slot, TensorEntry, Version

GATHER = 1024 * 1024
"""Tensors smaller than this are put together, so that a tier sees few large writes."""
GROUP = 16 * 1024 * 1024
"""Most bytes of small tensors that are put together for one call of the difference codec."""


class Running:
    """Checksums per chunk of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._hash, self._room = xxh3_64(), sums.CHUNK
        self.size = 0

    def add(self, data: bytes | memoryview) -> None:
        with memoryview(data) as view:
            start, end = 0, len(view)
            self.size += end
            while start < end:
                take = min(self._room, end - start)
                if take == sums.CHUNK:
                    self._done.append(sums.digest(view[start : start + take]))
                else:
                    self._hash.update(view[start : start + take])
                    self._room -= take
                    if not self._room:
                        self._close()
                start += take

    def finish(self) -> tuple[int, ...]:
        """The table so far; nothing may be added afterwards."""
        if self._room < sums.CHUNK:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._hash.intdigest())
        self._hash, self._room = xxh3_64(), sums.CHUNK


class Group(NamedTuple):
    """Consecutive bytes of the payload with the records of the tensors in it, whose offsets count from its start."""

    start: int
    data: memoryview
    tensors: tuple[TensorEntry, ...]


class Source:
    """What one rank writes of one version.

    Use ``of_slot`` or ``of_view``. Attributes:
        tensors: the records of the payload, as the part will name them.
        size: bytes of the payload.
    """

    def __init__(
        self, version: Version, description: Description, memory: memoryview, begin: int, slot: Slot | None
    ) -> None:
        self.version, self.description = version, description
        self._memory, self._begin, self._slot = memory, begin, slot
        self._serial = slot.serial if slot else 0
        self._table = slot.table() if slot else []
        own = [entry for entry in description.tensors if entry.primary]
        own.sort(key=lambda entry: -_width(entry))  # stable: otherwise as the trainer had them
        self._places = [entry.offset for entry in own]
        records, end = [], 0
        for entry in own:
            if entry.offset < begin or entry.offset + entry.nbytes > len(memory):
                raise SlotInvalid(f"step {version.step}: tensor {entry.name} lies outside its memory")
            records.append(_moved(entry, end))
            end += entry.nbytes
        self.tensors, self.size = tuple(records), end

    @classmethod
    def of_slot(cls, slot: Slot) -> Source:
        """A sealed slot.

        Raises:
            SlotInvalid: it holds no version, is not sealed, or is being overwritten.
            SlotDamaged: its table of checksums has changed.
        """
        serial, version = slot.serial, slot.version
        if version is None:
            raise SlotInvalid(f"{slot.path}: incomplete; there is nothing to write")
        description = slot.describe()
        source = cls(version, description, memoryview(slot.memory)[: slot.used], HEADER, slot)
        if slot.serial != serial:
            raise SlotInvalid(f"{slot.path}: was overwritten before it could be written")
        return source

    @classmethod
    def of_view(cls, version: Version, description: Description, data: memoryview) -> Source:
        """Tensors that lie in ``data`` where the description's offsets say."""
        return cls(version, description, data.cast("B"), 0, None)

    def check(self) -> None:
        """Raises ``SlotInvalid`` when the slot no longer holds what this was made from."""
        if self._slot is not None and (self._slot.serial != self._serial or self._slot.version != self.version):
            raise SlotInvalid(f"{self._slot.path} step {self.version.step}: was overwritten while it was written")

    def pieces(self) -> Iterator[memoryview]:
        """The payload in order. A piece is valid until the next one is asked for.

        Raises:
            SlotDamaged: names the bytes that differ from their checksum.
            SlotInvalid: the slot was overwritten meanwhile.
        """
        checked: set[int] = set()
        gathered = bytearray()
        for record, place in zip(self.tensors, self._places, strict=True):
            for start, end in self._cut(place, record.nbytes):
                self._confirm(start, end, checked)
                piece = self._memory[start:end]
                if len(piece) < GATHER:
                    gathered += piece
                    if len(gathered) < GATHER:
                        continue
                if gathered:
                    yield memoryview(gathered)
                    gathered = bytearray()
                if len(piece) >= GATHER:
                    yield piece
        if gathered:
            yield memoryview(gathered)

    def groups(self) -> Iterator[Group]:
        """The payload in runs of whole tensors, for the difference codec."""
        checked: set[int] = set()
        batch: list[int] = []
        nbytes = 0
        for number, record in enumerate(self.tensors):
            if batch and nbytes + record.nbytes > GROUP:
                yield self._group(batch, checked)
                batch, nbytes = [], 0
            batch.append(number)
            nbytes += record.nbytes
        if batch:
            yield self._group(batch, checked)

    def _group(self, batch: Sequence[int], checked: set[int]) -> Group:
        first = self.tensors[batch[0]].offset
        views = []
        for number in batch:
            place, nbytes = self._places[number], self.tensors[number].nbytes
            self._confirm(place, place + nbytes, checked)
            views.append(self._memory[place : place + nbytes])
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        return Group(first, data, tuple(_moved(self.tensors[n], self.tensors[n].offset - first) for n in batch))

    def _cut(self, place: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """A tensor's bytes, cut where the slot's checksums are."""
        start = place
        while start < place + nbytes:
            end = min(place + nbytes, start + sums.CHUNK - (start - self._begin) % sums.CHUNK)
            yield start, end
            start = end

    def _confirm(self, start: int, end: int, checked: set[int]) -> None:
        """Compare every chunk that these bytes touch with the slot's table, once."""
        if self._slot is None or end == start:
            return
        for number in range((start - HEADER) // sums.CHUNK, (end - 1 - HEADER) // sums.CHUNK + 1):
            if number in checked:
                continue
            low = HEADER + number * sums.CHUNK
            high = min(low + sums.CHUNK, len(self._memory))
            if sums.digest(self._memory[low:high]) != self._table[number]:
                self.check()
                raise SlotDamaged(
                    f"{self._slot.path} step {self.version.step}: bytes {low} to {high} do not match their checksum"
                )
            checked.add(number)


def _width(entry: TensorEntry) -> int:
    count = 1
    for length in entry.shape:
        count *= length
    return entry.nbytes // count if count else 1


def _moved(entry: TensorEntry, offset: int) -> TensorEntry:
    return TensorEntry(
        entry.name,
        entry.dtype,
        entry.shape,
        offset,
        entry.nbytes,
        entry.like,
        entry.device,
        entry.global_shape,
        entry.corner,
        entry.primary,
    )
