"""The posterior over machines equals Bayes' rule written out, and says so when nothing fits."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.locate import replay_posterior
from keepstep.core.locate.replay import Phase, deal
from keepstep.core.locate.replay_posterior import (
    Contradiction,
    Evidence,
    Prior,
    begin,
    observe,
    observe_passes,
    posterior,
)
from keepstep.model.ids import NodeId
from tests.core.test_replay import fleet

PRIORS = [
    Prior(rates=((1.0, 0.4), (0.3, 0.6)), false_alarm=0.05),
    Prior(rates=((0.1, 1.0), (0.5, 2.0)), false_alarm=1e-3, faults=(0.0, 0.5, 0.5)),
    Prior(rates=((0.02, 1.0),), false_alarm=1e-6, faults=(0.2, 0.3, 0.3, 0.2)),
]


def written_out(evidence: Evidence, prior: Prior, known: list[NodeId]) -> tuple[list[float], list[float]]:
    """Guilt and number of faults by going through every set: slow, short, and easy to believe."""
    count, most = len(evidence.machines), len(prior.faults) - 1
    proven = {evidence.machines.index(machine) for machine in known}
    guilt, faults = [0.0] * count, [0.0] * (most + 1)
    for size in range(most + 1):
        sets = list(combinations(range(count), size))
        odds = [math.prod(evidence.odds[at] for at in chosen) for chosen in sets]
        for chosen, weight in zip(sets, odds, strict=True):
            if not proven <= set(chosen):
                continue
            for rate, share in prior.rates:
                value = share * prior.faults[size] * weight / sum(odds)
                value *= math.prod((1 - rate) ** evidence.passes[at] for at in chosen)
                for group in evidence.failures:
                    value *= 1 - (1 - rate) ** len(group & set(chosen)) * (1 - prior.false_alarm)
                faults[size] += value
                for at in chosen:
                    guilt[at] += value
    total = sum(faults)
    return [value / total for value in guilt], [value / total for value in faults]


@settings(max_examples=120, deadline=None)
@given(st.integers(4, 10), st.sampled_from(PRIORS), st.booleans(), st.data())
def test_posterior_is_bayes_rule(count: int, prior: Prior, proven: bool, data: st.DataObject) -> None:
    """Sums by classes give what the sum over all sets gives, for any history, also beside a proven machine."""
    machines = fleet(count)
    odds = data.draw(st.lists(st.floats(0.1, 5.0), min_size=count, max_size=count))
    evidence = begin(machines, dict(zip(machines, odds, strict=True)))
    for _ in range(data.draw(st.integers(0, 6))):
        phase = deal(machines, data.draw(st.permutations(machines)), unit=data.draw(st.integers(1, 2)))
        failed = data.draw(st.sets(st.integers(0, len(phase.groups) - 1), max_size=2))
        evidence = observe(evidence, phase, failed)
    known = [machines[1]] if proven else []
    found = posterior(evidence, prior, known)
    guilt, faults = written_out(evidence, prior, known)
    assert found.guilt == pytest.approx(guilt, abs=1e-9)
    assert found.faults == pytest.approx(faults, abs=1e-9)


def test_many_passes_are_one_fold() -> None:
    """A hundred quiet rounds and a failing one folded at once equal a hundred and one folds."""
    machines = fleet(6)
    phase = Phase(groups=(tuple(machines[:2]), tuple(machines[2:4])), idle=tuple(machines[4:]))
    once = observe_passes(begin(machines), phase, 100, [1], void=[0])
    single = begin(machines)
    for _ in range(100):
        single = observe(single, phase, [])
    assert once == observe(single, phase, [1], void=[0])
    assert once.passes == (100, 100, 100, 100, 0, 0)
    assert once.machine_runs == 402


def test_a_group_that_could_not_run_proves_nothing() -> None:
    machines = fleet(4)
    phase = deal(machines, unit=2)
    before = begin(machines)
    after = observe(before, phase, [], void=[0, 1])
    assert posterior(after, PRIORS[2]) == posterior(before, PRIORS[2])


def test_suspicion_of_nil_rules_out() -> None:
    """A machine that a self-test has cleared is a filler: in every failing group, and never guilty."""
    machines = fleet(4)
    evidence = begin(machines, {machines[0]: 0.0})
    for other in machines[1:3]:
        evidence = observe(evidence, Phase(groups=((machines[0], other),)), [0])
    found = posterior(evidence, Prior())
    assert found.guilt[0] == 0
    assert found.guilt[1] == pytest.approx(found.guilt[2])


def test_what_nothing_explains_is_said() -> None:
    """A constant fault passed and no alarm is false: a sentence with the way out, not a division by nil."""
    machines = fleet(4)
    strict = Prior(rates=((1.0, 1.0),), false_alarm=0.0)
    evidence = observe(begin(machines), deal(machines, unit=2), [0])
    evidence = observe(evidence, deal(machines, unit=2), [])
    with pytest.raises(Contradiction, match="nothing explains 1 failing groups in 2 rounds: allow lower hit rates"):
        posterior(evidence, strict)


def test_work_is_bounded_and_the_depth_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many classes of machines fewer faults at once are thought of, never fewer than one."""
    machines = fleet(12)
    evidence = begin(machines)
    for start in range(4):
        evidence = observe(evidence, deal(machines, machines[start:], unit=3), [start])
    assert posterior(evidence, Prior()).depth == 3
    monkeypatch.setattr(replay_posterior, "MOST_TERMS", 1)
    assert posterior(evidence, Prior()).depth == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rates": ()}, "rates \\(\\(\\)\\) must be pairs"),
        ({"rates": ((0.0, 1.0),)}, "a rate in \\(0, 1\\]"),
        ({"false_alarm": 1.0}, "false_alarm \\(1.0\\) must be in \\[0, 1\\)"),
        ({"faults": (1.0, 0.0)}, "probabilities of 0 to 3"),
        ({"faults": (0.2,) * 5}, "3 faulty machines at most"),
    ],
)
def test_senseless_priors_are_refused(words: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prior(**words)  # type: ignore[arg-type]


def test_somebody_must_be_possible() -> None:
    with pytest.raises(ValueError, match="at least one of 2 machines possible"):
        begin(fleet(2), {NodeId("n0"): 0.0, NodeId("n1"): 0.0})
