"""Saver: a snapshot that finds no room costs a gap in what is safe, never the training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.exceptions import SlotFull
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.slot import Version

if TYPE_CHECKING:
    from keepstep.trainer.snapshots_torch import Snapshots
    from keepstep.trainer.state_torch import State


class Saver:
    """Saves one rank's versions.

    The memory was reserved before the first step, so there is no room only where others have filled it since, or where
    the state has grown. Versions that are there stay as they are.
    """

    def __init__(self, snapshots: Snapshots, rank: int) -> None:
        self._snapshots, self._rank = snapshots, rank
        self._failing = False

    def save(self, state: State, version: Version, **how: Any) -> None:
        """As ``Snapshots.save``; that there is no room is said once and noted each time."""
        try:
            self._snapshots.save(state, version, **how)
            self._failing = False
        except SlotFull as error:
            if not self._failing:
                print(
                    f"keepstep: rank {self._rank}: no snapshot of step {version.step}: {error}; training goes on, and "
                    f"falls back on an older step until there is room again",
                    file=sys.stderr,
                    flush=True,
                )
            self._failing = True
            self._snapshots.notes.tell(
                Note(what="skipped", tier="memory", step=version.step, rank=self._rank, why=str(error))
            )
