"""Where old communication is destroyed: on threads that may block, and on a bounded number of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, Protocol

MAX_SCRAPPERS: Final = 16
"""Threads that may be blocked at once in destroying old backends; above it backends are kept for ever instead."""


class Scrap(Protocol):
    """Something whose destruction may block."""

    name: str

    def scrap(self) -> None: ...


class Scrapyard:
    """Destroys what it is given, without anybody waiting for it."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._parked = 0

    def take(self, items: Iterable[Scrap]) -> None:
        for item in items:
            if self.busy() >= MAX_SCRAPPERS:
                self._parked += 1
                continue
            thread = threading.Thread(target=item.scrap, name=f"ks-scrap-{item.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def busy(self) -> int:
        """Threads that are still at it."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads)

    @property
    def parked(self) -> int:
        """Backends that are kept for ever because too many others would not go."""
        return self._parked
