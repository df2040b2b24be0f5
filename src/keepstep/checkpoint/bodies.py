"""Bodies: the bytes of a payload's file on their way into a tier, with their checksums, and back out of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from keepstep.checkpoint import delta, sums
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.exceptions import GenerationIncomplete, PayloadDamaged, TierMissing
from keepstep.checkpoint.generation import Frame, Part
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.source import Running, Source
from keepstep.ports.tier import Tier

READ_BYTES = 4 * sums.CHUNK
"""How much is read back at a time."""


class Body(ABC):
    """The bytes of a payload's file. Each pass goes over the source anew, so that a tier may try again.

    Args:
        size_hint: about how many bytes there will be; an object store chooses the size of its parts by it.
    """

    def __init__(self, pace: Pace | None, size_hint: int) -> None:
        self._pace, self.size_hint = pace, size_hint
        self.file, self.payload = Running(), Running()
        self.frames: list[Frame] = []

    def __iter__(self) -> Iterator[bytes | memoryview]:
        self.file, self.payload, self.frames = Running(), Running(), []
        for chunk in self._chunks():
            self.file.add(chunk)
            if self._pace is not None:
                self._pace.wait(len(chunk))
            yield chunk

    @abstractmethod
    def _chunks(self) -> Iterator[bytes | memoryview]: ...


class Full(Body):
    """A safetensors file: its head, then the payload."""

    def __init__(self, source: Source, head: bytes, pace: Pace | None) -> None:
        super().__init__(pace, len(head) + source.size)
        self._source, self._head = source, head

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield self._head
        for piece in self._source.pieces():
            self.payload.add(piece)
            yield piece


class Delta(Body):
    """The frames of what changed since ``basis``."""

    def __init__(self, source: Source, basis: Basis, pace: Pace | None) -> None:
        super().__init__(pace, source.size)
        self._source, self._basis = source, basis

    def _chunks(self) -> Iterator[bytes | memoryview]:
        end = 0
        with memoryview(self._basis.payload) as base:
            for group in self._source.groups():
                self.payload.add(group.data)
                under = base[group.start : group.start + len(group.data)]
                for frame, stored in delta.encode(group.data, under, group.tensors):
                    self.frames.append(Frame(group.start + frame.start, frame.nbytes, end, frame.stored, frame.codec))
                    end += frame.stored
                    if stored:
                        yield stored


class Copied(Body):
    """A file that is whole in another tier."""

    def __init__(self, source: Tier, name: str, part: Part, pace: Pace | None) -> None:
        super().__init__(pace, part.size)
        self._source, self._name, self._part = source, name, part

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield from sound_chunks(self._source, self._name, self._part)


def sound_chunks(tier: Tier, name: str, part: Part) -> Iterator[bytes | memoryview]:
    """A payload's file, every chunk compared with its checksum.

    Raises:
        PayloadDamaged: names the bytes, or the length, that are wrong.
    """
    size = size_of(tier, name)
    if size != part.size or len(part.sums) != -(-part.size // sums.CHUNK):
        raise PayloadDamaged(f"{tier.where}/{name}: {size} bytes are there, {part.size} were written")
    for start in range(0, part.size, READ_BYTES):
        try:
            data = memoryview(tier.get(name, start, min(READ_BYTES, part.size - start)))
        except TierMissing as error:
            raise PayloadDamaged(f"{tier.where}/{name}: vanished or was cut short while it was read") from error
        for low, high in sums.chunks(len(data)):
            if sums.digest(data[low:high]) != part.sums[(start + low) // sums.CHUNK]:
                raise PayloadDamaged(
                    f"{tier.where}/{name}: bytes {start + low} to {start + high} do not match their checksum"
                )
        yield data


def size_of(tier: Tier, name: str) -> int:
    """Raises ``GenerationIncomplete`` where there is no such payload."""
    try:
        return tier.size(name)
    except TierMissing as error:
        raise GenerationIncomplete(f"{tier.where}/{name}: the payload is not there") from error
