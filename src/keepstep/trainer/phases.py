"""Phases: how long each part of a recovery took."""

from __future__ import annotations

import time


class Phases:
    """Milliseconds per phase, from the announcement of the epoch on."""

    def __init__(self, announced_ns: int) -> None:
        self.phases: dict[str, float] = {}
        self._last = announced_ns or time.monotonic_ns()

    def lap(self, name: str, less: float = 0.0) -> float:
        now = time.monotonic_ns()
        self.phases[name] = round(max(0.0, (now - self._last) / 1e6 - less), 3)
        self._last = now
        return self.phases[name]
