"""Pins: versions that stay in memory until the archiver has brought them to the durable tiers."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.notes import Note, Teller, TierLabel
from keepstep.checkpoint.pair import Pair
from keepstep.checkpoint.slot import Slot, Version


class Pins:
    """One rank's.

    Args:
        files: the rank's full versions.
        ring: tells the archiver that a step is pinned.
    """

    def __init__(
        self, files: Pair, rank: int, config: CheckpointConfig, notes: Teller, ring: Callable[[int], None]
    ) -> None:
        self._files, self._rank, self._config, self._notes, self._ring = files, rank, config, notes, ring

    def hold(self, version: Version) -> bool:
        """Have the durable tiers take this version, if they do not hold on to another; false where it is not here."""
        slot = self._files.find(version)
        if slot is not None:
            self.pin(slot, version)
        return slot is not None

    def pin(self, slot: Slot, version: Version) -> None:
        """The same for a version whose file is known."""
        others = [other.version.step for other in self._files.pinned() if other is not slot and other.version]
        if others:
            self.skip(version.step, others[0])
            return
        slot.pin()
        self._ring(version.step)

    def held(self) -> list[int]:
        """Steps that the archiver has yet to write."""
        return sorted(slot.version.step for slot in self._files.pinned() if slot.version is not None)

    def remind(self) -> None:
        """Ring for what is still pinned: an archiver that came late has not heard of it."""
        for step in self.held():
            self._ring(step)

    def skip(self, step: int, busy: int) -> None:
        """Tell that the durable tiers leave out a step, because an earlier one is still on its way there."""
        why = f"the archiver still writes step {busy}; a larger --ckpt-every or a faster tier would help"
        tier: TierLabel = "local" if self._config.policy.local_dir else "remote"
        self._notes.tell(Note(what="skipped", tier=tier, step=step, rank=self._rank, why=why))
