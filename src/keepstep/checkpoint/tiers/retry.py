"""Retry: a tier that gives a place which does not answer a second chance, with jitter and a budget.

Only ``TierAway`` is tried again: a full disk, a missing permission and a missing object stay what they are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from keepstep.checkpoint.exceptions import TierAway
from keepstep.ports.tier import Tier

FIRST_S = 0.2
"""Longest first pause; each further one may be twice as long. The pause itself is drawn between 0 and that."""
LAST_S = 10.0
"""No pause is longer."""
BUDGET_S = 60.0
"""So long after its first failure a call is tried no more; the next generation tries again. The time before it does not
count: an upload of an hour whose last request fails is worth a second try."""
T = TypeVar("T")


class Retrying:
    """The same tier, more patient.

    ``put`` is tried again only where ``chunks`` can be gone through again; a generator cannot.

    Args:
        draw, sleep, clock: luck and time, so that tests need neither.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        budget_s: float = BUDGET_S,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self.label, self.where = tier, tier.label, tier.where
        self._budget_s, self._draw, self._sleep, self._clock = budget_s, draw, sleep, clock

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        if iter(chunks) is chunks:
            return self.inner.put(name, chunks)
        return self._try(lambda: self.inner.put(name, chunks))

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return self._try(lambda: self.inner.get(name, start, length))

    def size(self, name: str) -> int:
        return self._try(lambda: self.inner.size(name))

    def names(self, prefix: str = "") -> Iterator[str]:
        return iter(self._try(lambda: list(self.inner.names(prefix))))

    def remove(self, name: str) -> None:
        self._try(lambda: self.inner.remove(name))

    def path(self, name: str) -> Path | None:
        return self.inner.path(name)

    def sweep(self, older_than_s: float) -> int:
        return self._try(lambda: self.inner.sweep(older_than_s))

    def _try(self, call: Callable[[], T]) -> T:
        until: float | None = None
        longest, tries = FIRST_S, 0
        while True:
            try:
                return call()
            except TierAway as error:
                tries += 1
                pause, now = longest * self._draw(), self._clock()
                until = now + self._budget_s if until is None else until
                if now + pause >= until:
                    raise TierAway(f"{error} (gave up after {tries} tries)") from error
                self._sleep(pause)
                longest = min(LAST_S, longest * 2)
