"""Different operations of one group: the library ends whoever receives them, the positions tell who sent them."""

from __future__ import annotations

import pytest

from keepstep.model.ids import NodeId, Rank, SlotId
from keepstep.model.position import Collective, GroupPosition, RankPosition
from keepstep.model.records import SuspectNamed
from tests.core.fleet import Fleet, running

WORDS = "what(): op.preamble.length <= op.nbytes. 52 vs 4. Is there a distributed collective mismatch in your code?"


def launched(rank: int, elements: int) -> RankPosition:
    one = Collective(sequence=88, op="all_reduce", elements=elements, dtype="float32")
    group = GroupPosition(group="0", members="0-3", launched=88, finished=88, last=one, recent=(one,))
    return RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=(group,))


def suspects(fleet: Fleet) -> list[tuple[str, tuple[Rank, ...]]]:
    return [(record.category, record.ranks) for record in fleet.log if isinstance(record, SuspectNamed)]


def broken(sizes: list[int]) -> Fleet:
    """Rank 1 ends with gloo's words; the ranks have launched reductions of these sizes."""
    fleet = running()
    fleet.positions = {Rank(rank): launched(rank, size) for rank, size in enumerate(sizes)}
    fleet.kill(1, signal=6, stderr_tail=(WORDS,))
    fleet.pump()
    return fleet


def test_the_rank_that_launched_something_else_is_named_and_the_one_that_died_of_it_is_its_victim() -> None:
    fleet = broken([4, 4, 5, 4])
    assert suspects(fleet) == [("user_code", (2,)), ("transient", (1,))]
    incident = next(iter(fleet.job.incidents.values()))
    assert incident.suspects == (2,)
    assert incident.node is None
    assert incident.replaced == (1, 2)
    assert "rank 2 launched all_reduce #88 (5 float32) where 3 other ranks" in incident.reason
    assert incident.state == "RESOLVED"


def test_the_rank_itself_may_be_the_one_that_died() -> None:
    assert suspects(broken([4, 5, 4, 4])) == [("user_code", (1,))]


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], []])
def test_where_the_positions_show_nothing_the_exit_speaks_for_itself(sizes: list[int]) -> None:
    (named,) = suspects(broken(sizes))
    assert named[1] == (1,)


def test_a_node_that_does_not_answer_holds_the_verdict_up_only_so_long() -> None:
    fleet = running()
    fleet.positions = {Rank(rank): launched(rank, 5 if rank == 1 else 4) for rank in range(4)}
    fleet.blind = {NodeId("n1")}
    fleet.kill(1, signal=6, stderr_tail=(WORDS,))
    fleet.pump()
    assert suspects(fleet) == []
    fleet.later(fleet.mind.policy.stacks_s + 0.1)
    assert suspects(fleet) == [("user_code", (0, 1))]
