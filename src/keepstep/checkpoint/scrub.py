"""Scrubber: reads sealed versions again now and then, so that memory that has changed is found before it is needed.

It runs at the lowest priority, at a bounded rate, and not while anything is being transferred. What a damaged version
is worth depends on what else there is (``verdict``): a replica is worth nothing, its owner sends it again; a rank's
own version is worth nothing once a newer one is complete or another node holds it; and the only copy of a state stays
where it is, because whoever restores it checks it again and can decide, while what is gone is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from keepstep.checkpoint import pair, sums
from keepstep.checkpoint.exceptions import CheckpointError, SlotDamaged, SlotInvalid, VersionGone
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.slot import HEADER, Slot, Version

SCRUB_EVERY_S = 300.0
"""A version that has lain unchanged for this long is read again, and then as often as that."""
SCRUB_BYTES_PER_S = 256 * 1024 * 1024
LOOKS = 2
"""A mismatch is believed when it is seen this many times in a row: one may be the reader's fault."""
LOWEST = 19
"""Of ``nice``."""


class Traffic:
    """How many transfers are under way in this process."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1

    @property
    def busy(self) -> bool:
        return self._count > 0


def damage(slot: Slot, *, pace: Pace | None = None, stop: Callable[[], bool] = lambda: False) -> str:
    """What is wrong with a sealed version, in words; empty when nothing is.

    Raises:
        VersionGone: it was overwritten meanwhile, or ``stop`` said so: nothing is known.
    """
    serial, step = slot.serial, slot.version
    try:
        table = slot.table()
        for number, (start, end) in enumerate(sums.chunks(slot.used - HEADER)):
            if stop() or (pace is not None and not pace.wait(end - start, stop)):
                raise VersionGone(f"{slot.path.name}: the reading was interrupted")
            if _differs(slot, HEADER + start, HEADER + end, table[number]):
                raise SlotDamaged(
                    f"bytes {HEADER + start} to {HEADER + end} of {slot.path.parent.name}/{slot.path.name} do not "
                    f"match their checksum"
                )
    except SlotInvalid as error:
        if slot.serial == serial and slot.version == step and isinstance(error, SlotDamaged):
            return str(error)
        raise VersionGone(f"{slot.path.name}: was overwritten while it was read") from error
    if slot.serial != serial:
        raise VersionGone(f"{slot.path.name}: was overwritten while it was read")
    return ""


def _differs(slot: Slot, start: int, end: int, expected: int) -> bool:
    for _ in range(LOOKS):
        with memoryview(slot.memory) as whole, whole[start:end] as view:
            if sums.digest(view) == expected:
                return False
    return True


def verdict(*, own: bool, version: Version, complete: list[Version], acked: int) -> str:
    """What becomes of a damaged version: a reason to drop it, or empty where it stays. Pure.

    Args:
        own: a local rank's own version; a replica of another node's rank otherwise.
        complete: what else is complete here of the same rank.
        acked: the step of it that another node has verified, -1 for none.
    """
    if not own:
        return "its owner sends it again"
    if any(other > version for other in complete):
        return "a newer version is complete"
    if acked == version.step:
        return "the buddy node holds it undamaged"
    return ""


def handle(slot: Slot, rank: int, why: str, *, own: bool, tell: Callable[[Note], None]) -> bool:
    """Act on damage and tell about it; true when the version was dropped."""
    version, serial = slot.version, slot.serial
    if version is None:
        return False
    others = [held for held, path in pair.look(slot.path.parent, rank) if path != slot.path]
    reason = verdict(own=own, version=version, complete=others, acked=slot.acked)
    if reason and slot.serial == serial:
        slot.invalidate()
    outcome = f"dropped: {reason}" if reason else "kept: it is the only copy, and is checked again when it is read"
    tell(Note(what="damaged", tier="memory" if own else "peer", step=version.step, rank=rank, why=f"{why}; {outcome}"))
    return bool(reason)


class Scrubber(threading.Thread):
    """Goes through the files of a keeper for as long as the process lives.

    Args:
        directories: each with whether it holds the local ranks' own versions.
    """

    def __init__(
        self,
        directories: dict[Path, bool],
        *,
        traffic: Traffic,
        tell: Callable[[Note], None],
        every_s: float = SCRUB_EVERY_S,
        bytes_per_s: float = SCRUB_BYTES_PER_S,
    ) -> None:
        super().__init__(name="keepstep-scrub", daemon=True)
        self._directories, self._traffic, self._tell, self._every_s = directories, traffic, tell, every_s
        self._pace = Pace(bytes_per_s)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._known: set[tuple[Path, int, int]] = set()
        self._end = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        while not self._end.wait(self._every_s):
            self.pass_once()

    def pass_once(self) -> None:
        """Look at everything that has not changed since the last time."""
        seen: dict[Path, tuple[int, int]] = {}
        for directory, own in self._directories.items():
            for rank in sorted(pair.ranks_in(directory)):
                for _, path in pair.look(directory, rank):
                    with contextlib.suppress(OSError, CheckpointError):
                        self._look(path, rank, own, seen)
        self._seen = seen

    def stop(self) -> None:
        self._end.set()

    def _look(self, path: Path, rank: int, own: bool, seen: dict[Path, tuple[int, int]]) -> None:
        with contextlib.closing(Slot(path)) as slot:
            mark = (os.fstat(slot.fileno()).st_ino, slot.serial)
            seen[path] = mark
            if self._seen.get(path) != mark or not slot.sealed or (path, *mark) in self._known:
                return
            why = damage(slot, pace=self._pace, stop=lambda: self._traffic.busy or self._end.is_set())
            if why and not handle(slot, rank, why, own=own, tell=self._tell):
                self._known = {known for known in self._known if known[0] != path} | {(path, *mark)}  # tell it once
