"""The sending half of the keeper: one thread per local rank brings its newest sealed version to the buddy.

Older versions are skipped: a buddy that lags catches up with the newest. The acknowledgement stands in the trainer's
own file, and means: this very version lies on the buddy node, every chunk checked there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from keepstep.checkpoint import scrub
from keepstep.checkpoint.exceptions import CheckpointError, SlotDamaged, SlotFull, VersionGone
from keepstep.checkpoint.keeper_hold import Hold
from keepstep.checkpoint.keeper_seal import OpenFiles
from keepstep.checkpoint.keeper_wire import Wire
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.peers import Put
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.transfer import send
from keepstep.model.wire import FrameError

RETRY_FIRST_S, RETRY_LAST_S = 0.02, 1.0
"""Pause after a transfer that failed; it doubles up to the last one."""
GAP_S = 10.0
"""A version that has waited for this long to be on the buddy node is a gap that the job's log tells."""
PATIENCE = 3
"""A link that takes long is behind when it takes this many times as long as the last time."""
CUT_OFF = 2
"""Transfers in a row that the trainer has cut off by overwriting, after which a copy is sent instead."""
KEEPS_UP = 1
"""Steps that the trainer may be ahead at the end of a transfer of a copy for the next one to do without."""
CONFIRM_S = 60.0
"""How often the buddy is asked whether it still has what it once acknowledged; it is sent again where it has not."""


class Target(Struct, frozen=True, kw_only=True):
    """The buddy's keeper, and what our words to it carry."""

    host: str
    port: int
    request: dict[str, Any]

    @property
    def where(self) -> tuple[str, int]:
        return self.host, self.port


class Pusher(threading.Thread):
    """Everything that is to be done for one local rank.

    Args:
        target: where replicas go just now; ``None`` where there is no other node.
        say: a line for the keeper's own output, by topic.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        target: Callable[[], Target | None],
        pace: Pace,
        traffic: scrub.Traffic,
        tell: Callable[[Note], None],
        say: Callable[[str, str], None],
        gap_s: float = GAP_S,
        confirm_s: float = CONFIRM_S,
    ) -> None:
        super().__init__(name=f"keepstep-push-{rank}", daemon=True)
        self._rank, self._target = rank, target
        self._pace, self._traffic, self._tell, self._say = pace, traffic, tell, say
        self._confirm_s = confirm_s
        self._bell, self._end, self._news = threading.Event(), threading.Event(), threading.Event()
        self._files, self._hold, self._wire = OpenFiles(directory, rank), Hold(directory.parent, rank), Wire()
        self._slow, self._cut_off = False, 0
        self._sent_to: Target | None = None
        self._confirm_at = 0.0
        self._hopeless: tuple[Path, int] | None = None
        """A version that is damaged here, and is not sent again."""
        self._told_of: Version | None = None
        self._gap = Gap(rank, tell, gap_s)

    def ring(self, *, confirm: bool = False) -> None:
        """There may be something to do. ``confirm``: also what is acknowledged already has to be asked for again."""
        if confirm:
            self._confirm_at = 0.0
            self._news.set()
        self._bell.set()

    def stop(self) -> None:
        self._end.set()
        self._bell.set()
        self._news.set()

    def run(self) -> None:
        pause = RETRY_FIRST_S
        while not self._end.is_set():
            if self._bell.wait(min(self._gap.due_s(time.monotonic()), self._confirm_s)):
                self._bell.clear()
            try:
                self._do()
                pause = RETRY_FIRST_S
            except VersionGone:
                self._end.wait(RETRY_FIRST_S)
                self._bell.set()  # the writer has a newer one
            except (OSError, CheckpointError, FrameError) as error:
                self._gap.why = str(error)
                self._say(f"push {self._rank}", f"rank {self._rank}: no replica on the buddy node yet ({error})")
                # A new roster may name another node: what was tried in vain before says nothing about that one.
                pause = RETRY_FIRST_S if self._news.wait(pause) else min(2 * pause, RETRY_LAST_S)
                self._news.clear()
                self._bell.set()
            self._gap.look(time.monotonic())
        self._wire.close()

    # ---------------------------------------------------------------- one round

    def _do(self) -> None:
        found, target = self._files.newest(), self._target()
        if found is None:
            self._hold.drop()
            return
        version, newest = found
        if target is None:
            self._wire.close()
            self._gap.over(version.step, time.monotonic())
            return
        self._look_at_target(target)
        now = time.monotonic()
        if newest.acked == version.step and now < self._confirm_at:
            self._gap.over(version.step, now)
            return
        self._gap.open(version.step, now)
        if not newest.sealed:
            self._gap.why = self._gap.why or "its checksums are not made yet"
            return  # the sealer will ring
        if self._hopeless == (newest.path, newest.serial):
            return  # nothing to be done before the next version
        if not self._slow:
            self._push_directly(newest, version, target)
        else:
            version = self._push_a_copy(newest, version, target)
        took = time.monotonic() - now
        self._gap.over(version.step, now + took, patience_s=PATIENCE * took)

    def _push_directly(self, newest: Slot, version: Version, target: Target) -> None:
        try:
            self._push(newest, version, target)
            self._cut_off = 0
        except VersionGone:
            self._cut_off += 1
            self._slow = self._cut_off >= CUT_OFF
            raise

    def _push_a_copy(self, newest: Slot, version: Version, target: Target) -> Version:
        """What was begun is finished first: most of it may be there already."""
        if self._hold.held is None:
            try:
                self._hold.take(newest, version)
            except SlotFull as error:
                self._say(f"hold {self._rank}", str(error))
                self._push(newest, version, target)
                return version
        assert self._hold.held is not None
        version, copy = self._hold.held
        self._push(copy, version, target)
        copy.invalidate()
        self._bell.set()
        last = self._files.newest()
        if last is not None and last[0].step <= version.step + KEEPS_UP:
            self._slow, self._cut_off = False, 0
            self._hold.drop()
        return version

    def _look_at_target(self, target: Target) -> None:
        """A new buddy has nothing yet; what a former one has counts no more. A new epoch may have rolled back."""
        before, self._sent_to = self._sent_to, target
        if before == target:
            return
        self._hold.drop()
        if before is None or before.where != target.where:
            for slot in self._files.slots():
                slot.acked = -1

    def _push(self, slot: Slot, version: Version, target: Target) -> None:
        serial = slot.serial

        def stop() -> bool:
            return self._end.is_set() or self._target() != target

        try:
            put = Put(**target.request, rank=self._rank, version=version, size=slot.used)
            with self._traffic, self._wire.carry(target.where, put, stop) as line:
                send(line, slot, version, pace=self._pace, on_want=lambda: self._acknowledge(version, -1))
        except SlotDamaged as error:
            self._look_at_damage(slot, version, serial, str(error))
            raise
        now = self._target()
        if now is not None and now.where == target.where:
            self._acknowledge(version, version.step)
            self._confirm_at = time.monotonic() + self._confirm_s

    def _acknowledge(self, version: Version, step: int) -> None:
        """In the trainer's own file, if it still holds this version."""
        for slot in self._files.slots():
            serial = slot.serial
            if slot.version == version:
                slot.acked = step
                if slot.serial != serial:
                    slot.acked = -1

    def _look_at_damage(self, slot: Slot, version: Version, serial: int, why: str) -> None:
        """The buddy could not get it undamaged: either it is damaged here, or on the way.

        Raises:
            VersionGone: neither; it was being overwritten.
        """
        here = scrub.damage(slot)
        if slot.serial != serial:
            raise VersionGone(f"{slot.path.name}: was overwritten while it was sent")
        if here and slot is self._hold.slot:
            slot.invalidate()
            why = f"{here}; it was a copy for a slow link, and is made again"
            self._tell(Note(what="damaged", tier="memory", step=version.step, rank=self._rank, why=why))
        elif here:
            self._hopeless = (slot.path, serial)
            scrub.handle(slot, self._rank, here, own=True, tell=self._tell)
        elif self._told_of != version:
            self._told_of = version
            self._tell(Note(what="damaged", tier="peer", step=version.step, rank=self._rank, why=why))


class Gap:
    """Tells when the buddy has been behind for long, and when it no longer is."""

    def __init__(self, rank: int, tell: Callable[[Note], None], limit_s: float) -> None:
        self._rank, self._tell, self._least_s, self._limit_s = rank, tell, limit_s, limit_s
        self._since: float | None = None
        self._step = 0
        self._told = False
        self.why = ""

    def open(self, step: int, now: float) -> None:
        """``step`` is not on the buddy node."""
        self._since = now if self._since is None else self._since
        self._step = step

    def due_s(self, now: float) -> float:
        """Seconds until there may be something to tell."""
        if self._since is None or self._told:
            return float("inf")
        return max(0.0, self._since + self._limit_s - now)

    def look(self, now: float) -> None:
        if self._since is None or self._told or now - self._since < self._limit_s:
            return
        self._told = True
        why = (
            f"no replica on the buddy node for {now - self._since:.0f} s: {self.why or 'the transfer takes that long'}"
        )
        self._tell(Note(what="gap", tier="peer", step=self._step, rank=self._rank, why=why, seconds=now - self._since))

    def over(self, step: int, now: float, *, patience_s: float = 0.0) -> None:
        """``step`` is there, or is not meant to be. The next gap takes at least ``patience_s``."""
        if self._told and self._since is not None:
            seconds = now - self._since
            why = f"the buddy node has step {step}, {seconds:.0f} s after it fell behind"
            self._tell(Note(what="closed", tier="peer", step=step, rank=self._rank, why=why, seconds=seconds))
        self._since, self._told, self.why = None, False, ""
        self._limit_s = max(self._least_s, patience_s)
