"""The restart ladder: the lowest rung that can work, and its budgets."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keepstep.core.decide.ladder import LADDER, Situation, above, choose
from keepstep.model.ids import NodeId, Rank

N0 = NodeId("n0")


def situation(**changes: Any) -> Situation:
    calm: dict[str, Any] = {
        "level": 2, "settled": True, "ending": False, "category": "infrastructure", "floor": "in_process",
        "attempts": 0, "in_process_budget": 3, "vacant": (Rank(1),), "parked": True, "lost": (), "evict": (),
        "kept": "", "spares": 0, "nodes_replaced": 0, "replace_node_budget": 2, "smaller": False, "no_capacity": False,
        "restarts": 0, "max_restarts": 3, "user_faults": 0, "user_retries": 1, "repeated": False,
        "signature": "ValueError@t.py:1", "worker_code": 17, "culprit": "rank 1 was killed",
    }  # fmt: skip
    return Situation(**{**calm, **changes})


@pytest.mark.parametrize(
    ("changes", "rung", "code"),
    [
        ({}, "in_process", 0),
        ({"vacant": ()}, "in_process", 0),
        ({"parked": False}, "same_node", 0),
        ({"floor": "same_node"}, "same_node", 0),
        ({"attempts": 2, "evict": (N0,), "spares": 1}, "replace_node", 0),
        ({"attempts": 3, "kept": "mode observe: said, not done"}, "restart_job", 0),
        ({"evict": (N0,), "spares": 1}, "replace_node", 0),
        ({"kept": "no spare node is connected"}, "in_process", 0),
        ({"attempts": 3, "restarts": 3}, "stop", 93),
        ({"lost": (N0,), "spares": 1}, "replace_node", 0),
        ({"lost": (N0,)}, "replace_node", 0),
        ({"lost": (N0,), "no_capacity": True}, "requeue", 138),
        ({"lost": (N0,), "nodes_replaced": 2, "spares": 1}, "requeue", 138),
        ({"settled": False}, "restart_job", 0),
        ({"ending": True}, "restart_job", 0),
        ({"floor": "restart_job"}, "restart_job", 0),
        ({"level": 0}, "restart_job", 0),
        ({"level": 0, "lost": (N0,), "smaller": True}, "restart_job", 0),
        ({"level": 0, "lost": (N0,), "no_capacity": True}, "requeue", 138),
        ({"level": 0, "restarts": 3, "attempts": 3}, "stop", 93),
        ({"level": 0, "max_restarts": 0}, "stop", 17),
        ({"level": 0, "category": "user_code", "restarts": 3, "attempts": 3, "repeated": True}, "stop", 17),
        ({"level": 0, "category": "user_code", "repeated": True, "user_faults": 2}, "restart_job", 0),
        ({"category": "user_code", "user_faults": 1}, "in_process", 0),
        ({"category": "user_code", "user_faults": 2, "repeated": True}, "stop", 17),
        ({"category": "user_code", "user_faults": 2}, "stop", 17),
        ({"category": "user_code", "user_faults": 1, "user_retries": 0}, "stop", 17),
        ({"category": "user_code", "user_faults": 3, "user_retries": 5}, "in_process", 0),
        ({"category": "user_code", "user_faults": 1, "worker_code": 65}, "stop", 65),
        ({"category": "user_code", "user_faults": 1, "worker_code": 66}, "in_process", 0),
    ],
)
def test_rung(changes: dict[str, Any], rung: str, code: int) -> None:
    """Each row is one sentence of the ladder: what is the case, which rung is taken, and the job's code if it ends."""
    plan = choose(situation(**changes))
    assert (plan.rung, plan.code) == (rung, code)


def test_lost_node_without_a_spare_waits() -> None:
    """The rung is right, but it needs a node first."""
    assert choose(situation(lost=(N0,))).wait
    assert not choose(situation(lost=(N0,), spares=1)).wait
    assert not choose(situation(level=0, lost=(N0,), smaller=True)).wait


def test_every_lower_rung_is_rejected_with_a_reason() -> None:
    """The alternatives that an operator wants to see."""
    plan = choose(situation(level=0, restarts=3, attempts=2))
    assert [line.partition(":")[0] for line in plan.rejected] == list(LADDER[: LADDER.index(plan.rung)])
    assert all(len(line.partition(": ")[2]) > 8 for line in plan.rejected)


BOOL = st.booleans()
COUNT = st.integers(min_value=0, max_value=4)


@given(
    st.fixed_dictionaries(
        {
            "level": st.sampled_from([0, 2]), "settled": BOOL, "ending": BOOL, "parked": BOOL, "smaller": BOOL,
            "no_capacity": BOOL, "repeated": BOOL, "attempts": COUNT, "spares": COUNT, "nodes_replaced": COUNT,
            "restarts": COUNT, "user_faults": COUNT, "user_retries": COUNT,
            "category": st.sampled_from(["infrastructure", "user_code", "transient", "unknown"]),
            "floor": st.sampled_from(LADDER[:4]), "lost": st.sampled_from([(), (N0,)]),
            "kept": st.sampled_from(["", "no spare"]), "vacant": st.sampled_from([(), (Rank(1),)]),
        }
    )
)  # fmt: skip
def test_a_plan_never_goes_beyond_a_budget(changes: dict[str, Any]) -> None:
    """Whatever the situation: no rung below the floor, no rung whose budget is used up, no spare node invented."""
    s = situation(**changes)
    plan = choose(s)
    assert plan.reason
    assert LADDER.index(plan.rung) >= LADDER.index(s.floor)
    match plan.rung:
        case "in_process" | "same_node":
            assert s.attempts < s.in_process_budget
            assert not s.lost
            assert s.settled
        case "replace_node":
            assert s.nodes_replaced < s.replace_node_budget
            assert s.spares or plan.wait
        case "restart_job":
            assert s.restarts < s.max_restarts
        case "requeue":
            assert plan.code == 138
        case "stop":
            assert plan.code in (93, s.worker_code)
    if s.category == "user_code":
        assert plan.rung not in ("replace_node", "requeue") or s.lost, "a node is never blamed for the user's code"


def test_above() -> None:
    """The ladder ends at its top."""
    assert [above(rung) for rung in LADDER] == [*LADDER[1:], "stop"]
