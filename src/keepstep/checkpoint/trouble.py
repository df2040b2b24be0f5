"""Trouble: what is said of a durable tier that does not work, and when it is tried again. Pure.

One line when it begins, one more for each other kind of error, and one when it is over: not one per rank and try. A
part that fits where the next one does not is no sign that the trouble is over, a whole generation is. From the third
generation in a row that fails on there are pauses between tries, random and growing: a full disk is not filled again
and again, and many nodes do not come back to a store at the same instant.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FREE_TRIES = 2
"""So many failures in a row are followed by another try as soon as there is something to write."""
PAUSE_FIRST_S = 2.0
"""The first pause. Each further one doubles; what is waited is drawn between half of that and all of it."""
PAUSE_LAST_S = 30.0
"""No pause is longer, so that a place that works again gets the next generation."""


class Trouble:
    """One tier's, on one node. The caller brings the time, in seconds of a clock that does not jump.

    Args:
        name: the tier, as people know it.
        draw: luck, between 0 and 1.
    """

    def __init__(self, name: str, *, draw: Callable[[], float] = random.random) -> None:
        self._name, self._draw = name, draw
        self._kinds: set[type[Exception]] = set()
        self._since = 0.0
        self._lost: tuple[int, int, int] | None = None
        """First and newest step that is left out, and how many they are."""
        self._good: int | None = None
        self._count, self._until = 0, 0.0

    @property
    def on(self) -> bool:
        return bool(self._kinds)

    def pause_s(self, now: float) -> float:
        """How long the tier is left alone from now on; 0 when it may be tried."""
        return max(0.0, self._until - now)

    def hurry(self) -> None:
        """The job ends: no more pauses."""
        self._until = 0.0

    def failed(self, now: float) -> None:
        """One more generation, or look, in a row came to nothing."""
        self._count += 1
        if self._count > FREE_TRIES:
            longest = min(PAUSE_LAST_S, PAUSE_FIRST_S * 2.0 ** min(self._count - FREE_TRIES - 1, 10))
            self._until = now + longest * (1 + self._draw()) / 2

    def begins(self, error: Exception, now: float, *, step: int | None = None, who: str = "") -> str | None:
        """The sentence for an error, where nothing has been said of its kind yet.

        Args:
            step: of the generation that is left out; ``None`` where it may still come.
            who: whose parts are missing.
        """
        if step is not None:
            first, newest, count = self._lost or (step, -1, 0)
            if step > newest:
                self._lost = (first, step, count + 1)
        if not self._kinds:
            self._since = now
        if type(error) in self._kinds:
            return None
        self._kinds.add(type(error))
        what = "does not work" if step is None else f"step {step} is left out{f' ({who})' if who else ''}"
        back = "nothing complete is known there" if self._good is None else f"its newest complete step is {self._good}"
        return f"{self._name}: {what}: {error}; {back}, what is complete stays; training goes on, tries go on"

    def holds(self) -> None:
        """This node's part in a generation is whole: tried without pauses again."""
        self._count, self._until = 0, 0.0

    def works(self, step: int, now: float) -> str | None:
        """A generation is complete: the sentence that ends the trouble, if there was any."""
        self.holds()
        self._good = step if self._good is None else max(self._good, step)
        lost, self._lost = self._lost, None
        if not self._kinds:
            return None
        self._kinds.clear()
        missing = "" if lost is None else f"; {_steps(*lost)} missing"
        return f"{self._name} works again, step {step} is there, after {now - self._since:.0f} s{missing}"


def _steps(first: int, newest: int, count: int) -> str:
    return f"step {first} is" if count == 1 else f"{count} generations from step {first} to {newest} are"
