"""Wall time for records that never runs backwards, not even across a restart of the controller."""

from __future__ import annotations

import time
from collections.abc import Callable

from keepstep.model.ids import Nanos


class AnchoredClock:
    """The wall clock's reading at the start plus CLOCK_MONOTONIC since: steps of the wall clock do not show.

    Args:
        not_before: time of the newest record in the log; a wall clock that was set back meanwhile starts from there.
    """

    def __init__(
        self,
        *,
        not_before: int = 0,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._monotonic = monotonic
        self._anchor = max(wall(), not_before) - monotonic()

    def now(self) -> Nanos:
        return Nanos(self._anchor + self._monotonic())
