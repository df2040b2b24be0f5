"""Rosters: who holds which rank next, and where each newcomer finds its state."""

from __future__ import annotations

from keepstep.model.ids import NodeId, Rank
from keepstep.model.topology import Roster
from tests.core.fleet import Fleet, running

N0, N1 = NodeId("n0"), NodeId("n1")


def roster(fleet: Fleet) -> Roster:
    assert fleet.job.roster is not None
    return fleet.job.roster


def seats(fleet: Fleet) -> list[str]:
    return [f"{m.node}/{m.slot}{'*' if m.newcomer else ''}" for m in roster(fleet).members]


def test_standby_of_the_same_node_takes_the_seat() -> None:
    """Nobody else moves, local ranks stay, and the buddy of its own node is named as the replica's home."""
    fleet = running()
    fleet.kill(1)
    fleet.deliver(N0)
    assert seats(fleet) == ["n0/r0e1", "n0/s0*", "n1/r2e1", "n1/r3e1"]
    assert [m.local_rank for m in roster(fleet).members] == [0, 1, 0, 1]
    assert roster(fleet).members[1].replica_node == "n1"


def test_two_vacancies_one_standby() -> None:
    """Where not all can be warm, the first one is, and the other starts cold in the same epoch."""
    fleet = running()
    fleet.kill(0)
    fleet.kill(1)
    fleet.deliver(N0)
    fleet.deliver(N0)
    assert seats(fleet) == ["n0/s0*", "n0/r1e3*", "n1/r2e1", "n1/r3e1"]


def test_newcomer_that_has_not_resumed_stays_a_newcomer() -> None:
    """A second fault strikes before it was given its state: it still has to get it, from where it is."""
    fleet = running()
    fleet.kill(1)
    fleet.deliver(N0)
    fleet.kill(3)
    fleet.deliver(N1)
    assert seats(fleet) == ["n0/r0e1", "n0/s0*", "n1/r2e1", "n1/s0*"]
    fleet.pump()
    fleet.kill(0)
    fleet.deliver(N0)
    assert [m.newcomer for m in roster(fleet).members] == [True, False, False, False]


def test_replica_home_is_the_buddy_of_the_node_that_was_proven() -> None:
    """The standby node is lost in its turn before it had any state: the replica is still where it was."""
    fleet = running(standby_nodes=2)
    fleet.cut("n1")
    fleet.expire("n1")
    assert [m.replica_node for m in roster(fleet).members] == [None, None, "n0", "n0"]
    first = roster(fleet).members[2].node
    fleet.cut(first)
    fleet.expire(first)
    assert roster(fleet).members[2].node not in ("n1", first)
    assert [m.replica_node for m in roster(fleet).members] == [None, None, "n0", "n0"]
    assert {p.node: p.buddy for p in roster(fleet).places} == {"n0": "x1", "x1": "n0"}


def test_replica_home_that_is_gone_is_not_named() -> None:
    """Rank 1's replica was on n1, and n1 is gone as well: nobody is sent there."""
    fleet = running(standby_nodes=1)
    fleet.cut("n1")
    fleet.expire("n1")
    fleet.kill(1)
    fleet.deliver(N0)
    assert roster(fleet).members[1].newcomer
    assert roster(fleet).members[1].replica_node is None


def test_store_is_a_survivors_and_never_used_twice() -> None:
    """The first surviving node's unused store; a node that waits for its next one is passed over."""
    fleet = running()
    used = [(roster(fleet).store_host, roster(fleet).store_port)]
    for rank in (1, 3, 1):
        fleet.kill(rank)
        fleet.deliver(fleet.job.seat_of(Rank(rank)).node)
        used.append((roster(fleet).store_host, roster(fleet).store_port))
        if rank == 3:
            fleet.pump()
    assert len(set(used)) == len(used)
    assert used[1][0] == "host-n0"
    assert used[2][0] == "host-n1", "n0's next store was not known yet"


def test_smaller_world_without_state() -> None:
    """At level 0 a node is lost and none replaces it: with enough nodes left the job starts anew without it."""
    fleet = running(sdk=False, min_nodes=1)
    fleet.cut("n1")
    fleet.expire("n1")
    fleet.pump()
    assert roster(fleet).mode == "restart"
    assert seats(fleet) == ["n0/r0e2", "n0/r1e2"]
    fleet.later(11.0)
    fleet.connect("n2")
    fleet.pump()
    fleet.kill(0)
    fleet.pump()
    assert roster(fleet).world_size == 4, "the next restart takes the node that came meanwhile"


def test_restart_after_a_move_names_the_replica() -> None:
    """Restarted processes find their state too: a rank that moved learns who holds its replica."""
    fleet = running(standby_nodes=1)
    fleet.cut("n1")
    fleet.expire("n1")
    fleet.slow = {Rank(2)}
    fleet.pump()
    fleet.cannot(0)
    fleet.pump()
    assert roster(fleet).mode == "restart"
    assert [m.replica_node for m in roster(fleet).members] == [None, None, "n0", "n0"]
    assert not any(m.newcomer for m in roster(fleet).members)
