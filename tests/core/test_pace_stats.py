"""Statistics of the pace: no false alarm on noise, and no slow rank missed. Seeds are fixed, and named in failures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.detect.pace_stats import slow_ranks, slowdown
from keepstep.core.detect.slow_causes import Where, Window, judge
from keepstep.model.ids import NodeId, Rank
from keepstep.model.pace import RankPace
from keepstep.model.topology import Layout

SHARE = 0.07
WINDOWS = 5
Noise = Callable[[random.Random], float]
Measured = tuple[list[dict[Rank, float]], list[float]]


def lognormal(sigma: float) -> Noise:
    return lambda rng: rng.lognormvariate(0.0, sigma)


def heavy(scale: float) -> Noise:
    """Pareto with infinite variance: most steps take 1, a few take ten times that."""
    return lambda rng: 1.0 + scale * (rng.paretovariate(2.0) - 1.0)


def measured(ranks: int, noise: Noise, seed: int, *, steps: int = 30, slow: dict[int, float] | None = None) -> Measured:
    """Own times and steps of a synchronous job: a step ends with its slowest rank, and communication takes a tenth."""
    rng, factors = random.Random(seed), slow or {}
    windows, lengths = [], []
    for _ in range(WINDOWS):
        sums, length = [0.0] * ranks, 0.0
        for _ in range(steps):
            draws = [noise(rng) * factors.get(rank, 1.0) for rank in range(ranks)]
            sums = [a + b for a, b in zip(sums, draws, strict=True)]
            length += max(draws) + 0.1
        windows.append({Rank(rank): total / steps for rank, total in enumerate(sums)})
        lengths.append(length / steps)
    return windows, lengths


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("noise", [lognormal(0.02), lognormal(0.3), heavy(0.3), heavy(1.0)])
def test_noise_is_no_straggler(ranks: int, noise: Noise) -> None:
    """Equal ranks, however noisy: none of hundreds of judgements of five windows blames anybody."""
    trials = max(20, 3000 // (ranks * 30))
    alarms = [seed for seed in range(trials) if slow_ranks(*measured(ranks, noise, seed), SHARE)]
    assert alarms == [], f"seeds {alarms}"


def test_the_rate_of_false_alarms_where_windows_hold_a_single_step() -> None:
    """The worst there is: one step per window with jitter of 30 %. At most 1 judgement in 500 is wrong."""
    alarms = [
        (ranks, seed)
        for ranks in (2, 4, 8)
        for seed in range(1000)
        if slow_ranks(*measured(ranks, lognormal(0.3), seed, steps=1), SHARE)
    ]
    assert len(alarms) <= 6, f"(ranks, seed) {alarms}"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("factor", [1.10, 1.15, 1.2, 1.3, 3.0])
def test_a_slow_rank_is_found_and_nobody_else(ranks: int, factor: float) -> None:
    """From ten percent on, with two percent of jitter."""
    for seed in range(10):
        found = slow_ranks(*measured(ranks, lognormal(0.02), seed, slow={1: factor}), SHARE)
        assert [one.rank for one in found] == [1], f"seed {seed}"
        assert found[0].times == pytest.approx(factor, abs=0.02), f"seed {seed}"


@given(st.integers(2, 40), st.floats(0.001, 100.0), st.floats(1.0, 50.0), st.integers(1, 8), st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None)
def test_evenly_slow_ranks_are_no_stragglers(ranks: int, own: float, slower: float, windows: int, jump: float) -> None:
    """Whatever happens to all of them alike, from one window to the next, blames nobody."""
    every = [{Rank(rank): own * slower * (1 + jump * window) for rank in range(ranks)} for window in range(windows)]
    assert slow_ranks(every, [next(iter(window.values())) for window in every], SHARE) == []


def test_one_good_window_is_enough_to_be_left_alone() -> None:
    """Slow in four windows of five is not slow window after window."""
    windows, lengths = measured(8, lognormal(0.01), 3, slow={1: 1.5})
    windows[2][Rank(1)] = windows[2][Rank(0)]
    assert slow_ranks(windows, lengths, SHARE) == []


def test_a_burst_in_one_window_does_not_stand_for_all() -> None:
    """Hardly slow four times and ten times as slow once: that is luck, or a single pause, and no slow machine."""
    windows, lengths = measured(8, lognormal(0.001), 3, slow={1: 1.1})
    windows[4][Rank(1)] = 11.0
    assert slow_ranks(windows, lengths, SHARE) == []


def test_ranks_that_come_and_go_are_not_judged() -> None:
    """Nor is anybody where there is nobody to compare with."""
    windows, lengths = measured(4, lognormal(0.01), 3, slow={1: 1.5})
    del windows[0][Rank(1)]
    assert slow_ranks(windows, lengths, SHARE) == []
    alone = [{Rank(0): 9.0}] * 5
    assert slow_ranks(alone, [9.0] * 5, SHARE) == []
    assert slow_ranks([], [], SHARE) == []


def test_ten_thousand_ranks_are_judged_in_a_moment() -> None:
    """1,200 nodes of 8 ranks, with a rank in a hundred that is slow for three different reasons."""
    rng = random.Random(5)
    nodes = {Rank(rank): NodeId(f"n{rank // 8}") for rank in range(9_600)}

    def pace(rank: int) -> RankPace:
        slow = rank % 100 == 0
        own = rng.gauss(0.4, 0.004) * (1.3 if slow else 1.0)
        data = 0.11 if slow and rank % 300 == 0 else 0.001
        return RankPace(rank=Rank(rank), first=0, last=9, step_s=0.6, wait_s=0.6 - own, data_s=data, size=64)

    windows = [
        Window(number=n, seconds=30.0, ranks={r: pace(r) for r in nodes}, machines={}, step_s=0.6) for n in range(5)
    ]
    began = time.perf_counter()
    found = judge(windows, Where(nodes=nodes, hosts={}, layout=Layout()), SHARE)
    took_s = time.perf_counter() - began
    assert {one.cause for one in found} == {"data", "device"}
    assert sum(len(one.ranks) for one in found) == 96
    assert took_s < 10.0, f"{took_s:.1f} s"


def test_what_the_job_would_win() -> None:
    """A step lasts as long as its slowest rank: without it, the next slowest would count."""
    assert slowdown([0.2] * 3, [1.4] * 3) == pytest.approx(1.4 / 1.2)
    assert slowdown([-0.3] * 3, [1.4] * 3) == 1.0
    assert slowdown([9.0], [1.0]) == pytest.approx(20.0), "never more than all of it"
    assert slowdown([], []) == 1.0
