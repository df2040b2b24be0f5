"""Generations made by hand, byte by byte as the format says, for tests of those who read them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from keepstep.checkpoint import delta, generation, sums
from keepstep.checkpoint.generation import Manifest, Part, PartRef
from keepstep.checkpoint.slot import TensorEntry, Version
from keepstep.ports.tier import Tier

Array = np.ndarray


def entry(name: str, array: Array, offset: int, **more: object) -> TensorEntry:
    return TensorEntry(name, str(array.dtype), array.shape, offset, array.nbytes, **more)  # type: ignore[arg-type]


def payload_of(arrays: Mapping[str, Array], **more: object) -> tuple[bytes, tuple[TensorEntry, ...]]:
    entries, payload = [], b""
    for name, array in arrays.items():
        entries.append(entry(name, array, len(payload), **more))
        payload += array.tobytes()
    return payload, tuple(entries)


def table(data: bytes) -> tuple[int, ...]:
    return tuple(sums.table(memoryview(data)))


def write_part(
    tier: Tier,
    version: Version,
    rank: int,
    payload: bytes,
    tensors: Sequence[TensorEntry],
    *,
    world_size: int = 1,
    base: tuple[Version, bytes] | None = None,
    plain: bytes = b"",
    replicated: bool = False,
) -> Part:
    header, frames = b"", []
    if base is None:
        body = {t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.offset, t.offset]} for t in tensors}
        text = json.dumps(body).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        file = header + payload
    else:
        stored = b""
        for frame, data in delta.encode(memoryview(payload), memoryview(base[1]), tensors):
            frames.append(frame)
            stored += data
        file = stored
    kind = "full" if base is None else "delta"
    name = generation.payload_name(version, rank, kind)  # type: ignore[arg-type]
    tier.put(name, [file])
    part = Part(
        job="j",
        rank=rank,
        world_size=world_size,
        version=version,
        kind=kind,  # type: ignore[arg-type]
        base=base[0] if base else None,
        file=name.split("/")[1],
        size=len(file),
        sums=table(file),
        header=len(header),
        payload=len(payload),
        payload_sums=table(payload),
        tensors=tuple(tensors),
        frames=tuple(frames),
        plain=plain,
        replicated=replicated,
    )
    tier.put(generation.part_name(version, rank), [generation.seal(part)])
    return part


def complete(tier: Tier, version: Version, parts: Sequence[Part]) -> Manifest:
    refs = []
    for part in parts:
        data = tier.get(generation.part_name(version, part.rank))
        refs.append(PartRef(rank=part.rank, sum=sums.digest(data), size=len(data), bytes=part.size))
    manifest = Manifest(
        job="j",
        version=version,
        world_size=len(parts),
        created_ns=1,
        parts=tuple(refs),
        bases=tuple(sorted({part.base for part in parts if part.base is not None})),
        replicated=parts[0].replicated,
    )
    tier.put(generation.manifest_name(version), [generation.seal(manifest)])
    return manifest
