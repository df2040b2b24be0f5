"""The search by replay: constant faults in two rounds, rare ones as surely and as soon as was stated."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator

import pytest

from keepstep.core.locate.replay import Phase, UnfitFleet
from keepstep.core.locate.replay_forecast import Play, Played, forecast, rehearse, rounds_for
from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Replay, Terms, Verdict, advance, next_step, open_search
from keepstep.model.ids import NodeId
from tests.core.test_replay import fleet

RARE = Prior(rates=((0.02, 1.0),))


def machine_room(guilty: Collection[NodeId], rate: float, rng: random.Random, false_alarm: float = 0.0) -> Play:
    """Machines of which the guilty break their group with this probability in each run."""

    def play(phase: Phase, repeats: int) -> Played:
        homes = [index for index, group in enumerate(phase.groups) for machine in group if machine in guilty]
        alarms = range(len(phase.groups)) if false_alarm else ()
        for clean in range(repeats):
            failed = {index for index in homes if rng.random() < rate}
            failed |= {index for index in alarms if rng.random() < false_alarm}
            if failed:
                return Played(clean=clean, failed=tuple(sorted(failed)))
        return Played(clean=repeats)

    return play


def lucks(count: int, rng: random.Random) -> Iterator[list[float]]:
    while True:
        yield [rng.random() for _ in range(count)]


def within(right: int, of: int, share: float) -> bool:
    """Not below ``share`` by more than three standard deviations of the binomial."""
    return right >= of * share - 3 * math.sqrt(of * share * (1 - share))


@pytest.mark.parametrize(("count", "unit"), [(24, 1), (96, 1), (97, 3), (384, 4)])
def test_constant_fault_takes_two_rounds(count: int, unit: int) -> None:
    """The prior knows rare faults and false alarms, and still two failing rounds are proof; every position, or 48."""
    machines = fleet(count)
    start = open_search(machines, Terms(unit=unit), Prior())
    for guilty in machines[:: max(1, count // 48)]:
        _, verdict = rehearse(start, machine_room([guilty], 1.0, random.Random(1)))
        assert verdict.machines == (guilty,)
        assert verdict.evidence[0].startswith(f"{guilty} was in 2 of 2 failing groups")
        sat_out = guilty in machines[count - count % unit :]
        assert verdict.rounds == (3 if sat_out else 2)


def test_verdicts_at_95_percent_are_right_in_95_percent() -> None:
    """Calibration: 300 searches among 24 machines at a hit rate of 2 %, faults drawn from the prior, seed 7.

    Nobody faulty, one, two or three; false alarms at the stated rate. A verdict is right if each machine that it
    convicts is faulty, or if it says nobody and nobody is. The bound leaves three standard deviations.
    """
    rng = random.Random(7)
    machines = fleet(24)
    prior = Prior(rates=((0.02, 1.0),), false_alarm=1e-3, faults=(0.2, 0.6, 0.15, 0.05))
    start = open_search(machines, Terms(), prior)
    right = open_ = 0
    for _ in range(300):
        guilty = set(rng.sample(machines, rng.choices(range(4), prior.faults)[0]))
        _, verdict = rehearse(start, machine_room(guilty, 0.02, rng, 1e-3), lucks(24, rng))
        open_ += verdict.kind == "open"
        right += set(verdict.machines) <= guilty if verdict.kind == "found" else not guilty
    assert open_ == 0
    assert within(right, 300, 0.95), right


def test_rare_fault_is_found_in_the_stated_rounds() -> None:
    """One machine of 96 at 2 %: at least 95 % of 200 searches name it within the forecast, seed 11."""
    rng = random.Random(11)
    machines = fleet(96)
    stated = forecast(machines, Terms(), RARE, rate=0.02)
    assert (stated.hits, stated.expected_rounds) == (2, pytest.approx(100))
    assert stated.rounds < stated.fixed_rounds == 364
    prior = Prior(rates=RARE.rates, faults=(0.0, 1.0))
    start = open_search(machines, Terms(most_rounds=stated.rounds), prior)
    found = 0
    for _ in range(200):
        guilty = rng.choice(machines)
        _, verdict = rehearse(start, machine_room([guilty], 0.02, rng), lucks(96, rng))
        assert verdict.rounds <= stated.rounds
        found += verdict.kind == "found" and verdict.machines == (guilty,)
    assert within(found, 200, 0.95), found


def test_both_of_two_machines_are_found() -> None:
    """Constant faults: the first conviction does not end it; both, and nobody else, within four rounds, 40 pairs."""
    rng = random.Random(3)
    machines = fleet(96)
    start = open_search(machines, Terms(everyone=True), Prior())
    for _ in range(40):
        guilty = rng.sample(machines, 2)
        _, verdict = rehearse(start, machine_room(guilty, 1.0, rng), lucks(96, rng))
        assert set(verdict.machines) == set(guilty)
        assert verdict.complete >= 0.95
        assert verdict.rounds <= 4


def test_healthy_machines_are_cleared() -> None:
    """No fault at all: the search ends by itself, and convicts nobody."""
    start = open_search(fleet(48), Terms(), Prior(rates=((0.1, 1.0),)))
    _, verdict = rehearse(start, machine_room([], 0.1, random.Random(1)))
    assert (verdict.kind, verdict.machines) == ("nobody", ())
    assert verdict.probability[0] >= 0.95
    assert 20 < verdict.rounds < 60


def test_a_false_alarm_convicts_nobody() -> None:
    """One group fails once in a fleet of healthy machines: the doubt is run down, not acted upon."""
    machines = fleet(48)
    prior = Prior(rates=((0.5, 1.0),), false_alarm=1e-2)
    search = open_search(machines, Terms(), prior)
    first = next_step(search)
    assert isinstance(first, Replay)
    search = advance(search, first.phase, failed=[2])
    _, verdict = rehearse(search, machine_room([], 0.5, random.Random(1)))
    assert verdict.kind == "nobody"


def test_many_failing_groups_are_nobodys_machine() -> None:
    """Half of the groups fail at once: what they share is at fault, and no machine is named."""
    search = open_search(fleet(96), Terms(), Prior())
    step = next_step(search)
    assert isinstance(step, Replay)
    verdict = next_step(advance(search, step.phase, failed=range(5)))
    assert isinstance(verdict, Verdict)
    assert (verdict.kind, verdict.machines) == ("many", ())
    assert "5 of 10 groups failed in one round" in verdict.reason


@pytest.mark.parametrize(
    ("terms", "words"),
    [(Terms(most_rounds=5), "5 rounds are used up"), (Terms(most_machine_hours=10), "goes beyond 10")],
)
def test_budget_ends_a_search_without_a_conviction(terms: Terms, words: str) -> None:
    """Used-up rounds or machine-hours: open, the most suspicious ones named as such, and the budget kept."""
    start = open_search(fleet(48), terms, RARE)
    _, verdict = rehearse(start, machine_room([], 0.02, random.Random(1)))
    assert verdict.kind == "open"
    assert words in verdict.reason
    assert max(verdict.probability) < 0.95
    assert verdict.rounds <= 10
    assert verdict.machine_hours <= 10


def test_suspicion_is_where_the_search_starts() -> None:
    """Machines that are suspected beforehand are apart from each other in the first round."""
    machines = fleet(24)
    hot = dict.fromkeys(machines[:4], 50.0)
    step = next_step(open_search(machines, Terms(), RARE, hot), [0.5] * 24)
    assert isinstance(step, Replay)
    assert all(len(set(group) & set(hot)) <= 1 for group in step.phase.groups)
    assert "by suspicion" in step.reason


def test_convicted_machines_run_no_more() -> None:
    """After the first conviction of a search for everyone, the proven machine is in no group."""
    machines = fleet(24)
    search = open_search(machines, Terms(everyone=True), Prior(faults=(0.1, 0.3, 0.3, 0.3)))
    for _ in range(2):
        step = next_step(search)
        assert isinstance(step, Replay)
        bad = [index for index, group in enumerate(step.phase.groups) if machines[7] in group]
        search = advance(search, step.phase, failed=bad)
    assert [machine for machine, _ in search.known] == [machines[7]]
    step = next_step(search)
    assert isinstance(step, Replay)
    assert machines[7] not in {m for group in (*step.phase.groups, step.phase.idle) for m in group}


def test_decisions_are_repeatable() -> None:
    """The same search and the same luck give the same step: nothing is drawn inside."""
    search = open_search(fleet(48), Terms(), Prior())
    luck = next(lucks(48, random.Random(2)))
    assert next_step(search, luck) == next_step(search, luck)
    assert next_step(search, luck) != next_step(search, next(lucks(48, random.Random(3))))


def test_rounds_for_is_the_negative_binomial() -> None:
    """One hit is the geometric distribution of the paper's arithmetic; two are checked against simulation."""
    assert rounds_for(1, 0.02, 0.95) == 149
    assert rounds_for(1, 0.1, 0.95) == 29
    rng = random.Random(5)
    limit = rounds_for(2, 0.1, 0.9)
    hit = sum(sum(rng.random() < 0.1 for _ in range(limit)) >= 2 for _ in range(4000))
    assert within(hit, 4000, 0.9)
    assert not within(hit, 4000, 0.93)


def test_forecast_of_what_cannot_be_told_apart() -> None:
    """False alarms as frequent as the fault: no number is stated."""
    loud = Prior(rates=((0.02, 1.0),), false_alarm=0.05)
    with pytest.raises(ValueError, match=r"hit rate 0\.02 is not told from false alarms"):
        forecast(fleet(24), Terms(most_rounds=300), loud, rate=0.02)


def test_more_false_alarms_take_more_failing_rounds() -> None:
    quiet, loud = (
        forecast(fleet(384), Terms(), Prior(rates=RARE.rates, false_alarm=alarm), rate=0.02) for alarm in (1e-6, 1e-3)
    )
    assert quiet.hits < loud.hits
    assert quiet.rounds < loud.rounds


def test_senseless_terms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"confidence \(1\.0\) must be above 0.5 and below 1"):
        Terms(confidence=1.0)
    with pytest.raises(ValueError, match=r"most_rounds \(0\) must be 1 to 10000"):
        Terms(most_rounds=0)
    with pytest.raises(ValueError, match=r"run_s \(0\) must be positive"):
        Terms(run_s=0)
    with pytest.raises(UnfitFleet, match="fewer than two groups of 4"):
        open_search(fleet(6), Terms(unit=4), Prior())
