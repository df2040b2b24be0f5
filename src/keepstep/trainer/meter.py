"""Counts what the collectives of this process do, cheaply: a few attribute stores per collective.

``started`` and ``finished`` are each changed by one bytecode-atomic step under the interpreter lock; they feed
heartbeat memory, where being one behind for an instant does no harm.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.trainer.flight import Flight


class Meter:
    """Counters and hooks shared by all groups of a process.

    ``world_ops`` counts reductions over all ranks: once one of them is over, every rank has launched it, and so has
    been through ``before_reduce``. ``flight`` takes down where each group is; private memory until it is replaced.
    """

    __slots__ = ("_armed", "_before_reduce", "_flight", "broken", "finished", "on_progress", "started", "world_ops")

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self.world_ops = 0
        self.broken: str | None = None
        self.on_progress: Callable[[int, int], None] | None = None
        self._before_reduce: Callable[[], None] | None = None
        self._armed = False
        self._flight: Flight | None = None

    @property
    def flight(self) -> Flight:
        if self._flight is None:  # not at import: a process forked from this one must not share the memory
            self._flight = Flight()
        return self._flight

    @flight.setter
    def flight(self, flight: Flight) -> None:
        self._flight = flight

    @property
    def before_reduce(self) -> Callable[[], None] | None:
        return self._before_reduce

    @before_reduce.setter
    def before_reduce(self, hook: Callable[[], None] | None) -> None:
        self._before_reduce = hook
        self._armed = hook is not None

    def mark(self) -> None:
        """A new step begins."""
        self.world_ops = 0
        self._armed = self._before_reduce is not None

    def launch(self, *, reduces: bool, world: bool) -> None:
        """A collective is about to be launched."""
        if reduces and self._armed:
            self._armed = False
            assert self._before_reduce is not None
            self._before_reduce()
        self.started += 1
        if world and reduces:
            self.world_ops += 1
        if self.on_progress is not None:
            self.on_progress(self.started, self.finished)

    def finish(self) -> None:
        """A collective is over, well or not."""
        self.finished += 1
        if self.on_progress is not None:
            self.on_progress(self.started, self.finished)

    def breaks(self, error: BaseException) -> None:
        """A collective raised; the first error is kept."""
        if self.broken is None:
            self.broken = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
