"""Rate: over any stretch of time no more goes through than the budget allows, and nearly as much."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.rate import BURST_S, MAX_PIECE, MIN_PIECE, Bucket, Pace

RATES = st.integers(1_000, 10_000_000_000)
PIECES = st.lists(st.tuples(st.integers(1, 8 << 20), st.floats(0, 3)), min_size=1, max_size=60)


@given(rate=RATES, pieces=PIECES)
@settings(max_examples=200, deadline=None)
def test_no_window_takes_more_than_its_share(rate: int, pieces: list[tuple[int, float]]) -> None:
    """Between any two sends: at most rate x (time + burst) plus the last piece, whoever was idle before."""
    bucket, now, sent = Bucket(rate, 0.0), 0.0, []
    for size, idle in pieces:
        now += idle
        now += bucket.take(size, now)
        sent.append((now, size))
    for first in range(len(sent)):
        total = 0
        for when, size in sent[first:]:
            allowed = rate * (when - sent[first][0] + BURST_S)
            assert total <= allowed * (1 + 1e-9) + 1, f"{total} bytes went where {allowed:.0f} were allowed"
            total += size


@given(rate=RATES, sizes=st.lists(st.integers(1, 8 << 20), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_a_busy_sender_gets_the_whole_rate(rate: int, sizes: list[int]) -> None:
    """Who always has something to send waits no longer than the bytes before it are worth."""
    bucket, now = Bucket(rate, 0.0), 0.0
    for size in sizes:
        now += bucket.take(size, now)
    assert now <= sum(sizes[:-1]) / rate + 1e-6


def test_no_limit_and_a_changed_limit() -> None:
    """0 lets everything through at once; a new rate holds from the next piece on, without old savings."""
    bucket = Bucket(0, 0.0)
    assert [bucket.take(1 << 30, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.piece == MAX_PIECE
    bucket.set_rate(1000, 5.0)
    assert bucket.take(1000, 5.0) == 0.0
    assert bucket.take(1000, 5.0) == 1.0
    assert bucket.piece == MIN_PIECE
    bucket.set_rate(0, 6.0)
    assert bucket.take(1 << 40, 6.0) == 0.0


def test_a_clock_that_jumps_back_gives_nothing_away() -> None:
    """Time that runs backwards earns no tokens, and does not stop the sender for long after it."""
    bucket = Bucket(1000, 100.0)
    bucket.take(250, 100.0)
    assert bucket.take(1000, 50.0) == 0.0
    assert 0.8 < bucket.take(1, 50.1) <= 1.0


def test_a_waiter_that_is_not_wanted_any_more_leaves_and_takes_nothing() -> None:
    """The next one does not pay for a piece that was never sent."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace = Pace(1000, clock=lambda: now[0], sleep=sleep)
    assert pace.wait(1250)
    assert not pace.wait(100_000, stop=lambda: now[0] > 0.3)
    assert now[0] < 0.6
    assert pace.wait(10)
    assert now[0] < 1.3
