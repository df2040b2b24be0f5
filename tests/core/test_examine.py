"""Nodes that went on suspicion examine themselves, and come back when they pass."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.model.actions import EXAMINATIONS, SelfTest
from keepstep.model.facts import SelfTestDone
from keepstep.model.ids import NodeId
from keepstep.model.records import Noted, Ordered
from keepstep.model.settings import Policy
from tests.core.fleet import Fleet, replay, running


def failing(fleet: Fleet, times: int = 3) -> None:
    """A rank of the last node dies again and again."""
    for _ in range(times):
        fleet.kill(3)
        settle(fleet)


def settle(fleet: Fleet) -> None:
    fleet.pump()
    assert fleet.job.state == "RUNNING", fleet.job.why
    assert replay(fleet.log, fleet.mind.policy).dump() == fleet.mind.dump()


def orders(fleet: Fleet, node: str) -> list[SelfTest]:
    given = [record.action for record in fleet.log if isinstance(record, Ordered)]
    return [action for action in given if isinstance(action, SelfTest) and action.node == node]


def report(fleet: Fleet, order: SelfTest, passed: bool | None, failed: Sequence[str] = ()) -> None:
    fleet.say(
        order.node, SelfTestDone, request=order.request, test=order.test, passed=passed, failed=tuple(failed),
        why="" if passed is not None else "no torch", rounds=7, seconds=60.0,
    )  # fmt: skip
    settle(fleet)


def test_who_passes_is_a_spare_again() -> None:
    """Taken out for three failures, it is ordered to examine itself once, and returns on probation."""
    fleet = running(standby_nodes=1)
    failing(fleet)
    (order,) = orders(fleet, "n1")
    assert order.request >= EXAMINATIONS
    assert fleet.job.nodes[NodeId("n1")].health == "QUARANTINED"
    report(fleet, order, True)
    assert fleet.job.nodes[NodeId("n1")].health == "PROBATION"
    assert [one.state for one in fleet.job.proposals.values()] == ["UNDONE"]
    assert not fleet.job.evicted


def test_who_fails_or_cannot_be_tested_stays_out() -> None:
    for passed, failed, words in ((False, ("core 3: 12 of 4096 wrong",), "core 3"), (None, (), "no torch")):
        fleet = running(standby_nodes=1)
        failing(fleet)
        (order,) = orders(fleet, "n1")
        report(fleet, order, passed, failed)
        assert fleet.job.nodes[NodeId("n1")].health == "QUARANTINED"
        assert any(isinstance(record, Noted) and words in record.text for record in fleet.log)
        assert len(orders(fleet, "n1")) == 1, "the order is given once"


def test_a_test_that_saw_nothing_does_not_clear_twice() -> None:
    """It passed, took ranks again and failed again: now it stays out until a person says otherwise."""
    fleet = running(standby_nodes=1)
    failing(fleet)
    report(fleet, orders(fleet, "n1")[0], True)
    fleet.lose("x0")
    fleet.broken(0)
    fleet.pump()
    fleet.later(1.0)
    settle(fleet)
    assert {str(place.node) for place in fleet.job.roster.places} == {"n0", "n1"} if fleet.job.roster else False
    fleet.connect("x1", standby=True)
    failing(fleet)
    last = list(fleet.job.proposals.values())[-1]
    assert (last.state, last.testable) == ("CARRIED_OUT", False)
    assert not [order for order in orders(fleet, "n1") if order.request == EXAMINATIONS + 2]


def test_policy_may_leave_it_to_people() -> None:
    fleet = running(standby_nodes=1, policy=Policy(examine_s=0.0))
    failing(fleet)
    assert fleet.job.nodes[NodeId("n1")].health == "QUARANTINED"
    assert not orders(fleet, "n1")
