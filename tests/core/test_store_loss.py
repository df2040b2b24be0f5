"""The rendezvous store of an epoch dies: while ranks still need it, and when nobody does."""

from __future__ import annotations

from keepstep.model.ids import NodeId
from keepstep.model.records import EpochOpened
from tests.core.fleet import Fleet, running

N0 = NodeId("n0")


def _recovering() -> Fleet:
    """A rank has died and the epoch that answers it is open, over n0's store; no node has carried it out yet."""
    fleet = running()
    fleet.kill(1)
    assert fleet.deliver(N0)
    assert fleet.job.state == "RECOVERING"
    assert fleet.job.store_node == N0
    return fleet


def _epochs(fleet: Fleet) -> list[EpochOpened]:
    return [record for record in fleet.log if isinstance(record, EpochOpened)]


def test_store_that_dies_while_ranks_join_is_replaced_at_once() -> None:
    """No deadline has to pass: the report itself opens a newer epoch over another store, as a second attempt."""
    fleet = _recovering()
    first = _epochs(fleet)[-1].roster
    began = fleet.now
    fleet.lose_store("n0")
    fleet.deliver(N0)
    second = _epochs(fleet)[-1].roster
    assert second.epoch > first.epoch
    assert (second.store_host, second.store_port) != (first.store_host, first.store_port)
    assert [m.slot for m in second.members] == [m.slot for m in first.members]
    assert [m.newcomer for m in second.members] == [m.newcomer for m in first.members]
    fleet.pump()
    assert fleet.now == began
    incident = list(fleet.job.incidents.values())[-1]
    assert (fleet.job.state, incident.state, incident.attempts) == ("RUNNING", "RESOLVED", 2)
    assert incident.suspects == (1,)
    assert fleet.job.nodes[N0].faults == (began,), "the loss of a store is not held against the node"


def test_store_that_dies_again_and_again_uses_up_the_budget() -> None:
    """Each loss is an attempt: after in_process_budget of them the job takes the next rung instead of going round."""
    fleet = _recovering()
    for _ in range(10):
        node = fleet.job.store_node
        if fleet.job.roster is None or fleet.job.roster.mode != "in_process" or node is None:
            break
        fleet.lose_store(node)
        while fleet.deliver(node):
            pass
    assert fleet.job.roster is not None
    assert fleet.job.roster.mode == "restart"
    assert len(_epochs(fleet)) == 2 + fleet.mind.policy.in_process_budget


def test_without_another_store_the_job_waits_for_one() -> None:
    """Nobody has an unused store at that moment: the next one that is offered opens the epoch."""
    fleet = _recovering()
    fleet.job.stores.clear()
    before = len(_epochs(fleet))
    fleet.lose_store("n0")
    fleet.deliver(N0)
    assert (fleet.job.state, len(_epochs(fleet))) == ("WAITING", before)
    fleet.deliver(N0)
    assert (fleet.job.state, len(_epochs(fleet))) == ("RECOVERING", before + 1)


def test_store_that_nobody_needs_changes_nothing() -> None:
    """While all ranks train, and on a node whose store the epoch does not use, a lost store is only noted."""
    fleet = running()
    epochs = len(_epochs(fleet))
    fleet.lose_store("n0")
    fleet.lose_store("n1")
    fleet.pump()
    assert (fleet.job.state, len(_epochs(fleet))) == ("RUNNING", epochs)
    fleet = _recovering()
    epochs = len(_epochs(fleet))
    fleet.lose_store("n1")
    fleet.pump()
    assert (fleet.job.state, len(_epochs(fleet))) == ("RUNNING", epochs)
