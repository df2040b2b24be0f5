"""Opening logs: packed or not, whole or cut off, by whatever name they were saved."""

from __future__ import annotations

import bz2
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from keepstep.cli.errors import DoorError, NotFound
from keepstep.core.diagnose import places
from keepstep.core.diagnose.observe import Source

PIECE_BYTES = 1 << 20
UNPACKED_BYTES = 4 << 20
"""Taken out of a packed file at once, so that a small file cannot fill the memory."""
PACKED_TIMES = 3
"""A log that is packed more often is read as it is."""
MAGIC_BYTES = 6
_RANK = re.compile(r"(?:^|[_.-])r(?:ank)?[_-]?(\d{1,6})(?=\D|$)", re.IGNORECASE)


def pieces(name: str) -> Iterator[bytes]:
    """The content of a file, or of stdin for ``-``, unpacked."""
    if name == "-":
        yield from unpacked(_read(sys.stdin.buffer, "stdin"), name="stdin")
        return
    with check(name).open("rb") as file:
        yield from unpacked(_read(file, name), name=name)


def check(name: str) -> Path:
    """The path, or an error that says why it cannot be read."""
    path = Path(name)
    try:
        if path.is_dir():
            raise NotFound(f"{name} is a folder", help=f"name the files in it: keepstep explain {name.rstrip('/')}/*")
        if not path.exists():
            raise NotFound(f"there is no file {name}, and no code of this name", help="`keepstep explain --help`")
        with path.open("rb"):
            return path
    except OSError as error:
        raise DoorError(
            f"{name} cannot be read: {error.strerror}", help="run it as somebody who may read it, or pipe it in"
        ) from error


def source_of(name: str, several: bool) -> Source:
    """What the file's name says: ``logs/node-3/rank_21.err``, ``node-017.log``, ``trainer-4.out.gz``."""
    if name == "-" or not several:
        return Source(name=name if several else "")
    path = Path(name)
    rank = _RANK.search(path.name)
    named = places.hosts(path.name.partition(".")[0]) or places.hosts(path.parent.name)
    return Source(name=path.name, node=named[0] if named else "", rank=int(rank[1]) if rank else None)


def _read(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The bytes of a file; when reading fails on the way, what was read counts."""
    got = 0
    try:
        while data := file.read(PIECE_BYTES):
            got += len(data)
            yield data
    except OSError as error:
        if not got:
            raise DoorError(
                f"{name} cannot be read: {error.strerror or error}", help="copy it to a healthy disk, or pipe it in"
            ) from error
        print(f"keepstep: {name} could be read up to byte {got} only: {error.strerror or error}", file=sys.stderr)


def unpacked(data: Iterable[bytes], depth: int = 0, *, name: str = "input") -> Iterator[bytes]:
    """Unpack gzip, bzip2, xz and zstd by their first bytes, also when packed twice; what cannot be unpacked any
    further is left out, and said on stderr."""
    source = iter(data)
    first = next(source, b"")
    while first and len(first) < MAGIC_BYTES and (more := next(source, b"")):
        first += more
    make = _packer(first)
    if make is None or depth >= PACKED_TIMES:
        if first:
            yield first
            yield from source
        return
    yield from unpacked(_unpack(make, first, source, name), depth + 1, name=name)


def _unpack(make: Any, first: bytes, source: Iterator[bytes], name: str) -> Iterator[bytes]:
    unpacker, begun = make(), False
    try:
        for piece in _chain(first, source):
            rest = piece
            while rest:
                begun = True
                if isinstance(unpacker, _Zlib | bz2.BZ2Decompressor | lzma.LZMADecompressor):
                    yield unpacker.decompress(rest, UNPACKED_BYTES)
                    rest = b""
                    while not unpacker.needs_input and not unpacker.eof:
                        yield unpacker.decompress(b"", UNPACKED_BYTES)
                else:
                    yield unpacker.decompress(rest)
                    rest = b""
                if unpacker.eof:  # Files that were joined with cat.
                    rest, unpacker, begun = unpacker.unused_data.lstrip(b"\0"), make(), False
    except (zlib.error, OSError, EOFError, lzma.LZMAError, ValueError):
        begun = True
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        begun = True
    if begun:
        print(f"keepstep: {name} is truncated or damaged: read as far as it could be unpacked", file=sys.stderr)


class _Zlib:
    """zlib's decompressor with the manners of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, limit: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, limit)


def _packer(first: bytes) -> Any:
    if first[:2] == b"\x1f\x8b":
        return _Zlib
    if first[:3] == b"BZh":
        return bz2.BZ2Decompressor
    if first[:6] == b"\xfd7zXZ\0":
        return lzma.LZMADecompressor
    if first[:4] == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise DoorError(
                "this log is packed with zstd, which needs the zstandard package",
                help="pip install 'keepstep[checkpoint]', or unpack it: zstdcat FILE | keepstep explain -",
            ) from None
        return lambda: zstandard.ZstdDecompressor().decompressobj()
    return None


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
