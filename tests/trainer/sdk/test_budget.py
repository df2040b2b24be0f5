"""Budget: the interval is the smallest that keeps to the user's share, whatever the measurements."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.trainer.budget import (
    BACK_AT,
    DEFAULT_SHARE,
    ENOUGH,
    MAX_INTERVAL,
    Pace,
    Sample,
    agree_after,
    cost_s,
    interval,
    overlap,
    step_s,
)

times = st.floats(1e-6, 1e3)
shares = st.floats(1e-4, 1.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cost=times, step=times, share=shares)
def test_the_interval_keeps_to_the_share_and_is_the_smallest_that_does(cost: float, step: float, share: float) -> None:
    """Snapshots every n steps take at most the share of the steps' time; every n - 1 steps they would take more."""
    n = interval(cost, step, share)
    assert 1 <= n <= MAX_INTERVAL
    if n < MAX_INTERVAL:
        assert cost / n <= share * step * (1 + 1e-9)
    if n > 1:
        assert cost / (n - 1) > share * step * (1 - 1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cost=times, step=times, share=shares, more=st.floats(1.0, 100.0))
def test_a_dearer_snapshot_never_comes_more_often(cost: float, step: float, share: float, more: float) -> None:
    """Monotone in cost, step and share: the slowest rank's interval suits all of them."""
    assert interval(cost * more, step, share) >= interval(cost, step, share)
    assert interval(cost, step * more, share) <= interval(cost, step, share)
    assert interval(cost, step, min(1.0, share * more)) <= interval(cost, step, share)


def test_without_measurements_every_step_is_taken() -> None:
    """Nothing known, nothing waited, or no budget: every step."""
    assert interval(0.0, 1.0, 0.01) == interval(1.0, 0.0, 0.01) == interval(1.0, 1.0, 0.0) == 1
    assert Pace(0.01).wanted() == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    step=st.floats(0.01, 10.0),
    wait=st.floats(0.0, 1.0),
    slower=st.floats(0.0, 1.0),
    idle=st.integers(0, 8),
    busy=st.integers(1, 8),
)
def test_the_cost_is_the_wait_and_the_slow_down(step: float, wait: float, slower: float, idle: int, busy: int) -> None:
    """With steps of both kinds at hand the time by which steps beside a copy are longer counts; else the wait alone."""
    samples = [Sample(step, 0.0, False)] * idle + [Sample(step + wait + slower, wait, True)] * busy
    expected = wait + slower if idle >= ENOUGH and busy >= ENOUGH else wait
    assert abs(cost_s(samples) - expected) < 1e-9
    assert step - 1e-9 <= step_s(samples) <= step + slower + 1e-9


def test_a_copy_moves_beside_the_step_when_it_costs_too_much_and_comes_back_late() -> None:
    """Blocking while it costs at most the share; the way back only well below it, so that noise turns nothing over."""
    assert not overlap(0.009, 1.0, 0.0, now=False)
    assert overlap(0.011, 1.0, 0.0, now=False)
    assert DEFAULT_SHARE * BACK_AT < 0.009
    assert overlap(0.009, 1.0, 0.0, now=True)
    assert not overlap(0.004, 1.0, 0.0, now=True)
    assert not overlap(0.04, 1.0, 0.05, now=False)


def test_the_pace_follows_what_steps_waited() -> None:
    """Ten steps of a second, each of which waits 50 ms for its snapshot: at one percent that is every fifth step, and
    the copy is moved beside the step."""
    pace, now, waited = Pace(0.01), 0.0, 0.0
    for _ in range(10):
        now, waited = now + 1.05, waited + 0.05
        pace.copied(0.05)
        pace.step(now, waited, snapshot=True)
    assert abs(pace.cost_s - 0.05) < 1e-9
    assert abs(pace.step_s - 1.0) < 1e-9
    assert pace.wanted() == 5
    assert pace.overlapped
    pace.restart()
    pace.step(now + 300.0, waited, snapshot=True)  # a recovery is no step
    assert pace.wanted() == 1
    forced = Pace(0.01, "blocking")
    for step in range(10):
        forced.copied(9.0)
        forced.step(float(step), 0.0, snapshot=True)
    assert not forced.overlapped


def test_ranks_agree_after_ten_a_hundred_a_thousand_steps() -> None:
    """Rarely, and at the same steps on every rank, since it is a collective."""
    assert [steps for steps in range(20001) if agree_after(steps)] == [10, 100, 1000, 10000]
