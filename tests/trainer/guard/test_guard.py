"""What the guard concludes from numbers, without torch."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.exceptions import BadSetting
from keepstep.trainer import guard
from keepstep.trainer.guard import Guard, History, Reading, Trouble, Window, Windows, vote

# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"mode": "loud"}, "Guard(mode='loud') is none of off, observe, on"),
        ({"every": 0}, "Guard(every=0) must be a whole number of 1 or more"),
        ({"norms": True}, "Guard(norms=True) must be a whole number of 0 or more"),
        ({"every": 2.5}, "Guard(every=2.5) must be a whole number"),
        ({"every": True}, "Guard(every=True) must be a whole number"),
        ({"window": 8}, "Guard(window=8) must lie between 16 and 10000 steps; 128 suits most runs"),
        ({"window": 100_000}, "must lie between 16 and 10000"),
        ({"spike": 2.0}, "a lower limit cannot hold, ordinary noise would cross it"),
        ({"spike": math.nan}, "must lie between 4 and 1e+06"),
        ({"spike": math.inf}, "never crossed"),
        ({"compare_every": -1}, "0 or more"),
        ({"keep_every": 150}, "Guard(keep_every=150) must be a multiple of compare_every (100)"),
        ({"keep_every": 15, "compare_every": 0}, "must be a multiple of every (16)"),
        ({"keep_every": 0, "mode": "on"}, "keeps nothing to roll back to; give it steps, or choose 'tell' or 'stop'"),
        ({"spikes": "ignore"}, "is none of tell, rollback, stop"),
        ({"max_rollbacks": -1}, "0 or more"),
    ],
)
def test_a_setting_that_cannot_hold_is_refused_with_the_way_out(setting: dict[str, Any], words: str) -> None:
    """Before the run, with the name of the setting and its value; not in the middle of it by a false alarm."""
    with pytest.raises(BadSetting) as refused:
        guard.settle(Guard(**setting), {})
    assert words in str(refused.value)


def test_the_argument_beats_the_variable_and_nothing_is_guarded_unasked() -> None:
    """Off unless asked for; an argument without a mode takes the variable's, and else observes."""
    assert guard.settle(None, {}) is None
    assert guard.settle(None, {"KEEPSTEP_GUARD": "off"}) is None
    found = [
        guard.settle(None, {"KEEPSTEP_GUARD": "on"}),
        guard.settle(Guard(), {}),
        guard.settle(Guard(), {"KEEPSTEP_GUARD": "on"}),
        guard.settle(Guard(mode="observe", keep_every=0), {"KEEPSTEP_GUARD": "on"}),
    ]
    assert [one.mode for one in found if one] == ["on", "observe", "on", "observe"]
    assert guard.settle(Guard(mode="off"), {"KEEPSTEP_GUARD": "on"}) is None
    with pytest.raises(BadSetting, match="KEEPSTEP_GUARD='maybe' is none of off, observe, on; set KEEPSTEP_GUARD=obs"):
        guard.settle(None, {"KEEPSTEP_GUARD": "maybe"})


# -------------------------------------------------------------------- windows


def filled(values: list[float], spike: float = 6.0, floor: float = 0.01) -> Window:
    window = Window(128, spike, floor)
    for step, value in enumerate(values):
        window.judge(step, value)
    return window


def test_noise_of_a_falling_loss_is_no_spike_and_a_jump_is_one() -> None:
    """2,000 steps of a loss that falls and wobbles: no alarm. Then one of twice the size: an alarm."""
    luck = random.Random(4)
    window = Window(128, 6.0, guard.LOSS_FLOOR)
    alarms = [
        step
        for step in range(2000)
        if window.judge(step, 2.0 + 8.0 * math.exp(-step / 300) + luck.gauss(0, 0.08)) is not None
    ]
    assert alarms == []
    assert window.judge(2000, 4.1) is not None


def test_too_little_past_judges_nothing() -> None:
    """Half a window, and 16 steps at least, must be there before anything is called a spike."""
    window = Window(128, 6.0, 0.01)
    assert [step for step in range(80) if window.judge(step, 1.0 if step % 10 else 1e9) is not None] == [70]


def test_a_level_that_stays_is_taken_over() -> None:
    """After half a window of the new level it is the normal one: the guard does not complain for ever."""
    window = filled([1.0] * 128)
    alarms = [step for step in range(128, 400) if window.judge(step, 3.0) is not None]
    assert alarms == list(range(128, 128 + len(alarms)))
    assert 64 <= len(alarms) <= 64 + guard.RECOUNT


def test_what_is_taken_back_is_forgotten() -> None:
    """After a rollback the window knows nothing of the steps that were taken back."""
    window, luck = Window(128, 6.0, 0.01), random.Random(1)
    for step in range(80):
        window.judge(step, luck.random())
    before = window.limit()
    for step in range(80, 90):
        window.judge(step, 100.0)
    assert window.limit() != before
    window.forget_from(80)
    assert window.limit() == before


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.5, 2.0), min_size=64, max_size=128), st.floats(0.01, 1e6))
def test_the_unit_of_a_loss_does_not_matter(values: list[float], unit: float) -> None:
    """A loss in other units spikes at the same steps."""
    plain, other = filled(values).limit(), filled([value * unit for value in values]).limit()
    assert plain is not None
    assert other is not None
    assert math.isclose(plain[1] * unit, other[1], rel_tol=1e-9)


def test_what_is_no_number_comes_first_and_does_not_enter_the_window() -> None:
    """NaN is told as such, with how many ranks have it, and medians stay finite behind it."""
    windows = Windows(Guard(window=16))
    for step in range(16):
        assert windows.judge(Reading(step, 1.0, 2.0)) is None
    bad = windows.judge(Reading(16, 1.0, None, bad_losses=1, bad_norms=4))
    assert bad == Trouble("nonfinite", 16, "not a finite number: loss of 1 rank, gradients of 4 ranks")
    assert windows.judge(Reading(17, 1.0, 2.0)) is None
    spike = windows.judge(Reading(18, 1.0, 40.0))
    assert spike is not None
    assert (spike.kind, spike.why) == ("spike", "gradient norm 40 above 8 (median 2)")
    assert windows.judge(Reading(19, 9.0, 2.0)) is not None


# -------------------------------------------------------------------- vote


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 40), st.data())
def test_a_minority_is_named_exactly(world: int, data: st.DataObject) -> None:
    """Whoever differs from more than half of its replicas is named, and nobody else."""
    odd = data.draw(st.sets(st.integers(0, world - 1), max_size=(world - 1) // 2))
    said = vote([(1, 100 + rank if rank in odd else 7) for rank in range(world)])
    assert set(said.odd) == odd
    assert said.tied == ()
    assert said.agreed == (not odd)
    assert all(one not in odd for one in said.model)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=24))
def test_a_vote_is_never_unjust(rows: list[tuple[int, int]]) -> None:
    """For any rows: a named rank has more replicas against it than with it; a tie names nobody; who has no replica is
    neither."""
    said = vote(rows)
    for rank in said.odd:
        alike = [row for row in rows if row[0] == rows[rank][0]]
        assert 2 * sum(row[1] == rows[rank][1] for row in alike) < len(alike)
        assert rank not in said.tied
    for rank in said.tied:
        assert sum(row[0] == rows[rank][0] for row in rows) > 1
    assert said.agreed == all(one[1] == other[1] for one in rows for other in rows if one[0] == other[0])


def test_two_replicas_that_differ_name_nobody() -> None:
    """One against one: that something is wrong is certain, with whom it is not."""
    assert vote([(1, 5), (1, 6)]) == guard.Vote(2, (), (0, 1))
    assert vote([(1, 5), (2, 6)]) == guard.Vote(0)


# -------------------------------------------------------------------- what to do


def bad(step: int) -> Trouble:
    return Trouble("nonfinite", step, "NaN")


def test_observing_only_tells() -> None:
    """Whatever the actions say."""
    history = History(Guard(mode="observe"))
    assert {history.decide(Trouble(kind, 5, ""), kept=4).action for kind in ("nonfinite", "spike", "replicas")} == {
        "tell"
    }


def test_the_second_time_the_update_is_left_out() -> None:
    """A fault that the same inputs bring back is no passing one; the third goes back to another step's first."""
    history = History(Guard(mode="on", max_rollbacks=3))
    first, second = history.decide(bad(9), kept=8), history.decide(bad(9), kept=8)
    assert (first.action, first.skip, second.action, second.skip) == ("rollback", False, "rollback", True)
    third = history.decide(bad(12), kept=8)
    assert (third.action, third.skip) == ("rollback", False)
    assert history.decide(bad(14), kept=8).action == "stop"


def test_a_rank_that_is_named_twice_stops_the_run() -> None:
    """Once may be a cosmic ray; twice on the same rank is its hardware."""
    history = History(Guard(mode="on", max_rollbacks=9))
    assert history.decide(Trouble("replicas", 9, "", (2,)), kept=8).action == "rollback"
    assert history.decide(Trouble("replicas", 30, "", (1,)), kept=20).action == "rollback"
    stop = history.decide(Trouble("replicas", 50, "", (2,)), kept=40)
    assert (stop.action, stop.why) == ("stop", "rank 2 has been named before: its hardware is suspect")


def test_without_a_state_to_go_back_to_it_stops() -> None:
    """Going on with what is known to be spoilt is no choice of ours."""
    assert History(Guard(mode="on")).decide(bad(0), kept=None).action == "stop"
    assert History(Guard(mode="on", nonfinite="stop")).decide(bad(0), kept=0).action == "stop"
    assert History(Guard(mode="on")).decide(Trouble("spike", 3, ""), kept=2).action == "tell"
