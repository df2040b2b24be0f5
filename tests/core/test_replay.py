"""Dual-phase replay: two sets of groups name any one machine that always fails, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.locate.replay import Phase, Plan, UnfitFleet, deal, narrow, plan, read
from keepstep.model.ids import NodeId


def fleet(count: int) -> list[NodeId]:
    return [NodeId(f"n{index}") for index in range(count)]


def failing(phase: Phase, guilty: Sequence[NodeId]) -> list[int]:
    """Groups that fail when these machines break whatever they run in."""
    return [index for index, group in enumerate(phase.groups) if set(guilty) & set(group)]


def named(made: Plan, guilty: NodeId) -> tuple[NodeId, ...]:
    return read(made.phases, [failing(phase, [guilty]) for phase in made.phases]).suspects


@st.composite
def fleets(draw: st.DrawFn) -> tuple[int, int, int]:
    """Machines, wanted group size, machines per replica: every combination that makes two groups."""
    unit = draw(st.integers(1, 12))
    count = draw(st.integers(max(24, 2 * unit), 1200))
    return count, unit * draw(st.integers(1, max(1, count // unit))), unit


@settings(max_examples=70, deadline=None)
@given(fleets())
def test_every_position_is_named_by_two_phases(numbers: tuple[int, int, int]) -> None:
    """Whatever the size, remainder and replica: two machines never share both groups, none sits out twice."""
    count, size, unit = numbers
    machines = fleet(count)
    made = plan(machines, size=size, unit=unit)
    if unit <= count // unit:
        assert made.rounds == 2, "as many groups as machines in a group: two phases do"
    if made.rounds == 2:
        one, two = ({m: i for i, g in enumerate(phase.groups) for m in g} for phase in made.phases)
        pairs = [(one.get(machine), two.get(machine)) for machine in machines]
        assert len(set(pairs)) == count
        assert (None, None) not in pairs
        for guilty in machines[:: max(1, count // 40)]:
            assert named(made, guilty) == (guilty,)


@settings(max_examples=50, deadline=None)
@given(fleets())
def test_phases_are_runnable(numbers: tuple[int, int, int]) -> None:
    """Each group is whole replicas, no machine runs twice in a phase, fewer than a replica sit out."""
    count, size, unit = numbers
    for phase in plan(fleet(count), size=size, unit=unit).phases:
        inside = [machine for group in phase.groups for machine in group]
        assert sorted([*inside, *phase.idle]) == sorted(fleet(count))
        assert all(len(group) % unit == 0 and group for group in phase.groups)
        assert len(phase.groups) >= 2
        assert len(phase.idle) == count % unit


@pytest.mark.parametrize(("count", "size", "unit"), [(24, 4, 1), (25, 4, 1), (24, 8, 1), (26, 4, 4), (97, 9, 3)])
def test_every_single_position(count: int, size: int, unit: int) -> None:
    """Exhaustive where that is cheap: sizes that divide and do not, larger groups than their number, idle ones."""
    made = plan(fleet(count), size=size, unit=unit)
    assert [named(made, guilty) for guilty in fleet(count)] == [(guilty,) for guilty in fleet(count)]


def test_worked_example_of_the_paper() -> None:
    """24 machines in groups of 4: machine 13 breaks H3 = {12..15} and V1 = {1, 7, 13, 19}."""
    made = plan(fleet(24), size=4)
    (third,), (first,) = (failing(phase, [NodeId("n13")]) for phase in made.phases)
    assert made.phases[0].groups[third] == ("n12", "n13", "n14", "n15")
    assert made.phases[1].groups[first] == ("n1", "n7", "n13", "n19")
    assert "no two machines share a group twice" in made.reason


def test_groups_larger_than_their_number_are_kept() -> None:
    """Where ``m > n`` the paper has no solution; a second phase of more and smaller groups is one."""
    made = plan(fleet(24), size=8)
    assert [[len(group) for group in phase.groups] for phase in made.phases] == [[8] * 3, [3] * 8]
    assert made.rounds == 2


def test_too_large_groups_are_made_smaller_and_that_is_said() -> None:
    """12 machines per group of 24 in replicas of 4 leave six groups at most: 12 suspects do not fit, 4 do."""
    made = plan(fleet(24), size=12, unit=4)
    assert made.rounds == 2
    assert len(made.phases[0].groups) == 6
    assert made.rejected[0].startswith("groups of 12: 12 machines of one group")


@pytest.mark.parametrize(("count", "unit"), [(7, 3), (11, 4), (24, 9), (39, 10)])
def test_machine_that_sat_out_is_not_forgotten(count: int, unit: int) -> None:
    """Large replicas leave some machines idle in the only phase that is known: if nothing failed, it is one of them."""
    (phase,) = plan(fleet(count), size=unit, unit=unit).phases
    told = read([phase], [[]])
    assert told.suspects == phase.idle
    assert len(phase.idle) == count % unit


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 40), st.data())
def test_large_replicas_take_the_stated_number_of_rounds(unit: int, data: st.DataObject) -> None:
    """Fewer groups than machines in one: no two phases can do, and narrowing ends within ``rounds``."""
    count = data.draw(st.integers(2 * unit, unit * unit - 1))
    machines = fleet(count)
    made = plan(machines, size=unit, unit=unit)
    guilty = machines[data.draw(st.integers(0, count - 1))]
    phases = list(made.phases)
    told = read(phases, [failing(phase, [guilty]) for phase in phases])
    while len(told.suspects) > 1:
        phases.append(narrow(machines, told.suspects, unit=unit))
        told = read(phases, [failing(phase, [guilty]) for phase in phases])
    assert told.suspects == (guilty,)
    assert len(phases) <= made.rounds


def test_two_faulty_machines_are_not_mistaken_for_one() -> None:
    """Two failing groups in a phase: the four crossings are suspects, and the reading says that it is no answer."""
    made = plan(fleet(24), size=4)
    told = read(made.phases, [failing(phase, [NodeId("n0"), NodeId("n13")]) for phase in made.phases])
    assert told.clash
    assert {"n0", "n13"} <= set(told.suspects)
    assert len(told.suspects) <= 4


def test_outcomes_that_no_constant_fault_gives() -> None:
    """Phase 1 fails, nothing does in phase 2 although everybody runs: it shows sometimes. Nothing at all: nobody."""
    made = plan(fleet(24), size=4)
    assert read(made.phases, [[3], []]).clash
    quiet = read(made.phases, [[], []])
    assert (quiet.suspects, quiet.clash) == ((), False)
    assert "no group failed" in quiet.reason


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 300), st.integers(1, 9), st.data())
def test_deal_keeps_the_first_suspects_apart(count: int, unit: int, data: st.DataObject) -> None:
    """As many suspects as there are groups never meet, and none of them sits out."""
    machines = fleet(count)
    if count < unit:
        with pytest.raises(UnfitFleet, match=f"fewer than one model replica needs \\({unit}\\)"):
            deal(machines, unit=unit)
        return
    suspects = data.draw(st.permutations(machines))[: data.draw(st.integers(0, count))]
    phase = deal(machines, suspects, unit=unit)
    first = suspects[: len(phase.groups)]
    assert all(len(set(group) & set(first)) <= 1 for group in phase.groups)
    assert not set(first) & set(phase.idle)
    assert sorted([*(m for g in phase.groups for m in g), *phase.idle]) == sorted(machines)


def test_cost_is_told() -> None:
    """Every machine runs twice: 24 * 2 * 300 s are four machine-hours, and a wrong verdict costs as much again."""
    made = plan(fleet(24), size=4, run_s=300)
    assert made.machine_hours == pytest.approx(4.0)
    assert "4.0 machine-hours" in made.cost_if_wrong


@pytest.mark.parametrize(
    ("count", "size", "unit", "message"),
    [
        (7, 4, 4, "add 1 machines known to be good"),
        (24, 6, 4, "group size 6 must be a positive multiple of the machines of one replica \\(4\\)"),
        (24, 0, 1, "group size 0"),
    ],
)
def test_refused_with_the_way_out(count: int, size: int, unit: int, message: str) -> None:
    with pytest.raises(UnfitFleet, match=message):
        plan(fleet(count), size=size, unit=unit)


def test_doubled_names_are_refused() -> None:
    with pytest.raises(UnfitFleet, match="1 of 3 machine names appear twice"):
        plan([NodeId("a"), NodeId("b"), NodeId("a")], size=1)
