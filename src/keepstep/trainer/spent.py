"""Spent: where the time of this process's training goes, counted by whoever holds it up.

Sums that only grow; the heartbeat stores what was added between two commits (``beat.Beat.commit``). No lock and no
system call: each sum has one writer, the thread that trains, but for collections, which the interpreter runs on
whatever thread it likes and never two at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

from keepstep.trainer.waits import WAITS, Waits

PARTS_LOOKED_AT = 64
"""Of a batch that is a list: its size is estimated from so many of its first members."""
DEPTH_LOOKED_AT = 3
"""Containers within containers that are looked into for tensors."""


class Spent:
    """Nanoseconds, and elements of input, since the process began."""

    __slots__ = ("_collecting", "_waits", "data_ns", "gc_ns", "save_ns", "size")

    def __init__(self, waits: Waits = WAITS) -> None:
        self._waits = waits
        self.data_ns = 0
        self.gc_ns = 0
        self.save_ns = 0
        self.size = 0
        self._collecting = 0

    def sums(self) -> tuple[int, int, int, int, int]:
        """Waiting, data, garbage collection, snapshots, elements; at the end of a step."""
        return self._waits.settle(), self.data_ns, self.gc_ns, self.save_ns, self.size

    def fetch(self, take: Callable[[], Any]) -> Any:
        """What ``take`` returns: a batch, for which training waits meanwhile."""
        began = monotonic_ns()
        try:
            batch = take()
        finally:
            self.data_ns += monotonic_ns() - began
        self.size += elements(batch)
        return batch

    def watch_collections(self) -> None:
        """Count the interpreter's collections from now on, and the waits of the calling thread, which trains."""
        self._waits.here()
        if self._collected not in gc.callbacks:
            gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = monotonic_ns()
        elif self._collecting:
            self.gc_ns += monotonic_ns() - self._collecting
            self._collecting = 0


SPENT: Final = Spent()
"""Of this process."""


def elements(batch: Any, depth: int = DEPTH_LOOKED_AT) -> int:
    """Elements of the tensors and arrays in a batch; 0 where nothing in it says how large it is."""
    numel = getattr(batch, "numel", None)
    if numel is not None:
        return int(numel()) if callable(numel) else 0
    if isinstance(batch, (str, bytes)) or depth == 0:
        return 0
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        looked = batch[:PARTS_LOOKED_AT]
        found = sum(elements(part, depth - 1) for part in looked)
        return found * len(batch) // len(looked) if looked else 0
    size = getattr(batch, "size", None)  # of a NumPy array
    return size if type(size) is int else 0
