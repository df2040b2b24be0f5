"""Safetensors folders: leave keepstep with plain files, and come from them. Needs neither torch nor safetensors.

The folder looks like one of Hugging Face's: ``model-00001-of-00002.safetensors``, an index that says which tensor is
where, and, unless only weights are wanted, ``optimizer-*.safetensors`` with ``<parameter>.<state>``.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import msgspec
from msgspec import Struct

from keepstep.checkpoint.exceptions import CheckpointError, ManifestDamaged, PayloadDamaged
from keepstep.checkpoint.safetensors_header import DTYPES
from keepstep.checkpoint.slot import TensorEntry
from keepstep.checkpoint.staging import staged
from keepstep.checkpoint.whole import Whole, WholeTensor

FILE_BYTES = 5 * 1000**3
"""Largest file of an export; one tensor that is larger gets a file of its own."""
MAX_HEADER = 100 * 1024 * 1024
"""What the format allows for a header."""
_LENGTH = struct.Struct("<Q")
_TORCH_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
_ITEM = {"BOOL": 1, "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    f"{sign}{bits}": bits // 8 for sign in "UI" for bits in (8, 16, 32, 64)
}
Progress = Callable[[int], None]


class Exported(Struct, frozen=True, kw_only=True):
    """What an export wrote. ``as_bytes``: tensors whose dtype the format does not know, kept as bytes."""

    files: tuple[str, ...]
    bytes: int
    tensors: int
    as_bytes: tuple[str, ...] = ()


class Found(Struct, frozen=True, kw_only=True):
    """A tensor of a folder, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


def export(
    whole: Whole,
    directory: Path,
    *,
    weights_only: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write the tensors of a generation as consolidated files, all or none.

    Args:
        told: hears of what an interrupted export had left there.

    Raises:
        CheckpointError: the directory holds safetensors files already, or two modules' tensors share a name.
    """
    with staged(directory, told) as files:
        if there := sorted(directory.glob("*.safetensors")):
            raise CheckpointError(f"{directory} holds {there[0].name} already; name an empty directory")
        return _export(whole, files, weights_only, file_bytes, progress)


def _export(whole: Whole, directory: Path, weights_only: bool, file_bytes: int, progress: Progress | None) -> Exported:
    modules = {one.of for one in whole.tensors if one.kind != "o"}
    optimizers = {one.of for one in whole.tensors if one.kind == "o"}
    model = [(_called(one, len(modules) > 1), one) for one in whole.tensors if one.kind != "o"]
    state = [(_called(one, len(optimizers) > 1), one) for one in whole.tensors if one.kind == "o"]
    files: list[str] = []
    meta = {"format": "pt", "step": str(whole.manifest.version.step), "job": whole.manifest.job}
    for stem, tensors in (("model", model), ("optimizer", [] if weights_only else state)):
        _refuse_twice(name for name, _ in tensors)
        groups = list(_share_out(tensors, file_bytes))
        placed: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            only = len(groups) == 1
            file = f"{stem}.safetensors" if only else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
            _write(directory / file, whole, group, meta, progress)
            files.append(file)
            placed |= {name: file for name, _ in group}
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(one.nbytes for _, one in tensors)}, "weight_map": placed}
            (directory / f"{stem}.safetensors.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    written = [one for name, one in model + ([] if weights_only else state)]
    return Exported(
        files=tuple(files),
        bytes=sum(one.nbytes for one in written),
        tensors=len(written),
        as_bytes=tuple(one.name for one in written if one.dtype not in DTYPES),
    )


def _called(one: WholeTensor, several: bool) -> str:
    name = f"{one.of}.{one.name}" if several else one.name
    return f"{name}.{one.state}" if one.state else name


def _refuse_twice(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(
                f"two tensors would be called {name} in one folder; is a buffer named like a parameter?"
            )
        seen.add(name)


def _share_out(tensors: Sequence[tuple[str, WholeTensor]], file_bytes: int) -> Iterator[list[tuple[str, WholeTensor]]]:
    group: list[tuple[str, WholeTensor]] = []
    size = 0
    for name, one in tensors:
        if group and size + one.nbytes > file_bytes:
            yield group
            group, size = [], 0
        group.append((name, one))
        size += one.nbytes
    if group:
        yield group


def _write(
    path: Path,
    whole: Whole,
    tensors: Sequence[tuple[str, WholeTensor]],
    meta: dict[str, str],
    progress: Progress | None,
) -> None:
    fields: dict[str, object] = {"__metadata__": meta}
    places: list[tuple[WholeTensor, int]] = []
    end = 0
    for name, one in tensors:
        dtype = DTYPES.get(one.dtype)
        shape = list(one.shape) if dtype else [one.nbytes]
        fields[name] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [end, end + one.nbytes]}
        places.append((one, end))
        end += one.nbytes
    body = msgspec.json.encode(fields)
    body += b" " * (-len(body) % 8)
    head = _LENGTH.pack(len(body)) + body
    with mapped_file(path, len(head) + end) as memory:
        memory[: len(head)] = head
        whole.fill([(one, len(head) + at) for one, at in places], memory, progress)


@contextmanager
def mapped_file(path: Path, size: int) -> Iterator[memoryview]:
    """A new file of that size as memory; it appears under its name when it is whole, and durable.

    Raises:
        CheckpointError: it cannot be made, or there is no room for it.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be made: {error.strerror}") from error
    try:
        try:
            os.posix_fallocate(fd, 0, max(1, size))
            os.ftruncate(fd, size)
        except OSError as error:
            raise CheckpointError(f"{path}: no room for {size} bytes: {error.strerror}") from error
        if size:
            with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
                yield view
        else:
            yield memoryview(bytearray())
        os.fsync(fd)
        os.replace(fresh, path)
    finally:
        os.close(fd)
        fresh.unlink(missing_ok=True)


# -------------------------------------------------------------------- reading a folder


def look(directory: Path) -> list[Found]:
    """All weights of a folder's files, by name. Optimizer state, which an export writes beside them, is left out.

    Raises:
        CheckpointError: there are none, a file is not in the format, or a name is there twice.
    """
    if not os.path.exists(directory):
        raise CheckpointError(f"{directory}: there is no such folder; name the one with the *.safetensors")
    files = sorted(directory.glob("*.safetensors")) if os.path.isdir(directory) else [directory]
    files = [path for path in files if not path.name.startswith("optimizer")]
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors with weights")
    found: dict[str, Found] = {}
    for path in files:
        for one in _read_header(path):
            if one.name in found:
                raise CheckpointError(f"{one.name} is both in {found[one.name].path.name} and in {path.name}")
            found[one.name] = one
    return [found[name] for name in sorted(found)]


def _read_header(path: Path) -> Iterator[Found]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(8)
            length = _LENGTH.unpack(raw)[0] if len(raw) == 8 else MAX_HEADER + 1
            if length > min(MAX_HEADER, size - 8):
                raise ManifestDamaged(f"{path}: is not a safetensors file")
            body = msgspec.json.decode(file.read(length), type=dict[str, dict[str, object]])
    except (OSError, msgspec.DecodeError) as error:
        raise ManifestDamaged(f"{path}: is not a readable safetensors file: {error}") from error
    for name, raw_fields in body.items():
        if name == "__metadata__":
            continue
        try:
            fields = msgspec.convert(raw_fields, _Fields)
        except msgspec.ValidationError as error:
            raise ManifestDamaged(f"{path}: {name}: {error}") from error
        start, end = fields.data_offsets
        nbytes = prod(fields.shape) * _ITEM.get(fields.dtype, -1)
        if nbytes != end - start or start < 0 or 8 + length + end > size:
            raise PayloadDamaged(
                f"{path}: {name}: {fields.dtype} {list(fields.shape)} does not fit its place in the file"
            )
        yield Found(
            name=name,
            dtype=_TORCH_NAMES[fields.dtype],
            shape=fields.shape,
            path=path,
            offset=8 + length + start,
            nbytes=nbytes,
        )


class _Fields(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Folder:
    """The weights of a folder as the payload of a part, for ``imported.write``."""

    def __init__(self, tensors: Sequence[Found], module: str) -> None:
        self._tensors = tensors
        entries, offset = [], 0
        for one in tensors:
            entries.append(TensorEntry(f"p/{module}/{one.name}", one.dtype, one.shape, offset, one.nbytes))
            offset += one.nbytes
        self.entries, self.size = tuple(entries), offset

    def __iter__(self) -> Iterator[bytes]:
        for one in self._tensors:
            with one.path.open("rb") as file:
                file.seek(one.offset)
                left = one.nbytes
                while left:
                    data = file.read(min(left, 16 * 1024 * 1024))
                    if not data:
                        raise PayloadDamaged(f"{one.path}: ends in the middle of {one.name}")
                    left -= len(data)
                    yield data
