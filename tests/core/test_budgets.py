"""How often a fault of each class is tried again, after which pause, and when it is not the machine."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keepstep.core.deaths import signature, stack_of
from keepstep.core.decide.budgets import CLASSES, Budget, budget, fault_class
from keepstep.core.diagnose.rules import RULES
from keepstep.core.state import Incident
from keepstep.model.facts import WorkerExited
from keepstep.model.ids import Epoch, IncidentId, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.records import Noted, PlanMade
from keepstep.model.settings import Policy
from tests.core.fleet import Fleet, running

STACK = (
    "Fatal Python error: Segmentation fault",
    '  File "model.py", line 88 in forward',
    '  File "t.py", line 4 in <module>',
)
OTHER = ("Fatal Python error: Segmentation fault", '  File "model.py", line 12 in backward')


def incident(root_cause: str) -> Incident:
    return Incident(
        id=IncidentId("j-i1"), number=1, title="t", onset=Nanos(1), opened=Nanos(1), root_cause=f"{root_cause}: words"
    )


def died(**words: Any) -> WorkerExited:
    return WorkerExited(
        job=JobId("j"), at=Nanos(1), node=NodeId("n0"), slot=SlotId("s"), rank=Rank(0), epoch=Epoch(1), **words
    )  # fmt: skip


def test_classes_are_causes_that_the_rules_know() -> None:
    """A cause that no rule names would never be met."""
    assert not set(CLASSES) - {rule.id for rule in RULES}


@pytest.mark.parametrize(
    ("cause", "fault", "name"),
    [
        ("peer_lost", "network", "network_retries"),
        ("object_store_throttle", "storage", "storage_retries"),
        ("cuda_oom", "memory", "memory_retries"),
        ("gpu_fell_off_bus", "process", "in_process_budget"),
        ("", "process", "in_process_budget"),
    ],
)
def test_the_cause_chooses_the_budget(cause: str, fault: str, name: str) -> None:
    """Each class has a setting of its own, and the plan names it."""
    policy = Policy(network_retries=7, storage_retries=9, memory_retries=1, in_process_budget=3)
    assert fault_class(incident(cause)) == fault
    found = budget(incident(cause), policy)
    assert (found.name, found.retries) == (name, getattr(policy, name))


@given(attempts=st.integers(0, 10_000), first=st.floats(0, 100), most=st.floats(0, 100))
def test_pauses_grow_and_end(attempts: int, first: float, most: float) -> None:
    """None before the first attempt, never shorter than the one before, never longer than the longest."""
    one = Budget(fault="network", name="n", retries=3, pause_s=first, pause_max_s=most)
    assert one.pause(0) == 0
    assert 0 <= one.pause(attempts) <= one.pause(attempts + 1) <= most


def break_all(fleet: Fleet) -> None:
    """All communicators break, and every process lives."""
    for rank in range(4):
        fleet.broken(rank)
    fleet.pump()
    fleet.later(2.5)


def test_the_network_is_given_a_moment_and_another_one() -> None:
    """Attempts in process with doubled pauses between them; then, and not before, the processes start anew."""
    fleet = running(policy=Policy(network_retries=3))
    fleet.stuck = {Rank(rank) for rank in range(4)}
    seen = []
    for pause in (0, 1, 2, 0):
        break_all(fleet)
        one = fleet.job.incident
        assert one is not None
        if pause:
            assert fleet.job.state == "WAITING"
            assert f"a pause of {pause} s before attempt {one.attempts + 1}: network fault" in fleet.job.why
            fleet.later(pause - 0.7)
            assert fleet.job.state == "WAITING"
            fleet.later(0.7)
        assert fleet.job.state == "RECOVERING"
        seen.append((one.attempts, fleet.job.incident.rung if fleet.job.incident else None))
    assert [rung for _, rung in seen] == ["in_process"] * 3 + ["restart_job"]
    plan = [record for record in fleet.log if isinstance(record, PlanMade)][-1]
    assert "(network_retries 3)" in plan.rejected[0]


def test_a_node_that_dies_in_a_pause_is_replaced_at_once() -> None:
    """The pause is for the network; what is dead need not wait for it."""
    fleet = running(standby_nodes=1)
    fleet.stuck = {Rank(rank) for rank in range(4)}
    break_all(fleet)
    break_all(fleet)
    assert fleet.job.state == "WAITING"
    fleet.stuck = set()
    fleet.lose("n1")
    fleet.expire("n1")
    fleet.pump()
    assert fleet.job.state == "RUNNING"
    assert not fleet.job.deadlines


def test_what_is_said_at_the_end_tells_where_it_was() -> None:
    """Frames of faulthandler and of tracebacks; nothing of a process that was killed from outside."""
    assert stack_of(died(signal=11, stderr_tail=STACK)) == "signal 11 at model.py:88 < t.py:4"
    assert stack_of(died(code=1, first_error=("boom",))) == ""
    assert stack_of(died(signal=9, stderr_tail=STACK)) == ""
    assert signature(died(signal=9, stderr_tail=STACK)) == "signal 9"
    assert signature(died(code=3)) == "exit code 3"


def test_the_same_stack_at_the_same_step_is_not_the_machine() -> None:
    """Twice in the same place without a new step between: the job stops, no node goes, nobody's spare is used up."""
    fleet = running(standby_nodes=1)
    fleet.stuck = {Rank(0)}
    fleet.kill(1, signal=11, stderr_tail=STACK)
    fleet.pump()
    assert fleet.job.state == "RECOVERING"
    fleet.kill(1, signal=11, stderr_tail=STACK)
    fleet.pump()
    assert fleet.job.state == "FAILED"
    assert "rank 1 ended on node n0 again with the same stack at the same step" in fleet.job.why
    assert not fleet.job.proposals


def test_another_stack_is_another_fault() -> None:
    """Two different places are two faults of the code, each with its retries."""
    fleet = running(user_retries=2, policy=Policy(in_process_budget=3))
    fleet.stuck = {Rank(0)}
    fleet.kill(1, signal=11, stderr_tail=STACK)
    fleet.pump()
    fleet.kill(1, signal=11, stderr_tail=OTHER)
    fleet.pump()
    assert fleet.job.state == "RECOVERING"


def test_a_stack_that_comes_back_on_another_node_clears_the_first_one() -> None:
    """The node had to go for its third fault; the same stack on its successor says that it was innocent."""
    fleet = running(standby_nodes=1)
    for _ in range(2):
        fleet.kill(3)
        fleet.pump()
        fleet.later(1.0)
    fleet.stuck = {Rank(0)}
    fleet.kill(3, signal=6, stderr_tail=STACK)
    fleet.pump()
    fleet.kill(3, signal=9)
    fleet.pump()
    assert fleet.job.roster is not None
    assert {place.node for place in fleet.job.roster.places} == {"n0", "x0"}
    fleet.kill(3, signal=6, stderr_tail=STACK)
    fleet.pump()
    assert fleet.job.state == "FAILED"
    assert "on n1 and then on x0 with the same stack" in fleet.job.why
    notes = [record.text for record in fleet.log if isinstance(record, Noted)]
    assert any("node n1 may be innocent" in text and "`keepstep undo n1`" in text for text in notes)
