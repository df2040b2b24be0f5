"""Imported: generations that no slot was the source of: taken from another format, or from another generation.

Written as any other: payload, description, manifest last, and read back before they count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import structs

from keepstep.checkpoint import archive, sums
from keepstep.checkpoint.exceptions import CheckpointError, GenerationIncomplete, ManifestDamaged
from keepstep.checkpoint.generation import Manifest, Part, part_name, payload_name, seal
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.reshard import READ
from keepstep.checkpoint.safetensors_header import header
from keepstep.checkpoint.slot import TensorEntry, Version
from keepstep.checkpoint.source import Running
from keepstep.ports.tier import Tier

Progress = Callable[[int], None]


class Payload(Protocol):
    """Tensors' bytes, one behind the other, that can be gone through again."""

    entries: tuple[TensorEntry, ...]
    size: int

    def __iter__(self) -> Iterator[bytes | memoryview]: ...


def plain(*, owners: bytes = b"", values: object = None) -> bytes:
    """Plain state that says nothing: what is registered keeps what it has."""
    return msgspec.msgpack.encode(
        {"groups": {}, "values": values or {}, "others": {}, "random": None, "buckets": b"\x90", "owners": owners}
    )


def write(
    tier: Tier, version: Version, payload: Payload, *, job: str, plain: bytes, progress: Progress | None = None
) -> Manifest:
    """A generation of one rank.

    Raises:
        CheckpointError: there is one of this step already, or the tier's troubles.
    """
    _refuse_second(tier, version)
    part = _part(
        job=job, rank=0, world_size=1, version=version, tensors=payload.entries, size=payload.size, plain=plain
    )
    _write_part(tier, part, payload, progress)
    return archive.complete(tier, version, 1)


def copy(reader: Reader, tier: Tier, *, progress: Progress | None = None) -> Manifest:
    """The same generation elsewhere, every part in full: what its differences rest on is not needed any more.

    Raises:
        CheckpointError: there is one of this step already, the source is damaged, or the tier's troubles.
    """
    manifest = reader.manifest()
    _refuse_second(tier, manifest.version)
    for rank in range(manifest.world_size):
        old = reader.part(rank)
        part = structs.replace(
            old, kind="full", base=None, frames=(), file="", sums=(), header=0, read_back=False, written_ns=0
        )
        _write_part(tier, part, _Stretches(reader, rank, old.payload), progress)
    return archive.complete(tier, manifest.version, manifest.world_size)


class _Stretches:
    def __init__(self, reader: Reader, rank: int, size: int) -> None:
        self._reader, self._rank, self._size = reader, rank, size

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, self._size, READ):
            yield self._reader.stretch(self._rank, start, min(self._size, start + READ))


def _refuse_second(tier: Tier, version: Version) -> None:
    try:
        found = Reader([tier], version).manifest()
    except (GenerationIncomplete, ManifestDamaged):
        return
    raise CheckpointError(
        f"{tier.where} holds step {found.version.step} already; give another directory or another --step"
    )


def _part(
    *,
    job: str,
    rank: int,
    world_size: int,
    version: Version,
    tensors: Sequence[TensorEntry],
    size: int,
    plain: bytes,
) -> Part:
    return Part(
        job=job,
        rank=rank,
        world_size=world_size,
        version=version,
        kind="full",
        file="",
        size=0,
        sums=(),
        payload=size,
        payload_sums=(),
        tensors=tuple(tensors),
        plain=plain,
        replicated=True,
    )


class _File:
    """Head and payload of a file, counted and summed up as they pass. Each pass begins anew.

    Args:
        size: of the payload; an object store chooses the size of its parts by ``size_hint``.
    """

    def __init__(
        self, head: bytes, payload: Iterable[bytes | memoryview], size: int, progress: Progress | None
    ) -> None:
        self._head, self._payload, self._progress = head, payload, progress
        self.size_hint = len(head) + size
        self.file, self.inner = Running(), Running()

    def __iter__(self) -> Iterator[bytes | memoryview]:
        self.file, self.inner = Running(), Running()
        self.file.add(self._head)
        yield self._head
        for piece in self._payload:
            self.file.add(piece)
            self.inner.add(piece)
            if self._progress is not None:
                self._progress(len(piece))
            yield piece


def _write_part(tier: Tier, part: Part, payload: Iterable[bytes | memoryview], progress: Progress | None) -> None:
    head = header(part)
    body = _File(head, payload, part.payload, progress)
    name = payload_name(part.version, part.rank, "full")
    size = tier.put(name, body)
    part = structs.replace(
        part,
        file=name.rpartition("/")[2],
        size=size,
        header=len(head),
        sums=body.file.finish(),
        payload_sums=body.inner.finish(),
        written_ns=time.time_ns(),
    )
    if part.payload != body.inner.size:
        raise CheckpointError(f"{name}: {body.inner.size} bytes came, {part.payload} were announced")
    for start, end in sums.chunks(size):
        if sums.digest(tier.get(name, start, end - start)) != part.sums[start // sums.CHUNK]:
            raise CheckpointError(f"{tier.where}/{name}: bytes {start} to {end} read back otherwise than written")
    tier.put(part_name(part.version, part.rank), [seal(structs.replace(part, read_back=True))])
