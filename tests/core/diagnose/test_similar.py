"""Past incidents that are like a new one: what counts as like, and in which order they are told."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from keepstep.core.diagnose.similar import SHOWN, Case, Past, common, similar

LOST = Case(cause="gpu_fell_off_bus", code="GPU079", node="n4", gpu="9d")


def past(number: int, **case: str) -> Past:
    return Past(id=f"i{number}", at=float(number), case=Case(**case))


def test_the_same_cause_comes_first_newest_first_and_then_the_same_node() -> None:
    history = [
        past(1, cause="gpu_fell_off_bus", code="GPU079", node="n9"),
        past(2, cause="disk_full", node="n4"),
        past(3, cause="gpu_fell_off_bus", node="n4", gpu="9d"),
        past(4, cause="nvlink_fatal", node="n7"),
    ]
    found = similar(LOST, history)
    assert [match.past.id for match in found] == ["i3", "i1", "i2"]
    assert [match.same for match in found] == [("cause", "node", "gpu"), ("cause", "code"), ("node",)]


def test_a_cause_that_says_little_makes_nothing_alike() -> None:
    """Two exceptions are alike for their place in the code, not for being exceptions."""
    case = Case(cause="python_exception", place="KeyError@train.py:7")
    assert not similar(case, [past(1, cause="python_exception", place="ValueError@data.py:9")])
    assert similar(case, [past(1, cause="python_exception", place="KeyError@train.py:7")])[0].same == ("place",)


CASES = st.builds(
    Case,
    cause=st.sampled_from(["", "a", "b", "python_exception"]),
    code=st.sampled_from(["", "a", "X"]),
    place=st.sampled_from(["", "p", "q"]),
    node=st.sampled_from(["", "n0", "n1"]),
    gpu=st.sampled_from(["", "0"]),
)


@given(CASES, st.lists(st.tuples(st.integers(1, 9), CASES), max_size=20))
def test_every_history(case: Case, history: list[tuple[int, Case]]) -> None:
    """Nothing without anything in common, nothing twice, never more than can be read, newest first within a kind."""
    found = similar(case, [Past(id=f"i{at}", at=float(at), case=one) for at, one in history])
    assert len(found) <= SHOWN
    assert len({match.past.id for match in found}) == len(found)
    assert all(match.same == common(case, match.past.case) != () for match in found)
    for kind in (True, False):
        times = [match.past.at for match in found if (match.same == ("node",)) is kind]
        assert times == sorted(times, reverse=True)
