"""Budget: how often a snapshot is taken and how it is copied, from what the last ones cost. Pure.

The cost of a snapshot is what a step waited for it: the copy at the commit, or what was left of it when the optimizer
wanted to go on, and the wait for another node's copy. Where steps with and without a snapshot are known, the time by
which the former are longer counts too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Literal, NamedTuple

DEFAULT_SHARE = 0.01
"""Share of a step that a copy may take before it is moved beside the next step, where the user has set none."""
MAX_INTERVAL = 1000
"""Steps between snapshots at most, however much one costs."""
REMEMBERED = 32
"""Steps that are looked back upon."""
ENOUGH = 3
"""Fewer steps of a kind say nothing."""
BACK_AT = 0.5
"""Share of the budget below which an overlapped copy becomes a blocking one again."""
FIRST_AGREEMENT = 10
"""Steps after which ranks first agree on an interval; then after ten times as many, and so on."""

Mode = Literal["auto", "blocking", "overlapped"]


class Sample(NamedTuple):
    """One step: its whole duration, what of it was waiting for snapshots, and whether one was taken."""

    seconds: float
    waited_s: float
    snapshot: bool


def step_s(samples: Iterable[Sample]) -> float:
    """A step's duration without what it waited for snapshots; 0 where none is known."""
    own = [sample.seconds - sample.waited_s for sample in samples]
    return max(0.0, median(own)) if own else 0.0


def cost_s(samples: Iterable[Sample]) -> float:
    """What one snapshot costs a step."""
    samples = list(samples)
    with_one = [sample for sample in samples if sample.snapshot]
    without = [sample for sample in samples if not sample.snapshot]
    if not with_one:
        return 0.0
    waited = median(sample.waited_s for sample in with_one)
    if len(without) < ENOUGH or len(with_one) < ENOUGH:
        return max(0.0, waited)
    waited -= median(sample.waited_s for sample in without)
    return max(0.0, waited) + max(0.0, step_s(with_one) - step_s(without))


def interval(cost: float, step: float, share: float) -> int:
    """The fewest steps between snapshots with which they take at most ``share`` of the time."""
    if cost <= 0 or step <= 0 or share <= 0:
        return 1
    exact = cost / (share * step)
    return MAX_INTERVAL if exact >= MAX_INTERVAL else max(1, math.ceil(exact))


def overlap(copy_s: float, step: float, share: float, *, now: bool) -> bool:
    """Whether the copy goes on beside the next step: when a blocking one costs more than the share allows.

    Args:
        copy_s: what a blocking copy takes.
        now: what holds at present; a small change does not turn it over.
    """
    allowed = (share or DEFAULT_SHARE) * step
    return copy_s > (allowed * BACK_AT if now else allowed)


def agree_after(steps: int) -> bool:
    """Whether ranks agree anew this many steps after a start: 10, 100, 1000 and so on."""
    while steps > FIRST_AGREEMENT and steps % 10 == 0:
        steps //= 10
    return steps == FIRST_AGREEMENT


class Pace:
    """What a rank remembers of its steps, and what it makes of that.

    Args:
        share: the user's budget; 0 leaves the interval alone.
        mode: ``auto`` decides by the measured cost.
    """

    def __init__(self, share: float = 0.0, mode: Mode = "auto") -> None:
        self.share = share
        self.overlapped = mode == "overlapped"
        self._mode = mode
        self._samples: deque[Sample] = deque(maxlen=REMEMBERED)
        self._copies: deque[float] = deque(maxlen=REMEMBERED)
        self._last: tuple[float, float] | None = None

    def restart(self) -> None:
        """What lies between two steps now is no step: a recovery, or the start."""
        self._samples.clear()
        self._last = None

    def step(self, now_s: float, waited_total_s: float, *, snapshot: bool) -> None:
        """A step ends.

        Args:
            waited_total_s: all that this process has waited for snapshots so far.
            snapshot: whether the step began right after, or together with, a snapshot.
        """
        if self._last is not None:
            before, waited = self._last
            self._samples.append(Sample(now_s - before, waited_total_s - waited, snapshot))
        self._last = now_s, waited_total_s
        if self._mode == "auto" and self._copies and len(self._samples) >= ENOUGH:
            self.overlapped = overlap(self.copy_s, self.step_s, self.share, now=self.overlapped)

    def copied(self, seconds: float) -> None:
        """A blocking copy of everything that could have been copied later took this long."""
        self._copies.append(seconds)

    @property
    def copy_s(self) -> float:
        """What a blocking copy takes; 0 where none is known."""
        return median(self._copies) if self._copies else 0.0

    @property
    def step_s(self) -> float:
        return step_s(self._samples)

    @property
    def cost_s(self) -> float:
        return cost_s(self._samples)

    def wanted(self) -> int:
        """The interval that this rank's own measurements ask for."""
        return interval(self.cost_s, self.step_s, self.share)
