"""Waits: how long the training thread stood still in collectives, by what passes through our hands.

Two ways lead into a collective's end. A thread that calls ``wait`` is seen waiting. DDP's reducer waits in C++, for
futures: it cannot be seen, but it launches its last bucket when the last gradient is there, so the time from the last
launch to the end of the last of them is waiting, unless another bucket was launched after that end; then training had
gone on meanwhile. Communication beside computing is no waiting, and is not counted.
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import Final


class Waits:
    """Of one thread: the process's main thread, until another one says that it trains."""

    __slots__ = ("_depth", "_launched", "_left", "_promised", "_since", "_tail", "_thread", "total_ns")

    def __init__(self) -> None:
        self.total_ns = 0
        self._thread = threading.main_thread().ident
        self._depth = 0
        self._since = 0
        self._left = 0
        self._launched = 0
        self._promised = 0
        self._tail = 0
        """A time of waiting that is one only if training did not go on meanwhile."""

    def here(self) -> None:
        """The calling thread is the one that trains; a process that was forked has a main thread of its own."""
        self._thread = threading.get_ident()

    def launched(self) -> None:
        """A collective is about to be launched."""
        self._launched = monotonic_ns()

    def enter(self) -> None:
        """A thread begins to wait."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1:
            self.settle()
            self._since = monotonic_ns()

    def leave(self) -> None:
        """It goes on."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self._left = monotonic_ns()
            self.total_ns += self._left - self._since

    def promised(self) -> None:
        """Somebody asks for a future of the collective that was just launched."""
        self._tail = 0
        self._promised += 1

    def kept(self) -> None:
        """One of these futures is complete, from whatever thread."""
        self._promised -= 1
        if self._promised == 0 and self._depth == 0:
            self._tail = max(0, monotonic_ns() - max(self._launched, self._left))

    def settle(self) -> int:
        """The sum so far. What was waited for in C++ is over: the thread is here."""
        tail, self._tail = self._tail, 0
        self.total_ns += tail
        return self.total_ns


WAITS: Final = Waits()
"""Of this process."""
