"""Sealing: each complete version gets its checksums in a thread of its own, whatever a transfer is waiting for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import CheckpointError, SlotInvalid
from keepstep.checkpoint.slot import Slot, Version

CALM_SHARE = 0.005
"""Share of a core that sealing is meant to take where no other node waits for the checksums."""
CALM_PAUSE_S = 1.0
"""It pauses for this long at most; a version that stays is without checksums no longer than that."""


class OpenFiles:
    """One rank's files, kept open for one thread: a mapping that stays has its pages present."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._open: dict[Path, Slot] = {}

    def slots(self) -> list[Slot]:
        """Those that are there now."""
        found = []
        for path in pair.paths(self._directory, self._rank):
            slot = self._open.get(path)
            try:
                if slot is not None and not os.path.samestat(os.stat(path), os.fstat(slot.fileno())):
                    self._open.pop(path).close()
                    slot = None
                if slot is None:
                    slot = self._open[path] = Slot(path)
            except (FileNotFoundError, SlotInvalid):
                if gone := self._open.pop(path, None):
                    gone.close()
                continue
            found.append(slot)
        return found

    def newest(self) -> tuple[Version, Slot] | None:
        """The newest complete version."""
        complete = [(version, slot) for slot in self.slots() if (version := slot.version) is not None]
        return max(complete, key=lambda item: item[0], default=None)


class Sealer(threading.Thread):
    """Seals the newest version of one rank, and then a pinned one that a newer one has overtaken.

    Args:
        sealed: called after each look; the newest complete version has its checksums then.
        calm: true where nobody waits for the checksums of each single version.
    """

    def __init__(
        self, directory: Path, rank: int, sealed: Callable[[], None], *, calm: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(name=f"keepstep-seal-{rank}", daemon=True)
        self._files, self._sealed, self._calm = OpenFiles(directory, rank), sealed, calm
        self._bell, self._end = threading.Event(), threading.Event()

    def ring(self) -> None:
        self._bell.set()

    def stop(self) -> None:
        self._end.set()
        self._bell.set()

    def run(self) -> None:
        while self._bell.wait() and not self._end.is_set():
            self._bell.clear()
            began = time.monotonic()
            # One that is overwritten meanwhile is skipped quietly: its writer rings for the next one.
            with contextlib.suppress(CheckpointError, OSError):
                if (newest := self._files.newest()) is not None and not newest[1].sealed:
                    newest[1].seal()
            self._sealed()
            for slot in self._files.slots():
                if slot.pinned and not slot.sealed:
                    with contextlib.suppress(CheckpointError, OSError):
                        slot.seal()
            if self._calm():
                took = time.monotonic() - began
                self._end.wait(min(CALM_PAUSE_S, took / CALM_SHARE))  # who rings meanwhile is heard after it
