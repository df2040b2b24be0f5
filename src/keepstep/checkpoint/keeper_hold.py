"""Hold: a copy of one version in the keeper's own memory, for a link that is slower than the trainer.

A trainer overwrites a version two steps later. Where sending takes longer than that, each transfer would be cut off
and the buddy would never have anything. So the keeper copies the newest version once, which takes as long as memory
does, and sends the copy for as long as it takes. It is made only when it is needed and only where there is room, and
removed when the link keeps up again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from keepstep.checkpoint import room, sums
from keepstep.checkpoint.arrival import Arrival
from keepstep.checkpoint.exceptions import SlotFull, VersionGone
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.checkpoint.transfer import passport_of

HOLD_DIR = "hold"
"""Below the node directory: ``hold/rank<r>``."""


class Hold:
    """One rank's copy, if there is one."""

    def __init__(self, node_dir: Path, rank: int) -> None:
        self._path = node_dir / HOLD_DIR / f"rank{rank}"
        self.slot: Slot | None = None
        self.drop()  # a predecessor's is as old as its end

    @property
    def held(self) -> tuple[Version, Slot] | None:
        """The version that is held whole."""
        version = self.slot.version if self.slot is not None else None
        return (version, self.slot) if version is not None and self.slot is not None else None

    def take(self, slot: Slot, version: Version) -> None:
        """Copy a sealed version.

        Raises:
            VersionGone: it was overwritten before the copy was complete.
            SlotFull: there is no room for a copy.
        """
        passport = passport_of(slot, version)
        if self.slot is None:
            if (free := room.free(self._path.parent.parent)) < passport.size:
                raise SlotFull(
                    f"{self._path.name}: no room to hold {room.show(passport.size)} for a slow link; "
                    f"{room.show(free)} can be had"
                )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.slot = Slot(self._path, create=True)
        copy = Arrival(self.slot, passport)
        for number in copy.missing():
            start = HEADER + number * sums.CHUNK
            with copy.view(number) as view:
                view[:] = slot.memory[start : start + len(view)]
            if not copy.check(number):
                raise VersionGone(f"{slot.path.name}: step {version.step} was overwritten while it was copied")
        copy.finish()

    def drop(self) -> None:
        """Give the memory back: the copy, its checksums, and what a keeper that was killed had of them."""
        if self.slot is not None:
            self.slot.close()
            self.slot = None
        for path in (self._path, *self._path.parent.glob(f"{self._path.name}.sums*")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
