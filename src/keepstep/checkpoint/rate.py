"""Rate: how many bytes per second a tier may take, as a token bucket.

``Bucket`` is pure: it is told the time and answers how long to wait. ``Pace`` is its shell, shared by the threads of a
process, with a clock and a way to wait that ends early when there is no more need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.25
"""How long a bucket may have been idle and still catch up: what was saved up longer ago is forgotten."""
PIECE_S = 0.05
"""A sender hands over what the budget gives in this time at once: smooth on the wire, cheap in calls."""
MIN_PIECE, MAX_PIECE = 64 * 1024, 4 * 1024 * 1024
WAIT_SLICE_S = 0.1
"""Longest sleep before the waiter looks whether it is still wanted."""


class Bucket:
    """Lets ``rate`` bytes per second through; 0 lets everything through.

    A request is granted as a debt: it is answered with the seconds after which it is paid for. So a piece larger than
    the bucket passes, too, and over any time t no more than ``rate * (t + BURST_S)`` bytes plus one piece are let go.
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate = max(0.0, rate)
        self._at = now
        self._tokens = self.rate * BURST_S

    def set_rate(self, rate: float, now: float) -> None:
        """What has been saved up, or is owed, at the old rate stays, within the new rate's burst."""
        self._fill(now)
        before, self.rate = self.rate, max(0.0, rate)
        if before == 0:
            self._tokens = 0.0
        self._tokens = min(self._tokens, self.rate * BURST_S)

    def take(self, size: int, now: float) -> float:
        """Account for ``size`` bytes and return how many seconds to wait before they may go."""
        if self.rate == 0:
            return 0.0
        self._fill(now)
        wait = max(0.0, -self._tokens / self.rate)
        self._tokens -= size
        return wait

    def give_back(self, size: int) -> None:
        """They were not sent after all."""
        if self.rate:
            self._tokens = min(self._tokens + size, self.rate * BURST_S)

    @property
    def piece(self) -> int:
        """How much to ask for at a time."""
        if self.rate == 0:
            return MAX_PIECE
        return int(min(MAX_PIECE, max(MIN_PIECE, self.rate * PIECE_S)))

    def _fill(self, now: float) -> None:
        earned = max(0.0, now - self._at) * self.rate  # a clock that jumps back earns nothing and costs nothing
        self._at = now
        self._tokens = min(self._tokens + earned, self.rate * BURST_S)


class Pace:
    """A bucket for threads. Unlimited until told otherwise.

    Args:
        clock, sleep: replaced in tests.
    """

    def __init__(
        self,
        rate: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._bucket = Bucket(rate, clock())

    @property
    def rate(self) -> float:
        return self._bucket.rate

    def set_rate(self, rate: float) -> None:
        with self._lock:
            if rate != self._bucket.rate:
                self._bucket.set_rate(rate, self._clock())

    @property
    def piece(self) -> int:
        return self._bucket.piece

    def wait(self, size: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Come back when ``size`` bytes may go; false, and nothing taken, when ``stop`` said so before.

        A limit that is lifted meanwhile lets everybody go at once.
        """
        with self._lock:
            pause = self._bucket.take(size, self._clock())
        until = self._clock() + pause
        while (left := until - self._clock()) > 0 and self._bucket.rate:
            if stop():
                with self._lock:
                    self._bucket.give_back(size)
                return False
            self._sleep(min(left, WAIT_SLICE_S))
        return True
