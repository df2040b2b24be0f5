"""A few daemon threads that wait for what only native code can wait for.

``concurrent.futures`` joins its threads when the interpreter exits; one that is stuck in a broken communicator would
keep the process from ending. These are left behind instead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Waiters:
    """Runs calls on at most ``limit`` daemon threads, started when needed; further calls queue up."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._free = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call``, which must not raise, on one of the threads."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
            elif self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._calls.put(call)

    def close(self) -> None:
        """Let each thread end once it is done with what it does."""
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            with self._lock:
                self._free += 1
