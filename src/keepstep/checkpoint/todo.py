"""Todo: copies between tiers that are owed after a pin was lifted, in a file that outlives the archiver.

While a version is pinned, the pin says what is to do. Once the nearest tier is whole the pin goes, and this remembers
the rest.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from keepstep.checkpoint.files import write_atomic
from keepstep.checkpoint.slot import Version

TODO_FILE = "archiver.todo"
"""In the node directory, beside the slots: gone with them, and no earlier."""
Owed = tuple[Version, int]
"""A version, and the rank whose part is owed to some tier."""


class Todo:
    """What is owed, oldest first."""

    def __init__(self, node_dir: Path) -> None:
        self._path = node_dir / TODO_FILE
        self._owed: set[Owed] = set()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._owed = set(msgspec.json.decode(self._path.read_bytes(), type=list[Owed]))

    @property
    def owed(self) -> list[Owed]:
        return sorted(self._owed)

    def add(self, version: Version, rank: int) -> None:
        self._owed.add((version, rank))
        self._save()

    def done(self, version: Version, rank: int) -> None:
        if (version, rank) in self._owed:
            self._owed.discard((version, rank))
            self._save()

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # the node directory is full: only a crash just now would miss this
            write_atomic(self._path, msgspec.json.encode(self.owed))
