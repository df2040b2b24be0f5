"""Limits for silence: derived from step times, never below the floor, wide where a phase says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.agent.exceptions import BadConfig
from keepstep.agent.limits import FLOOR_S, SETUP_S, SLOW_PHASE_S, HangDetect, frozen_limit_s, quantile, stall_limit_s
from keepstep.model.beat import Phase

AUTO = HangDetect.parse("auto")
SECOND = 1_000_000_000


@given(steps=st.lists(st.integers(1, 600 * SECOND), max_size=200))
def test_a_pause_of_three_seconds_never_alarms(steps: list[int]) -> None:
    """Whatever the rhythm, and in every phase."""
    for phase in Phase:
        limit = stall_limit_s(phase, steps, AUTO)
        assert limit is None or limit > 3.0


@given(steps=st.lists(st.integers(1, 600 * SECOND), min_size=5, max_size=200))
def test_no_normal_step_reaches_the_limit(steps: list[int]) -> None:
    """At least 95 % of the job's own steps are far below it, by the factor."""
    limit = stall_limit_s(Phase.STEP, steps, AUTO)
    assert limit is not None
    assert limit >= FLOOR_S
    assert sum(s / SECOND * 7.9 <= limit for s in steps) >= 0.95 * len(steps) - 1


def test_one_slow_step_does_not_widen_the_limit() -> None:
    """Robust: 199 steps of 0.1 s and one of 100 s keep the floor."""
    assert stall_limit_s(Phase.STEP, [SECOND // 10] * 199 + [100 * SECOND], AUTO) == FLOOR_S


def test_phases() -> None:
    """Unknown rhythm and set-up are patient; parked, done and recovering ranks are never late."""
    assert stall_limit_s(Phase.STEP, [SECOND] * 4, AUTO) == SETUP_S
    assert stall_limit_s(Phase.STEP, [10 * SECOND] * 5, AUTO) == 80.0
    assert stall_limit_s(Phase.SETUP, [], AUTO) == SETUP_S
    assert {stall_limit_s(p, [], AUTO) for p in (Phase.EVALUATION, Phase.CHECKPOINT, Phase.COMPILE, Phase.OTHER)} == {
        SLOW_PHASE_S
    }
    assert {stall_limit_s(p, [SECOND] * 9, AUTO) for p in (Phase.PARKED, Phase.DONE, Phase.RECOVERING)} == {None}


def test_the_users_word_holds() -> None:
    """A fixed duration is taken as it is within a step; off means off, also for frozen processes."""
    fixed = HangDetect.parse("30s")
    assert stall_limit_s(Phase.STEP, [], fixed) == 30.0
    assert stall_limit_s(Phase.EVALUATION, [], fixed) == SLOW_PHASE_S
    off = HangDetect.parse("off")
    assert all(stall_limit_s(p, [SECOND] * 9, off) is None for p in Phase)
    assert frozen_limit_s("T", Phase.STEP, 1.0, off) is None


def test_frozen_states() -> None:
    """T is judged by frozen_s; D by phase, for storage may be slow; running and sleeping never."""
    assert frozen_limit_s("T", Phase.CHECKPOINT, 1.5, AUTO) == 1.5
    in_step, in_checkpoint = (frozen_limit_s("D", p, 1.0, AUTO) for p in (Phase.STEP, Phase.CHECKPOINT))
    assert in_step is not None
    assert in_checkpoint is not None
    assert 10 < in_step < in_checkpoint
    assert frozen_limit_s("S", Phase.STEP, 1.0, AUTO) is None
    assert frozen_limit_s("R", Phase.STEP, 1.0, AUTO) is None


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("1.5m", 90), ("250ms", 0.25), ("2h", 7200)])
def test_durations(text: str, seconds: float) -> None:
    """All units of the command line."""
    assert HangDetect.parse(text) == HangDetect(mode="fixed", seconds=seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "-3s", "0s", "soon", "1.2.3s"])
def test_unreadable_durations_are_named(text: str) -> None:
    """The message names the value and the ways out."""
    with pytest.raises(BadConfig, match="hang_detect"):
        HangDetect.parse(text)


@given(values=st.lists(st.integers(), min_size=1), q=st.floats(0, 1))
def test_quantile_is_one_of_the_values(values: list[int], q: float) -> None:
    """Nearest rank: never outside what was seen."""
    assert quantile(values, q) in values
