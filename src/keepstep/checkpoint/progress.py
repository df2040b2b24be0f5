"""Progress: how far a long restore is, in one line, counted from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keepstep.checkpoint.room import show

TALK_AFTER_S = 2.0
"""What takes longer than this says how far it is."""
TALK_EVERY_S = 1.0


class Progress:
    """Counts bytes.

    Args:
        say: told the line, at most every ``TALK_EVERY_S``; nobody is told where left out.
    """

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._say, self._clock = what, total, say, clock
        self._lock = threading.Lock()
        self._began = self._said = clock()
        self.done = 0

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            now = self._clock()
            if self._say is None or now - self._began < TALK_AFTER_S or now - self._said < TALK_EVERY_S:
                return
            self._said = now
            self._say(self.line(now))

    def line(self, now: float) -> str:
        """``restoring step 1200: 3.5 GiB of 12.0 GiB, 1.1 GiB/s, 8 s left``."""
        rate = self.done / max(1e-9, now - self._began)
        left = (self._total - self.done) / max(1.0, rate)
        return f"{self._what}: {show(self.done)} of {show(self._total)}, {show(int(rate))}/s, {left:.0f} s left"
