"""The diagnosis is as often right as it means to be, on every log that its rules may know."""

from __future__ import annotations

import pytest
from benchmarks.diagnosis import CATEGORY_ACCURACY, CULPRIT_ACCURACY, Judged, judge, scores
from benchmarks.diagnosis_cases import cases, wrong_eviction


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return judge(cases(), None)


def test_known_logs_are_diagnosed_within_the_bounds(judged: list[Judged]) -> None:
    found = scores(judged)
    assert found["category_accuracy"] >= CATEGORY_ACCURACY
    assert found["culprit_accuracy"] >= CULPRIT_ACCURACY


def test_no_machine_goes_for_what_is_no_machines_fault(judged: list[Judged]) -> None:
    assert [one.case.id for one in judged if wrong_eviction(one.case, one.got)] == []
