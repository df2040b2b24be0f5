"""The two versions of one rank, as files ``rank<r>.0`` and ``rank<r>.1`` of a memory-backed directory."""

from __future__ import annotations

from pathlib import Path

from keepstep.checkpoint.exceptions import SlotInvalid
from keepstep.checkpoint.slot import Slot, Version, to_overwrite


def paths(directory: Path, rank: int, kind: str = "") -> tuple[Path, Path]:
    """``kind`` is empty for full versions, ``p`` for private parts."""
    return directory / f"rank{rank}.{kind}0", directory / f"rank{rank}.{kind}1"


def ranks_in(directory: Path) -> set[int]:
    """Ranks that have at least one file here."""
    found = set()
    for path in directory.glob("rank*.[01]"):
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
    """Both files of a rank, opened for writing."""

    def __init__(self, directory: Path, rank: int, kind: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        first, second = paths(directory, rank, kind)
        self.slots = (Slot(first, create=True), Slot(second, create=True))

    def versions(self) -> tuple[Version, ...]:
        return tuple(slot.version for slot in self.slots if slot.version is not None)

    def find(self, version: Version) -> Slot | None:
        return next((slot for slot in self.slots if slot.version == version), None)

    def target(self, step: int) -> int:
        return to_overwrite([slot.version for slot in self.slots], step)

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
