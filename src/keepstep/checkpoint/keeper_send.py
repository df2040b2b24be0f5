"""The sending half of the keeper: one thread per local rank seals its newest version and brings it to the buddy.

Older versions are skipped: a buddy that lags catches up with the newest. The acknowledgement stands in the trainer's
own file, and means: this very version lies on the buddy node, every chunk checked there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from keepstep.checkpoint import pair, scrub
from keepstep.checkpoint.exceptions import CheckpointError, SlotDamaged, SlotInvalid, VersionGone
from keepstep.checkpoint.line import Line
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.peers import Put, hear_answer
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.transfer import send
from keepstep.model.wire import FrameError

RETRY_FIRST_S, RETRY_LAST_S = 0.02, 1.0
GAP_S = 10.0
"""A version that has waited for this long to be on the buddy node is a gap that the job's log tells."""
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
        self._directory, self._rank, self._target = directory, rank, target
        self._pace, self._traffic, self._tell, self._say = pace, traffic, tell, say
        self._confirm_s = confirm_s
        self._bell, self._end = threading.Event(), threading.Event()
        self._open: dict[Path, Slot] = {}
        self._acked_by: tuple[str, int] | None = None
        self._confirm_at = 0.0
        self._hopeless: tuple[Path, int] | None = None
        """A version that is damaged here, and is not sent again."""
        self._told_of: Version | None = None
        self._gap = Gap(rank, tell, gap_s)

    def ring(self, *, confirm: bool = False) -> None:
        """There may be something to do. ``confirm``: also what is acknowledged already has to be asked for again."""
        if confirm:
            self._confirm_at = 0.0
        self._bell.set()

    def stop(self) -> None:
        self._end.set()
        self._bell.set()

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
                self._end.wait(pause)
                pause = min(2 * pause, RETRY_LAST_S)
                self._bell.set()
            self._gap.look(time.monotonic())

    # ---------------------------------------------------------------- one round

    def _do(self) -> None:
        slots = self._slots()
        complete = [(version, slot) for slot in slots if (version := slot.version) is not None]
        if not complete:
            return
        version, newest = max(complete, key=lambda item: item[0])
        self._seal(newest)
        for slot in slots:  # the archiver wants the checksums of a pinned version that a newer one has overtaken
            if slot.pinned and not slot.sealed:
                with contextlib.suppress(SlotInvalid):
                    self._seal(slot)
        target = self._target()
        if target is None:
            self._gap.over(version.step, time.monotonic())
            return
        self._forget_acks_of_others(target, slots)
        now = time.monotonic()
        if newest.acked == version.step and now < self._confirm_at:
            self._gap.over(version.step, now)
            return
        self._gap.open(version.step, now)
        if self._hopeless == (newest.path, newest.serial):
            return
        self._push(newest, version, target)
        self._gap.over(version.step, time.monotonic())

    def _seal(self, slot: Slot) -> None:
        if slot.sealed:
            return
        try:
            slot.seal()
        except SlotInvalid as error:
            raise VersionGone(str(error)) from error

    def _forget_acks_of_others(self, target: Target, slots: list[Slot]) -> None:
        """A new buddy has nothing yet; what a former one has counts no more."""
        if self._acked_by == target.where:
            return
        for slot in slots:
            slot.acked = -1
        self._acked_by = target.where

    def _push(self, slot: Slot, version: Version, target: Target) -> None:
        serial = slot.serial

        def lacking() -> None:
            if slot.serial == serial:
                slot.acked = -1

        def stop() -> bool:
            return self._end.is_set() or self._target() != target

        try:
            with self._traffic, Line.dial(target.host, target.port, stop) as line:
                line.say(Put(**target.request, rank=self._rank, version=version, size=slot.used))
                hear_answer(line)
                send(line, slot, version, pace=self._pace, on_want=lacking)
        except SlotDamaged as error:
            self._look_at_damage(slot, version, serial, str(error))
            raise
        now = self._target()
        if now is None or now.where != target.where or slot.serial != serial:
            return
        slot.acked = version.step
        if slot.serial != serial:
            slot.acked = -1
        self._confirm_at = time.monotonic() + self._confirm_s

    def _look_at_damage(self, slot: Slot, version: Version, serial: int, why: str) -> None:
        """The buddy could not get it undamaged: either it is damaged here, or on the way.

        Raises:
            VersionGone: neither; it was being overwritten.
        """
        here = scrub.damage(slot)
        if slot.serial != serial:
            raise VersionGone(f"{slot.path.name}: was overwritten while it was sent")
        if here:
            self._hopeless = (slot.path, serial)
            scrub.handle(slot, self._rank, here, own=True, tell=self._tell)
        elif self._told_of != version:
            self._told_of = version
            self._tell(Note(what="damaged", tier="peer", step=version.step, rank=self._rank, why=why))

    def _slots(self) -> list[Slot]:
        """This rank's files, kept open: a mapping that stays has its pages present."""
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


class Gap:
    """Tells when the buddy has been behind for long, and when it no longer is."""

    def __init__(self, rank: int, tell: Callable[[Note], None], limit_s: float) -> None:
        self._rank, self._tell, self._limit_s = rank, tell, limit_s
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

    def over(self, step: int, now: float) -> None:
        """``step`` is there, or is not meant to be."""
        if self._told and self._since is not None:
            seconds = now - self._since
            why = f"the buddy node has step {step}, {seconds:.0f} s after it fell behind"
            self._tell(Note(what="closed", tier="peer", step=step, rank=self._rank, why=why, seconds=seconds))
        self._since, self._told, self.why = None, False, ""
