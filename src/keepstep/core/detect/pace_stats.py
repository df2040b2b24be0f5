"""Pace in numbers: which ranks take longer for themselves than ranks with the same part, and how sure that is.

Medians and median absolute deviations throughout: a single rank, however slow, moves neither. A rank counts as slow
only when *each* of several windows shows it, beyond a share of the step and beyond the noise of its peers. Noise is
measured twice, between ranks in one window and between windows of one rank, and the larger one counts: four ranks that
happen to agree in one window are no proof of silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import NamedTuple

from keepstep.model.ids import Rank

Times = Mapping[Rank, float]
"""Seconds per step by rank, of one window."""

SIGMA = 1.4826
"""Standard deviation of a normal distribution per median absolute deviation."""
NOISE_FACTOR, SMALL_FACTOR = 3.0, 12.0
"""An excess below ``NOISE_FACTOR + SMALL_FACTOR / ranks`` standard deviations is noise: few ranks tell little about how
noisy they are. Several windows in a row must be above it."""
FEW = 5
"""Below so many ranks one of them is the median itself, and the excess of the others says too little about noise."""
CONSISTENT = 0.5
"""The smallest excess must be at least so much of the mean one: a slow machine is slow all the time, luck is not."""


class Slow(NamedTuple):
    """One rank that every window shows to be slow.

    Attributes:
        times: its own time over its peers' median, both as means over the windows; 1.3 is 30 % longer.
        excess_s: what it takes beyond that median.
        margin: smallest excess of any window over what that window had to show; 1.0 is just enough.
    """

    rank: Rank
    times: float
    excess_s: float
    margin: float


def slow_ranks(windows: Sequence[Times], steps_s: Sequence[float], share: float) -> list[Slow]:
    """Ranks of one group whose time is beyond their peers' in every window.

    Args:
        windows: own times of the group; ranks that one of them lacks are not judged.
        steps_s: duration of a step in each window, for the whole job.
        share: of a step that an excess must reach at least.
    """
    ranks = sorted(set.intersection(*(set(window) for window in windows))) if windows else []
    if len(ranks) < 2:
        return []
    middles = [median_low([window[rank] for rank in ranks]) for window in windows]
    excess = {rank: [window[rank] - middle for window, middle in zip(windows, middles, strict=True)] for rank in ranks}
    sigma = spread(list(excess.values()))
    if len(ranks) < FEW:
        sigma = max(sigma, SIGMA * _unrest([[window[rank] for window in windows] for rank in ranks]))
    noise = (NOISE_FACTOR + SMALL_FACTOR / len(ranks)) * sigma
    found = []
    for rank, values in excess.items():
        margin = min(value / max(share * step, noise, 1e-9) for value, step in zip(values, steps_s, strict=True))
        if margin > 1.0 and min(values) >= CONSISTENT * _mean(values):
            middle, mine = _mean(middles), _mean([window[rank] for window in windows])
            found.append(Slow(rank, mine / max(middle, 1e-9), mine - middle, margin))
    return found


def spread(rows: Sequence[Sequence[float]]) -> float:
    """Standard deviation of honest ranks' excess, robustly.

    Args:
        rows: one per rank, one value per window.
    """
    between = median([median_low([abs(row[column]) for row in rows]) for column in range(len(rows[0]))])
    return SIGMA * max(between, _unrest(rows))


def _unrest(rows: Sequence[Sequence[float]]) -> float:
    """How far a rank's window is from its own median, typically."""
    return median([abs(value - median(row)) for row in rows for value in row])


def slowdown(lost_s: Sequence[float], steps_s: Sequence[float]) -> float:
    """How much longer a step takes than it would without these ranks; 1.0 where they hold up nobody.

    Args:
        lost_s: per window, how much longer the slowest of them takes than the slowest of all others. A synchronous step
            lasts as long as its slowest rank needs, so without them that one would count.
    """
    step, lost = _mean(steps_s), _mean([max(0.0, value) for value in lost_s])
    return step / max(step - lost, step * 0.05) if step > 0 else 1.0


def typical(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
