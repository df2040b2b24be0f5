"""Imported: generations that no slot was the source of: taken from another format, or from another generation.

Written as any other: payload, description, manifest last, and read back before they count. Before anything else comes a
note that says who is at work. What was not brought to its end is removed again; where even that was prevented, the next
writer finds the note, and goes on or begins anew. What bears no note is somebody else's, and is not touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct, structs

from keepstep.checkpoint import archive, catalog, collect, sums
from keepstep.checkpoint.exceptions import CheckpointError, GenerationIncomplete, ManifestDamaged, TierMissing
from keepstep.checkpoint.generation import (
    Manifest,
    Part,
    folder,
    manifest_name,
    part_name,
    payload_name,
    seal,
    version_of,
)
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.reshard import READ
from keepstep.checkpoint.safetensors_header import header
from keepstep.checkpoint.slot import TensorEntry, Version
from keepstep.checkpoint.source import Running
from keepstep.ports.tier import Tier

NOTE = "being-written.json"
"""In the generation's folder until it is complete."""
Progress = Callable[[int], None]
Told = Callable[[str], None]


class Note(Struct, frozen=True, kw_only=True):
    """Who writes a generation that no slot was the source of."""

    host: str
    pid: int
    at_ns: int


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
    tier: Tier,
    version: Version,
    payload: Payload,
    *,
    job: str,
    plain: bytes,
    progress: Progress | None = None,
    told: Told = lambda _: None,
) -> Manifest:
    """A generation of one rank. Whoever calls holds the tier (``lease.held``), so that nobody else is at work there.

    Args:
        told: hears of what an interrupted writer had left.

    Raises:
        CheckpointError: there is one of this step already, or the tier's troubles. Nothing of it stays.
    """
    _refuse_second(tier, version)
    part = _part(
        job=job, rank=0, world_size=1, version=version, tensors=payload.entries, size=payload.size, plain=plain
    )
    with _noted(tier, version, told):
        _write_part(tier, part, payload, progress)
        return archive.complete(tier, version, 1)


def copy(reader: Reader, tier: Tier, *, progress: Progress | None = None, told: Told = lambda _: None) -> Manifest:
    """The same generation elsewhere, every part in full: what its differences rest on is not needed any more.

    Parts that an interrupted copy has brought to their end are taken as they are. Arguments as of ``write``.

    Raises:
        CheckpointError: there is one of this step already, the source is damaged, or the tier's troubles.
    """
    manifest = reader.manifest()
    _refuse_second(tier, manifest.version)
    with _noted(tier, manifest.version, told):
        for rank in range(manifest.world_size):
            old = reader.part(rank)
            part = structs.replace(
                old, kind="full", base=None, frames=(), file="", sums=(), header=0, read_back=False, written_ns=0
            )
            if not _is_there(tier, part):
                _write_part(tier, part, _Stretches(reader, rank, old.payload), progress)
            elif progress is not None:
                progress(old.payload)
        return archive.complete(tier, manifest.version, manifest.world_size)


@contextlib.contextmanager
def _noted(tier: Tier, version: Version, told: Told) -> Iterator[None]:
    """Say who is at work on a generation; when the block fails, nothing of the generation stays."""
    _look_around(tier, version, told)
    name = f"{folder(version)}/{NOTE}"
    try:
        note = Note(host=socket.gethostname(), pid=os.getpid(), at_ns=time.time_ns())
        tier.put(name, [msgspec.json.encode(note)])
        yield
        tier.remove(name)
    except BaseException:
        with contextlib.suppress(CheckpointError):
            collect.remove(tier, version)
        raise


def _look_around(tier: Tier, version: Version, told: Told) -> None:
    """What interrupted writers left: of other steps it is removed, of this one it is gone on with.

    Raises:
        CheckpointError: something of this step is there that no such writer left.
    """
    names = list(tier.names("step-"))
    noted = {found for name in names if name.endswith(f"/{NOTE}") and (found := version_of(name.split("/")[0]))}
    for other in sorted(noted):
        what = f"{tier.where} holds what an interrupted restore or import of step {other.step} has left"
        if other == version:
            told(f"{what}; going on with it")
        elif manifest_name(other) in names:
            tier.remove(f"{folder(other)}/{NOTE}")  # it had only not said so
        else:
            told(f"{what}; it is removed")
            collect.remove(tier, other)
    if version not in noted and any(name.startswith(f"{folder(version)}/") for name in names):
        raise CheckpointError(
            f"{tier.where} holds an unfinished step {version.step} that no restore or import has left; give another "
            f"directory, or another --step"
        )
    tier.sweep(collect.LEFTOVER_S)


def _is_there(tier: Tier, part: Part) -> bool:
    """Whether an interrupted copy has read this part back already."""
    try:
        there = catalog.part(tier, part.version, part.rank)
        size = tier.size(f"{folder(part.version)}/{there.file}")
    except (GenerationIncomplete, ManifestDamaged, TierMissing):
        return False
    bare = structs.replace(there, file="", size=part.size, sums=(), header=0, read_back=False, written_ns=0)
    return bare == part and there.read_back and size == there.size


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
