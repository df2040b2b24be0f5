"""Looking into processes: once per stall, for a person at any time, and never for longer than was said."""

from __future__ import annotations

from keepstep.core.state import Incident
from keepstep.model.actions import TakeStacks
from keepstep.model.facts import ActionFailed, StacksRequested, StacksTaken
from keepstep.model.ids import NodeId, Rank, SlotId
from keepstep.model.position import Collective, GroupPosition, RankPosition
from keepstep.model.records import Observed, Ordered
from keepstep.model.stacks import Frame
from tests.core.fleet import JOB, Fleet, running

REDUCE = (Frame("all_reduce", "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2806),)


def looks(fleet: Fleet) -> list[TakeStacks]:
    return [r.action for r in fleet.log if isinstance(r, Ordered) and isinstance(r.action, TakeStacks)]


def stall_all(fleet: Fleet) -> None:
    for rank in range(4):
        fleet.stall(rank, started=101, finished=100)


def test_a_stall_is_looked_into_once_however_many_ranks_report() -> None:
    fleet = running()
    fleet.later(12.0)
    stall_all(fleet)
    fleet.pump()
    assert [(look.node, look.ranks) for look in looks(fleet)] == [("n0", (0, 1)), ("n1", (2, 3))]


def test_the_next_stall_is_looked_into_again() -> None:
    """Also in the same epoch: what was seen then says nothing about now."""
    fleet = running()
    for _ in range(2):
        fleet.later(12.0)
        fleet.stall(1)
        fleet.pump()
        fleet.unstall(1)
        fleet.pump()
    assert len(looks(fleet)) == 4
    assert len({look.request for look in looks(fleet)}) == 2


def slow_to_look() -> Fleet:
    """Rank 2 spins outside of what the others wait in, the positions do not show it, and no agent has looked yet."""
    fleet = running()
    fleet.places = {Rank(rank): REDUCE for rank in range(4)} | {Rank(2): (Frame("spin", "train.py", 9),)}
    fleet.blind = {NodeId("n0"), NodeId("n1")}
    fleet.later(12.0)
    stall_all(fleet)
    fleet.pump()
    return fleet


def incident(fleet: Fleet) -> Incident:
    (found,) = fleet.job.incidents.values()
    return found


def test_a_vote_that_names_nobody_waits_for_the_stacks() -> None:
    """The verdict comes with the last node's, and uses them all."""
    fleet = slow_to_look()
    fleet.later(fleet.mind.policy.locate_s + 0.2)
    for name in ("n0", "n1"):
        assert incident(fleet).state == "LOCATING"
        fleet.blind.discard(NodeId(name))
        fleet.agents[NodeId(name)].inbox += [look for look in looks(fleet) if look.node == name]
        fleet.pump()
    assert incident(fleet).suspects == (2,)
    assert incident(fleet).state == "RESOLVED"


def test_stacks_that_never_come_are_not_waited_for_longer_than_was_said() -> None:
    fleet = slow_to_look()
    fleet.later(fleet.mind.policy.stacks_s - 0.1)
    assert incident(fleet).state == "LOCATING"
    fleet.later(0.2)
    assert incident(fleet).suspects == ()
    assert incident(fleet).state == "RESOLVED"


def at(rank: int, launched: int) -> RankPosition:
    """In the world's 101st operation, or done with fewer."""
    last = Collective(sequence=launched, op="all_reduce", elements=4, dtype="float32")
    group = GroupPosition(group="0", members="0-3", launched=launched, finished=min(launched, 100), last=last)
    return RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=(group,))


def test_a_rank_that_came_to_rest_after_the_look_is_looked_at_again() -> None:
    """When the others fell silent rank 3 was still on its way; where it has come to since is what counts."""
    fleet = running()
    fleet.later(12.0)
    for rank in range(3):
        fleet.stall(rank, started=101, finished=100)
    fleet.positions = {Rank(rank): at(rank, 99 if rank == 3 else 101) for rank in range(4)}
    fleet.pump()
    fleet.later(20.0)
    assert len(looks(fleet)) == 2
    assert incident(fleet).state == "LOCATING"
    fleet.positions = {Rank(rank): at(rank, 100 if rank == 1 else 101) for rank in range(4)}
    fleet.stall(3, started=101, finished=100)
    fleet.pump()
    assert len(looks(fleet)) == 4
    assert incident(fleet).suspects == (1,)


def test_a_node_that_cannot_look_is_not_waited_for() -> None:
    """Its refusal is an answer, too."""
    fleet = slow_to_look()
    fleet.later(fleet.mind.policy.locate_s + 0.2)
    for look in looks(fleet):
        fleet.say(look.node, ActionFailed, action=look.id, why="internal error")
    fleet.pump()
    fleet.later(fleet.mind.policy.locate_s)
    assert incident(fleet).state == "RESOLVED"


def test_a_person_may_ask_at_any_time_and_nothing_follows() -> None:
    fleet = running()
    fleet.tell(StacksRequested(job=JOB, at=fleet.now, by="me", ranks=(Rank(3),), number=77))
    fleet.pump()
    assert [(look.node, look.ranks, look.request) for look in looks(fleet)] == [("n1", (3,), 77)]
    taken = [r.fact for r in fleet.log if isinstance(r, Observed) and isinstance(r.fact, StacksTaken)]
    assert [fact.request for fact in taken] == [77]
    assert not fleet.job.incidents
    assert fleet.job.state == "RUNNING"


def test_a_job_that_is_over_has_no_processes_to_look_into() -> None:
    fleet = running()
    fleet.finish()
    fleet.pump()
    fleet.tell(StacksRequested(job=JOB, at=fleet.now, by="me", number=78))
    assert looks(fleet) == []
