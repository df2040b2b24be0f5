"""Tier: a place where named objects are kept, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol


class Tier(Protocol):
    """A durable tier: a directory, or a bucket with a prefix.

    Names are relative, with ``/`` between parts. Errors are ``checkpoint.exceptions.TierError`` and its kinds: an
    object that is not there, no room, no permission, or a place that does not answer.
    """

    label: str
    """``local`` or ``remote``."""
    where: str
    """What people call it: the path or the URL."""

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Keep an object and return its size. When this returns it is durable and whole.

        A reader sees the whole object or none, whenever this is interrupted; an object of that name is replaced.
        """
        ...

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object from ``start`` on. Raises ``TierMissing`` where there is no such object."""
        ...

    def size(self, name: str) -> int:
        """Raises ``TierMissing`` where there is no such object."""
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """Whole objects whose name begins with ``prefix``, sorted. Leftovers of interrupted writers are not named."""
        ...

    def remove(self, name: str) -> None:
        """Quiet when it is not there."""
        ...

    def path(self, name: str) -> Path | None:
        """The object as a file of this machine that may be mapped, where the tier has that."""
        ...

    def sweep(self, older_than_s: float) -> int:
        """Remove what interrupted writers left behind and return how many leftovers went."""
        ...
