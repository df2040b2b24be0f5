"""What the benchmarks measure with: which step which rank had done when, and numbers about numbers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_S = 0.01
IDLE_LIMIT_S = 5.0
IDLE_LOOK_S, IDLE_LOOKS = 0.2, 2
IDLE_SHARE = 0.15
"""Of one core: what a machine at rest does besides."""


class Progress:
    """Reads the workload's progress files: for each step, when the last rank had done it for the first time."""

    def __init__(self, directory: Path, world_size: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.world_size = directory, world_size
        self._at: dict[int, dict[int, int]] = {}
        self._offset: dict[int, int] = {}

    def read(self) -> None:
        for rank in range(self.world_size):
            path = self.directory / f"rank{rank}"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offset.get(rank, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset[rank] = self._offset.get(rank, 0) + len(whole)
            for line in whole.splitlines():
                step, at = line.split()
                self._at.setdefault(int(step), {}).setdefault(rank, int(at))

    def done(self) -> dict[int, int]:
        """Global steps that are complete, with the instant (monotonic ns) at which they were."""
        self.read()
        return {s: max(at.values()) for s, at in self._at.items() if len(at) == self.world_size}

    def newest(self) -> int:
        return max(self.done(), default=-1)

    def first_after(self, step: int) -> int | None:
        """When the first global step beyond ``step`` was complete; ``None`` while there is none."""
        later = {s: at for s, at in self.done().items() if s > step}
        return min(later.values(), default=None)


def until(done: Callable[[], bool], limit_s: float, what: str, tell: Callable[[], str] = lambda: "") -> None:
    """Poll until ``done()``.

    Raises:
        TimeoutError: naming what was waited for.
    """
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}\n{tell()}")
        time.sleep(POLL_S)


def until_idle(limit_s: float = IDLE_LIMIT_S) -> bool:
    """Wait until nothing else happens on this machine: what the last one left behind must not slow the next one down.

    Returns:
        Whether it came to that within ``limit_s``.
    """
    os.sync()
    deadline, calm = time.monotonic() + limit_s, 0
    while calm < IDLE_LOOKS:
        before = _busy_ticks()
        time.sleep(IDLE_LOOK_S)
        busy_s = (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK")
        calm = calm + 1 if busy_s <= IDLE_SHARE * IDLE_LOOK_S else 0
        if time.monotonic() > deadline:
            return False
    return True


def _busy_ticks() -> int:
    """Time that all cores have spent with anything but waiting, in ticks."""
    words = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(words) - words[3] - words[4]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float] | None:
    """Median, least and greatest; ``None`` when nothing was measured."""
    if not values:
        return None
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }
