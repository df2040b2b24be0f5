"""Facts on their way to the controller: numbered, kept on disk until they are acknowledged.

``<run_dir>/outbox/<node>`` is a sequence of wire frames: first ``Acked`` with the number below which nothing is kept,
then one ``Reports`` per fact. It survives the agent, so that numbers go on and nothing is told twice under two numbers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.agent.files import write_atomic
from keepstep.model.facts import (
    AnyFact,
    CheckpointNoted,
    RankAdvanced,
    RankJoined,
    RankStalled,
    RestoreMoved,
    StallEnded,
)
from keepstep.model.wire import Acked, FrameError, Reports, Unpacker, pack

KEPT_FACTS = 10_000
"""Unheard facts; beyond it what can be spared (stalls, progress, notes) is dropped, beyond twice that everything."""
FILE_BYTES = 64 * 1024 * 1024
"""Beyond it facts are kept in memory only."""
COMPACT_BYTES = 256 * 1024
"""A file with nothing left to say is rewritten once it has grown to this size."""
SYNC_EVERY_S = 0.2
"""While the controller is away, how often the file is forced to the disk at most."""

_SPARABLE = (CheckpointNoted, RankStalled, StallEnded, RankJoined, RankAdvanced, RestoreMoved)


class Outbox:
    """Append with ``add``; forget with ``acked``. ``on_add`` is told at once of each new fact."""

    def __init__(self, path: Path, *, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> None:
        self._path = path
        self._say = say
        self._fd = -1
        self._size = 0
        self._last = 0
        self._acked = 0
        self._facts: dict[int, AnyFact] = {}
        self._of_this_boot: set[int] = set()
        self._on_disk = True
        self._dropped = 0
        self._synced_at = 0.0
        self.on_add: Callable[[AnyFact], None] = lambda fact: None
        self.away = True
        """Set by the uplink: no controller hears us, so the disk has to be safe."""

    def open(self) -> None:
        """Read what an earlier agent left; a damaged tail (power cut) is cut off."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._read(self._path.read_bytes())
            self._rewrite()
        except OSError as error:
            self._memory_only(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def last(self) -> int:
        return self._last

    def heard(self, seq: int) -> bool:
        """Has the controller acknowledged this number?"""
        return 0 < seq <= self._acked

    def pending(self) -> tuple[AnyFact, ...]:
        """Unacknowledged facts in the order of their numbers."""
        return tuple(self._facts.values())

    def add(self, fact: AnyFact) -> AnyFact | None:
        """Number and keep a fact; ``None`` when the bound forced it to be dropped."""
        if len(self._facts) >= KEPT_FACTS and (isinstance(fact, _SPARABLE) or len(self._facts) >= 2 * KEPT_FACTS):
            self._dropped += 1
            if self._dropped == 1:
                self._say(
                    f"note: outbox holds {len(self._facts)} unheard facts; dropping {type(fact).__name__} and its like"
                )
            return None
        self._last += 1
        numbered = msgspec.structs.replace(fact, seq=self._last)
        self._facts[self._last] = numbered
        self._of_this_boot.add(self._last)
        self._append(pack(Reports(facts=(numbered,))))
        self.on_add(numbered)
        return numbered

    def acked(self, seq: int) -> None:
        """The controller has facts up to ``seq`` on its disk."""
        self._acked = max(self._acked, seq)
        for number in [n for n in self._facts if n <= seq]:
            del self._facts[number]
            self._of_this_boot.discard(number)
        if not self._facts and (self._size > COMPACT_BYTES or not self._on_disk):
            self._on_disk = True
            try:
                self._rewrite()
            except OSError as error:
                self._memory_only(error)

    def welcome(self, acked: int) -> None:
        """Align with what the controller knows when a connection starts.

        If our file was lost, the numbers we have given since may be taken already: such facts get new ones.
        """
        if acked > self._last:
            fresh = [self._facts[n] for n in sorted(self._of_this_boot) if n in self._facts]
            self._facts.clear()
            self._of_this_boot.clear()
            self._last = acked
            self._acked = acked
            for fact in fresh:
                self._last += 1
                self._facts[self._last] = msgspec.structs.replace(fact, seq=self._last)
                self._of_this_boot.add(self._last)
            self._size = max(self._size, COMPACT_BYTES + 1)
            try:
                self._rewrite()
            except OSError as error:
                self._memory_only(error)
            return
        self.acked(acked)

    # ------------------------------------------------------------ file

    def _read(self, data: bytes) -> None:
        unpacker: Unpacker[Acked | Reports] = Unpacker(Acked | Reports)
        try:
            for frame in unpacker.feed(data):
                if isinstance(frame, Acked):
                    self._acked = max(self._acked, frame.seq)
                else:
                    for fact in frame.facts:
                        self._facts[fact.seq] = fact
        except FrameError as error:
            self._say(f"note: the end of {self._path} is damaged and was cut off: {error}")
        self._last = max([self._acked, *self._facts])
        self._facts = {n: f for n, f in sorted(self._facts.items()) if n > self._acked}

    def _rewrite(self) -> None:
        self.close()
        data = b"".join([pack(Acked(seq=self._acked)), *(pack(Reports(facts=(f,))) for f in self._facts.values())])
        write_atomic(self._path, data)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._size = len(data)

    def _append(self, data: bytes) -> None:
        if not self._on_disk or self._fd < 0:
            return
        try:
            if self._size + len(data) > FILE_BYTES:
                raise OSError(28, f"the outbox file has reached its limit of {FILE_BYTES} bytes")
            written = os.write(self._fd, data)
            self._size += written
            if written != len(data):
                raise OSError(28, "no space left on device")
            now = time.monotonic()
            if self.away and now - self._synced_at >= SYNC_EVERY_S:
                os.fdatasync(self._fd)
                self._synced_at = now
        except OSError as error:
            self._memory_only(error)

    def _memory_only(self, error: OSError) -> None:
        self._on_disk = False
        self._say(f"note: {self._path} cannot be written ({error.strerror}); unheard facts are kept in memory only")
