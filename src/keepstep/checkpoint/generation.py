"""Generations: one step of all ranks in a durable tier, written so that half of one is never taken for a whole. Pure.

A generation is a folder. Each rank writes its *part*: first the payload (``rank00003.safetensors``, or
``rank00003.delta`` where only what changed is kept), then ``rank00003.json``, which describes it and bears the
checksums. When all parts are there, ``manifest.json`` names them: a generation without it does not exist.
``verified.json`` follows when everything has been read back.

    step-000000001200.e65536/rank00000.safetensors
    step-000000001200.e65536/rank00000.json
    ...
    step-000000001200.e65536/manifest.json
    step-000000001200.e65536/verified.json

``damaged.json`` names parts that were found to differ from what was written: while the manifest names those very parts
the generation is not restored.

The *payload* of a part is its tensors one behind the other, in the order of its records. Replicated tensors are
written by one rank only (``TensorEntry.primary``); every rank writes its plain part.
"""

from __future__ import annotations

import re
from typing import Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from keepstep.checkpoint.exceptions import ManifestDamaged
from keepstep.checkpoint.slot import TensorEntry, Version
from keepstep.checkpoint.sums import digest

FORMAT = 1
"""Version of everything in this module. A reader refuses a newer one with a sentence."""
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
DAMAGED = "damaged.json"
_FOLDER = re.compile(r"^step-(\d{12})\.e(\d+)$")


class Frame(Struct, frozen=True, array_like=True):
    """Part of a delta: ``nbytes`` of payload from ``start`` on lie in the file at ``offset`` in ``stored`` bytes."""

    start: int
    nbytes: int
    offset: int
    stored: int
    codec: str


class Part(Struct, frozen=True, kw_only=True):
    """What one rank wrote.

    Attributes:
        kind: ``full`` (safetensors) or ``delta`` (frames that rest on ``base``).
        base: for a delta, the generation whose payload of the same rank it rests on.
        file: name of the payload in the folder of the generation.
        size: of the payload's file, bytes.
        sums: checksum per chunk of the file.
        payload: bytes of the payload once it is whole, and ``payload_sums`` its checksum per chunk.
        header: bytes before the payload in a safetensors file.
        tensors: records of the payload in its order; ``offset`` counts from the payload's start. Elements that are
            wider come first, so that every tensor is aligned for whoever maps the file.
        plain: the rank's small state (hyper-parameters, random state, data position): msgpack, see ``plain_torch``.
        key: of the roster that the state was saved under; after a recovery a rank may save the same version again.
        run: of which run of the job this state is. Two runs may reach the same version in one folder; parts that differ
            here never become one generation.
        written_ns: when the payload was durable.
        read_back: whether the payload was read again from the tier and matched before this description was written.
    """

    format: int = FORMAT
    job: str
    rank: int
    world_size: int
    version: Version
    kind: Literal["full", "delta"]
    base: Version | None = None
    file: str
    size: int
    sums: tuple[int, ...]
    header: int = 0
    payload: int
    payload_sums: tuple[int, ...]
    tensors: tuple[TensorEntry, ...]
    frames: tuple[Frame, ...] = ()
    plain: bytes = b""
    replicated: bool = False
    key: str = ""
    run: str = ""
    written_ns: int = 0
    read_back: bool = False

    @property
    def history(self) -> tuple[str, str]:
        """Parts of one generation agree in this."""
        return self.job, self.run


class PartRef(Struct, frozen=True, kw_only=True):
    """One part as the manifest names it; ``sum`` is of the whole ``rank*.json``."""

    rank: int
    sum: int
    size: int
    bytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """The last object of a generation: it exists, and this is what it is made of."""

    format: int = FORMAT
    job: str
    version: Version
    world_size: int
    created_ns: int
    parts: tuple[PartRef, ...]
    bases: tuple[Version, ...] = ()
    """Generations that deltas of this one rest on, directly; they must not be removed before it."""
    replicated: bool = False


class Verified(Struct, frozen=True, kw_only=True):
    """Everything that the manifest names was read back and matched."""

    format: int = FORMAT
    version: Version
    at_ns: int
    bytes: int
    manifest_sum: int


class Bad(Struct, frozen=True, kw_only=True):
    """A part that is not what was written. ``sum`` is the manifest's: a part that is written anew is another one."""

    rank: int
    sum: int
    why: str


class Damaged(Struct, frozen=True, kw_only=True):
    """What reading a generation back has found."""

    format: int = FORMAT
    version: Version
    at_ns: int
    parts: tuple[Bad, ...]


T = TypeVar("T", Part, Manifest, Verified, Damaged)


class _Format(Struct):
    format: int


class _Sealed(Struct, kw_only=True):
    sum: str
    body: Raw


def folder(version: Version) -> str:
    """Name of a generation."""
    return f"step-{version.step:012d}.e{version.epoch}"


def version_of(name: str) -> Version | None:
    """The generation that a folder's name stands for; ``None`` for anything else."""
    match = _FOLDER.match(name)
    return Version(int(match[1]), int(match[2])) if match else None


def part_name(version: Version, rank: int) -> str:
    return f"{folder(version)}/rank{rank:05d}.json"


def payload_name(version: Version, rank: int, kind: Literal["full", "delta"]) -> str:
    return f"{folder(version)}/rank{rank:05d}.{'safetensors' if kind == 'full' else 'delta'}"


def manifest_name(version: Version) -> str:
    return f"{folder(version)}/{MANIFEST}"


def verified_name(version: Version) -> str:
    return f"{folder(version)}/{VERIFIED}"


def damaged_name(version: Version) -> str:
    return f"{folder(version)}/{DAMAGED}"


def seal(value: Part | Manifest | Verified | Damaged) -> bytes:
    """JSON that carries its own checksum."""
    body = msgspec.json.encode(value)
    return msgspec.json.encode({"sum": f"{digest(body):016x}", "body": Raw(body)}) + b"\n"


def unseal(data: bytes, kind: type[T], name: str) -> T:
    """Read what ``seal`` wrote.

    Raises:
        ManifestDamaged: not such JSON, a wrong checksum, or of a newer format.
    """
    if not data.endswith(b"}\n"):
        raise ManifestDamaged(f"{name}: its end is missing")
    try:
        outer = msgspec.json.decode(data, type=_Sealed)
        if outer.sum != f"{digest(bytes(outer.body)):016x}":
            raise ManifestDamaged(f"{name}: does not match its own checksum")
        number = msgspec.json.decode(outer.body, type=_Format).format
        if number > FORMAT:
            raise ManifestDamaged(f"{name}: written in format {number}, this keepstep reads up to {FORMAT}; update it")
        return msgspec.json.decode(outer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestDamaged(f"{name}: not readable: {error}") from error
