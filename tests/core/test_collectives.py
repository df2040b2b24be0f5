"""Who is waited for: random synchronous programs over random groups, with one rank that goes astray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given
from msgspec.structs import replace

from keepstep.core.locate.collectives import Finding, find
from keepstep.model.ids import Rank, SlotId
from keepstep.model.position import Collective, GroupPosition, RankPosition, fold_members

KEPT = 15


@dataclass(frozen=True)
class Call:
    """One operation of a program: in which group, and what."""

    group: int
    op: str = "all_reduce"
    elements: int = 4

    @property
    def kind(self) -> tuple[str, int]:
        return self.op, 0 if self.op == "barrier" else self.elements


@dataclass
class Runner:
    """One rank on its way through its program."""

    calls: list[Call]
    launched: dict[int, list[Call]] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    at: int = 0
    stops_at: int | None = None
    inside: Call | None = None


def run(groups: Sequence[tuple[int, ...]], programs: dict[int, list[Call]], frozen: tuple[int, int] | None = None) -> (
    dict[int, Runner]
):  # fmt: skip
    """Until nobody moves. An operation is over once all members have launched the same one under its number."""
    ranks = {rank: Runner(list(calls)) for rank, calls in programs.items()}
    if frozen:
        ranks[frozen[0]].stops_at = frozen[1]
    moved = True
    while moved:
        moved = False
        for runner in ranks.values():
            if runner.inside is not None:
                group, number = runner.inside.group, len(runner.launched[runner.inside.group])
                mates = [ranks[rank].launched.get(group, []) for rank in groups[group]]
                if all(len(mate) >= number and mate[number - 1].kind == runner.inside.kind for mate in mates):
                    runner.finished[group] = number
                    runner.inside, moved = None, True
            elif runner.at < len(runner.calls) and runner.at != runner.stops_at:
                runner.inside = runner.calls[runner.at]
                runner.launched.setdefault(runner.inside.group, []).append(runner.inside)
                runner.at += 1
                moved = True
    return ranks


def positions(groups: Sequence[tuple[int, ...]], ranks: dict[int, Runner]) -> list[RankPosition]:
    """As agents would report them."""
    told = []
    for rank, runner in ranks.items():
        mine = []
        for number, members in enumerate(groups):
            if rank not in members:
                continue
            calls = runner.launched.get(number, [])
            known = tuple(
                Collective(sequence=index, op=call.op, elements=call.kind[1], dtype="float32")
                for index, call in list(enumerate(calls, 1))[-KEPT:]
            )
            done = runner.finished.get(number, 0)
            mine.append(
                GroupPosition(
                    group=str(number),
                    members=fold_members(members),
                    launched=len(calls),
                    finished=done,
                    last=known[-1] if known else None,
                    recent=known,
                    pending=tuple(one.sequence for one in known if one.sequence > done),
                )
            )
        told.append(RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=tuple(mine)))
    return told


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[Call]]:
    """Groups (the world is the first) and one program that all ranks follow."""
    world = draw(st.integers(2, 8))
    some = st.lists(st.integers(0, world - 1), min_size=2, max_size=world, unique=True).map(lambda g: tuple(sorted(g)))
    groups = [tuple(range(world)), *draw(st.lists(some, max_size=4))]
    calls = st.builds(
        Call,
        group=st.integers(0, len(groups) - 1),
        op=st.sampled_from(["all_reduce", "all_reduce", "broadcast", "barrier"]),
        elements=st.sampled_from([4, 4, 4, 8]),
    )
    return groups, draw(st.lists(calls, min_size=1, max_size=30))


def own(program: Sequence[Call], groups: Sequence[tuple[int, ...]], rank: int) -> list[Call]:
    return [call for call in program if rank in groups[call.group]]


def stuck(ranks: dict[int, Runner]) -> bool:
    return any(runner.inside is not None for runner in ranks.values())


def judge(groups: Sequence[tuple[int, ...]], ranks: dict[int, Runner], **seen: list[Rank]) -> Finding:
    found = find(positions(groups, ranks), **seen)
    assert found is not None
    print(found)
    return found


@given(worlds(), st.data())
def test_a_rank_that_freezes_is_found(world: tuple[list[tuple[int, ...]], list[Call]], data: st.DataObject) -> None:
    """Wherever it stops, through whatever groups the others wait for it: it and nobody else is named, or none."""
    groups, program = world
    programs = {rank: own(program, groups, rank) for rank in groups[0]}
    culprit = data.draw(st.sampled_from(groups[0]), "culprit")
    assume(programs[culprit])
    ranks = run(groups, programs, (culprit, data.draw(st.integers(0, len(programs[culprit]) - 1), "stops before")))
    assume(stuck(ranks))
    found = judge(groups, ranks)
    assert found.kind == "missing"
    assert found.ranks == (culprit,)


@given(worlds(), st.data())
def test_a_rank_that_skips_an_operation_is_named_or_nobody(
    world: tuple[list[tuple[int, ...]], list[Call]], data: st.DataObject
) -> None:
    """Its later operations pair with the wrong ones of the others, or the others wait for it at the end."""
    groups, program = world
    programs = {rank: own(program, groups, rank) for rank in groups[0]}
    culprit = data.draw(st.sampled_from(groups[0]), "culprit")
    assume(programs[culprit])
    del programs[culprit][data.draw(st.integers(0, len(programs[culprit]) - 1), "skips")]
    ranks = run(groups, programs)
    assume(stuck(ranks))
    found = judge(groups, ranks)
    assert set(found.ranks) <= {culprit}
    assert culprit in (*found.ranks, *found.suspects)


@given(worlds(), st.data())
def test_a_rank_with_another_operation_or_size_is_named_or_nobody(
    world: tuple[list[tuple[int, ...]], list[Call]], data: st.DataObject
) -> None:
    groups, program = world
    programs = {rank: own(program, groups, rank) for rank in groups[0]}
    culprit = data.draw(st.sampled_from(groups[0]), "culprit")
    assume(programs[culprit])
    index = data.draw(st.integers(0, len(programs[culprit]) - 1), "differs")
    before = programs[culprit][index]
    programs[culprit][index] = Call(group=before.group, op="all_reduce", elements=before.elements + 1)
    ranks = run(groups, programs)
    assume(stuck(ranks))
    found = judge(groups, ranks)
    assert set(found.ranks) <= {culprit}
    assert culprit in (*found.ranks, *found.suspects)
    if len(groups[before.group]) == 2:
        assert found.ranks == ()


@given(worlds(), st.data())
def test_a_rank_that_was_stopped_inside_of_an_operation_is_found(
    world: tuple[list[tuple[int, ...]], list[Call]], data: st.DataObject
) -> None:
    """Everybody has launched it, nobody finishes: the process state alone tells who holds it up."""
    groups, program = world
    programs = {rank: own(program, groups, rank) for rank in groups[0]}
    culprit = data.draw(st.sampled_from(groups[0]), "culprit")
    assume(any(call.group == 0 for call in programs[culprit]))
    index = next(n for n, call in enumerate(programs[culprit]) if call.group == 0)
    ranks = run(groups, programs, (culprit, index))
    stuck_one = ranks[culprit]
    stuck_one.inside = stuck_one.calls[index]
    stuck_one.launched.setdefault(0, []).append(stuck_one.inside)
    found = judge(groups, ranks, halted=[Rank(culprit)])
    assert found.ranks == (culprit,)


GROUPS = [(0, 1, 2, 3), (0, 1), (2, 3)]
WORLD, LEFT, RIGHT = Call(0), Call(1), Call(2)


def programs(**more: list[Call]) -> dict[int, list[Call]]:
    base = {0: [WORLD, LEFT, WORLD], 1: [WORLD, LEFT, WORLD], 2: [WORLD, RIGHT, WORLD], 3: [WORLD, RIGHT, WORLD]}
    return base | {int(name[1:]): calls for name, calls in more.items()}


def test_the_wait_is_followed_through_another_group() -> None:
    """Rank 3 is gone from its group; 2 waits for it there, and 0 and 1 wait for both in the world."""
    ranks = run(GROUPS, programs(), (3, 1))
    found = judge(GROUPS, ranks)
    assert found.ranks == (3,)
    assert found.probability >= 0.9
    assert found.reason.startswith("has not launched")
    assert "rank 3: 1 done in group 0" in found.evidence[0]


def test_orders_that_differ_are_the_code_and_nobody_alone() -> None:
    """0 goes to the world first, 1 to their own group first: each waits for the other for ever."""
    found = judge(GROUPS, run(GROUPS, programs(r0=[WORLD, WORLD, LEFT])))
    assert (found.kind, found.ranks, found.suspects) == ("order", (), (0, 1))


def test_the_one_through_whom_all_circles_lead_went_astray() -> None:
    """0 skips the world's operation and is alone in the next one of its half; three wait for it and it for them."""
    groups = [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7)]
    program = [Call(0), Call(1), Call(2), Call(0)]
    calls = {rank: own(program, groups, rank) for rank in groups[0]}
    del calls[0][0]
    found = judge(groups, run(groups, calls))
    assert (found.kind, found.ranks) == ("order", (0,))
    assert found.reason == (
        "went on to all_reduce #1 (4 float32) of group 1 without all_reduce #1 (4 float32) of group 0, "
        "in which 7 ranks wait"
    )


def test_all_inside_of_the_same_one_blames_nobody() -> None:
    ranks = run(GROUPS, {rank: [WORLD] for rank in range(4)})
    for runner in ranks.values():
        runner.finished, runner.inside = {}, WORLD
    found = judge(GROUPS, ranks)
    assert (found.kind, found.ranks) == ("inside", ())
    assert "all members of group 0 have launched all_reduce #1 (4 float32)" in found.reason


def test_nobody_in_a_collective_blames_nobody() -> None:
    found = judge(GROUPS, run(GROUPS, {rank: [] for rank in range(4)}))
    assert (found.kind, found.ranks) == ("outside", ())


def test_a_rank_that_was_seen_elsewhere_is_not_waiting_whatever_it_has_in_the_air() -> None:
    """It launched an all-reduce, then began to loop; the stack tells, the counts do not."""
    calls = programs()
    ranks = run(GROUPS, calls, (3, 2))
    ranks[3].finished.pop(2)
    found = judge(GROUPS, ranks, elsewhere=[Rank(3)])
    assert found.ranks == (3,)


def test_most_ranks_outside_are_not_odd() -> None:
    ranks = run(GROUPS, {0: [WORLD], 1: [WORLD], 2: [], 3: []})
    found = judge(GROUPS, ranks)
    assert (found.kind, found.ranks) == ("outside", ())


def told(rank: int, *messages: tuple[str, int], launched: int = 0) -> RankPosition:
    """A rank of a pipeline with messages that are not over."""
    waiting = tuple(
        Collective(sequence=number, op=op, elements=4, dtype="float32", peer=Rank(peer))
        for number, (op, peer) in enumerate(messages, 1)
    )
    group = GroupPosition(group="pp", members="0-3", launched=launched, finished=launched, messages=waiting)
    return RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=(group,))


def test_a_pipeline_waits_for_the_stage_that_does_not_send() -> None:
    """3 waits for 2, 2 for 1, and 1 for nobody."""
    found = find([told(0), told(1), told(2, ("recv", 1)), told(3, ("recv", 2))])
    assert found is not None
    assert found.ranks == (1,)
    assert "has not begun its part of recv #1 from rank 1" in found.reason


def test_messages_that_wait_for_each_other_are_the_code() -> None:
    found = find([told(0), told(1, ("recv", 2)), told(2, ("recv", 1)), told(3)])
    assert found is not None
    assert (found.kind, found.ranks, found.suspects) == ("messages", (), (1, 2))


def test_both_ends_of_a_message_are_there_and_nobody_is_to_blame() -> None:
    found = find([told(0), told(1, ("send", 2)), told(2, ("recv", 1)), told(3)])
    assert found is not None
    assert (found.kind, found.ranks, found.suspects) == ("inside", (), ())


def test_a_message_from_before_a_collective_is_not_what_a_rank_waits_for() -> None:
    """0 has sent to 1 and gone on without waiting; 1 has yet to come to the receive. Both wait for 2 in the world."""
    ranks = run(GROUPS, {rank: [WORLD] for rank in range(4)}, (2, 0))
    at = positions(GROUPS, ranks)
    old = Collective(sequence=1, op="send", elements=4, dtype="float32", peer=Rank(1), age_s=5.0)
    stale = replace(at[0].groups[0], messages=(old,))
    found = find([replace(at[0], groups=(stale, *at[0].groups[1:])), *at[1:]])
    assert found is not None
    assert found.ranks == (2,)
    away = find([replace(at[0], groups=(stale, *at[0].groups[1:])), *at[1:]], elsewhere=[Rank(1)])
    assert away is not None
    assert away.ranks == (2,)


def test_a_rank_that_tells_nothing_is_not_named_for_it() -> None:
    """Its node may not have answered in time; what else is known of it has to speak."""
    groups = [(0, 1, 2)]
    known = positions(groups, run(groups, {0: [WORLD], 1: [WORLD], 2: [WORLD]}, (2, 0)))[:2]
    found = find(known)
    assert found is not None
    assert (found.kind, found.ranks) == ("silent", ())
    assert "rank 2 does not tell" in found.reason


def test_without_positions_there_is_nothing_to_go_by() -> None:
    assert find([]) is None
    assert find([RankPosition(rank=Rank(0), slot=SlotId("s0"), groups=())]) is None


@pytest.mark.parametrize("kind", ["gather", "all_to_all_single"])
def test_sizes_may_differ_where_they_may(kind: Literal["gather", "all_to_all_single"]) -> None:
    calls = {rank: [Call(0, kind, 4 + rank)] for rank in range(4)}
    found = judge(GROUPS, run(GROUPS, calls))
    assert found.kind == "inside"
