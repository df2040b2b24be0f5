"""Checksums: one 64-bit xxh3 per chunk, so that damage is found, placed, and paid for by one chunk only.

XXH3 is not cryptographic: it finds what hardware and software do to bytes by accident. https://xxhash.com
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64, xxh3_64_intdigest

CHUNK = 4 * 1024 * 1024
"""Bytes per checksum, in memory, on the wire and on disk."""


def digest(data: bytes | bytearray | memoryview) -> int:
    """The checksum of one run of bytes, as an unsigned 64-bit integer."""
    return xxh3_64_intdigest(data)


def running() -> xxh3_64:
    """A checksum that takes its bytes piece by piece, with ``update``; ``intdigest`` is then as ``digest`` of all."""
    return xxh3_64()


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk of ``size`` bytes."""
    for start in range(0, size, CHUNK):
        yield start, min(start + CHUNK, size)


def table(data: memoryview) -> list[int]:
    """The checksum of each chunk."""
    return [digest(data[start:end]) for start, end in chunks(len(data))]


def damaged(data: memoryview, expected: list[int]) -> list[int]:
    """Numbers of the chunks that differ from their checksums; all of them when the count itself is wrong."""
    found = table(data)
    if len(found) != len(expected):
        return list(range(max(len(found), len(expected))))
    return [number for number, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
