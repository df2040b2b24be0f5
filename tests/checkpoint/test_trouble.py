"""Trouble: one line when it begins, one when it is over, and pauses that grow to a limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.exceptions import TierAway, TierDenied, TierFull
from keepstep.checkpoint.trouble import FREE_TRIES, PAUSE_FIRST_S, PAUSE_LAST_S, Trouble

FULL, AWAY = TierFull("/disk/x: No space left"), TierAway("/disk/x: no answer")


def test_a_trouble_tells_where_what_is_lost_and_what_there_is() -> None:
    """The first sentence has what an operator needs at night; the last one says what is missing for good."""
    trouble = Trouble("remote tier /disk")
    assert trouble.works(100, 0.0) is None
    said = trouble.begins(FULL, 10.0, step=200, who="the parts of 2 of 8 ranks on this node")
    assert said == (
        "remote tier /disk: step 200 is left out (the parts of 2 of 8 ranks on this node): /disk/x: No space left; "
        "its newest complete step is 100, what is complete stays; training goes on, tries go on"
    )
    assert trouble.begins(FULL, 20.0, step=300) is None
    assert "no answer" in (trouble.begins(AWAY, 30.0) or "")
    assert trouble.works(400, 130.0) == (
        "remote tier /disk works again, step 400 is there, after 120 s; 2 generations from step 200 to 300 are missing"
    )
    assert "newest complete step is 400" in (trouble.begins(FULL, 200.0, step=500) or "")
    assert (trouble.works(600, 201.0) or "").endswith("step 500 is missing")


def test_nothing_known_is_said_as_such() -> None:
    """A place that has never worked has nothing to go back to."""
    assert "nothing complete is known there" in (Trouble("t").begins(TierDenied("no"), 0.0) or "")


@given(
    st.lists(st.sampled_from(["full", "away", "holds", "works"]), max_size=30),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=30, max_size=30),
)
def test_every_history_has_few_lines_and_bounded_pauses(events: list[str], luck: list[float]) -> None:
    """Between two sentences of an end there is one per kind of error; a pause never exceeds its limit."""
    draws = iter(luck)
    trouble, now, kinds, row = Trouble("t", draw=lambda: next(draws)), 0.0, set[str](), 0
    for step, event in enumerate(events):
        now += 1.0
        if event in ("full", "away"):
            said = trouble.begins(FULL if event == "full" else AWAY, now, step=step)
            trouble.failed(now)
            row += 1
            assert (said is None) == (event in kinds)
            kinds.add(event)
            longest = min(PAUSE_LAST_S, PAUSE_FIRST_S * 2.0 ** max(0, row - FREE_TRIES - 1))
            assert row > FREE_TRIES or trouble.pause_s(now) == 0
            assert row <= FREE_TRIES or longest / 2 <= trouble.pause_s(now) <= longest
        elif event == "holds":
            trouble.holds()
            row = 0
            assert trouble.on == bool(kinds)
        else:
            assert (trouble.works(step, now) is not None) == bool(kinds)
            kinds.clear()
            row = 0
        assert row or trouble.pause_s(now) == 0


def test_pauses_differ_between_nodes_and_end_with_the_job() -> None:
    """A thousand nodes do not come back at one instant; what is left at the end is tried at once."""
    low, high = Trouble("t", draw=lambda: 0.0), Trouble("t", draw=lambda: 0.999)
    for one in (low, high):
        for _ in range(20):
            one.failed(0.0)
    assert low.pause_s(0.0) == PAUSE_LAST_S / 2
    assert high.pause_s(0.0) > 0.99 * PAUSE_LAST_S
    high.hurry()
    assert high.pause_s(0.0) == 0
