"""Saver: a snapshot that fails costs a gap in what is safe, not the training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.exceptions import CheckpointError, SlotFull
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.slot import Version

if TYPE_CHECKING:
    from keepstep.trainer.snapshots_torch import Snapshots
    from keepstep.trainer.state_torch import State


class Saver:
    """Saves one rank's versions.

    The memory was reserved before the first step, so there is no room only where others have filled it since, or where
    the state has grown. Versions that are there stay as they are.

    Args:
        replaced: somebody gives this rank's seat to a fresh process where this one fails. Then only the lack of room is
            forgiven, which a fresh process would find, too. Else every trouble is, as none is worth a restart.
    """

    def __init__(self, snapshots: Snapshots, rank: int, *, replaced: bool = True) -> None:
        self._snapshots, self._rank = snapshots, rank
        self._forgiven: tuple[type[Exception], ...] = (SlotFull,) if replaced else (CheckpointError, OSError)
        self._failing = False

    def save(self, state: State, version: Version, **how: Any) -> None:
        """As ``Snapshots.save``; a failure is said once, until it works again, and noted each time."""
        try:
            self._snapshots.save(state, version, **how)
        except self._forgiven as error:
            if not self._failing:
                self._say(
                    f"no snapshot of step {version.step}: {error}; training goes on, and would fall back on an older "
                    f"step; this is said once until it works again"
                )
            self._failing = True
            self._snapshots.notes.tell(
                Note(what="skipped", tier="memory", step=version.step, rank=self._rank, why=str(error))
            )
        else:
            if self._failing:
                self._say(f"snapshots are taken again, the first one of step {version.step}")
            self._failing = False

    def _say(self, words: str) -> None:
        print(f"keepstep: rank {self._rank}: {words}", file=sys.stderr, flush=True)
