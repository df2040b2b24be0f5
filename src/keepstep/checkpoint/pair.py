"""The versions of one rank, as files ``rank<r>.0`` and ``rank<r>.1`` of a memory-backed directory.

Two files alternate. Where durable tiers are on there is a third, ``rank<r>.2``: while one version is pinned for the
archiver the other two go on alternating.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from keepstep.checkpoint.exceptions import SlotInvalid
from keepstep.checkpoint.slot import Slot, Version, to_overwrite

FILES = 2
PINNABLE = 3
"""Files of a rank whose versions may be pinned."""


def paths(directory: Path, rank: int, kind: str = "", files: int = PINNABLE) -> tuple[Path, ...]:
    """Every file that may hold a version of ``rank``; ``kind`` is empty for full ones, ``p`` for private parts."""
    return tuple(directory / f"rank{rank}.{kind}{index}" for index in range(files))


def ranks_in(directory: Path) -> set[int]:
    """Ranks that have at least one file here."""
    found = set()
    for path in directory.glob("rank*.[0-2]"):
        name = path.name[4:].split(".", 1)[0]
        if name.isdigit():
            found.add(int(name))
    return found


def look(directory: Path, rank: int, kind: str = "") -> list[tuple[Version, Path]]:
    """The complete versions, newest first. Opens, looks and closes: safe while somebody else writes."""
    found = []
    for path in paths(directory, rank, kind):
        try:
            slot = Slot(path)
        except (OSError, SlotInvalid):
            continue
        try:
            version = slot.version
        finally:
            slot.close()
        if version is not None:
            found.append((version, path))
    return sorted(found, key=lambda item: item[0], reverse=True)


class Pair:
    """A rank's files, opened for writing.

    Args:
        files: how many to make. A third one that is there already is used in any case: it may hold a pinned version,
            and a version that nobody looks at must not survive a roll-back.
    """

    def __init__(self, directory: Path, rank: int, kind: str = "", files: int = FILES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        every = paths(directory, rank, kind)
        self.slots = tuple(
            Slot(path, create=True) for index, path in enumerate(every) if index < files or path.exists()
        )

    def versions(self) -> tuple[Version, ...]:
        """The complete ones, newest first."""
        return tuple(sorted((slot.version for slot in self.slots if slot.version is not None), reverse=True))

    def find(self, version: Version) -> Slot | None:
        return next((slot for slot in self.slots if slot.version == version), None)

    def pinned(self) -> Iterator[Slot]:
        """Those that the archiver has yet to write."""
        return (slot for slot in self.slots if slot.pinned)

    def target(self, step: int) -> int:
        """The file for ``step``: never the newest state below it, nor a pinned one where another can be had."""
        pinned = [index for index, slot in enumerate(self.slots) if slot.pinned]
        return to_overwrite([slot.version for slot in self.slots], step, pinned)

    def forget_after(self, version: Version) -> None:
        """Invalidate what a roll-back to ``version`` has made untrue: every later step."""
        for slot in self.slots:
            held = slot.version
            if held is not None and held.step >= version.step and held != version:
                slot.invalidate()

    def forget_all(self) -> None:
        for slot in self.slots:
            slot.invalidate()

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
