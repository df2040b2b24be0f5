"""Says lines to the person at the terminal, who may have stopped reading.

A terminal that is held (ctrl-S) or a pipe that is full blocks whoever writes to it. For the agent's loop that would be
silence towards the controller, and its node would count as lost; so a thread of its own does the writing.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time

WAITING_LINES = 1000
"""Lines that wait for a reader; beyond it new ones are dropped, and counted."""


class Teller(threading.Thread):
    """``say`` never waits; the thread does."""

    def __init__(self) -> None:
        super().__init__(name="teller", daemon=True)
        self._lines: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._dropped = 0

    def say(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, within_s: float) -> None:
        """Say what still waits; give up when nobody reads for ``within_s``."""
        if not self.is_alive():
            return
        until = time.monotonic() + within_s
        try:
            self._lines.put(None, timeout=within_s)
        except queue.Full:
            return
        self.join(max(0.0, until - time.monotonic()))

    def run(self) -> None:
        while (line := self._lines.get()) is not None:
            show(line)
            if self._dropped:
                count, self._dropped = self._dropped, 0
                show(f"keepstep: {count} lines were not shown, because nobody read them")


def show(line: str) -> None:
    """One line on stderr; never an error if nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
