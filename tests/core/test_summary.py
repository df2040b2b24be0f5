"""The incident as text: the same words for a live controller, an offline log and a test."""

from __future__ import annotations

from keepstep.core.summary import incident_block, incident_timeline, of_incident
from keepstep.core.summary_lines import clock, rejections
from keepstep.model.ids import Nanos
from keepstep.model.records import JobMoved
from tests.core.fleet import running


def test_unknown_incident() -> None:
    """A wrong id is answered with a sentence, not with an exception."""
    assert incident_block([], "lm-i7") == ["there is no incident lm-i7 in these records"]
    assert incident_timeline([], "lm-i7") == ["there is no incident lm-i7 in these records"]


def test_each_incident_has_its_own_piece_of_the_log() -> None:
    """Two incidents after each other do not run into one another; the decision that ends one still belongs to it."""
    fleet = running()
    for rank in (1, 3):
        fleet.kill(rank)
        fleet.pump()
    first, second = of_incident(fleet.log, "lm-i1"), of_incident(fleet.log, "lm-i2")
    assert not {id(record) for record in first} & {id(record) for record in second}
    assert isinstance(first[-1], JobMoved)
    assert "rank 3" in incident_block(fleet.log, "lm-i2")[0]
    assert "rank 1" in incident_timeline(fleet.log, "lm-i1")[0]


def test_the_culprit_is_the_headline_not_the_loudest_survivor() -> None:
    """A survivor that cries first opens the incident; once the dead rank is known, both texts are headed by it."""
    fleet = running()
    fleet.broken(0)
    fleet.pump()
    fleet.kill(2)
    fleet.pump()
    for text in (incident_block(fleet.log, "lm-i1"), incident_timeline(fleet.log, "lm-i1")):
        assert "rank 2" in text[0]
        assert "rank 0" not in text[0]


def test_open_incident_says_so() -> None:
    """While it goes on, the block has no price yet."""
    fleet = running()
    fleet.broken(0)
    fleet.pump()
    block = incident_block(fleet.log, "lm-i1")
    assert block[0].endswith("culprit: not known yet")
    assert any("still going on" in line for line in block)


def test_clock() -> None:
    """Time of the day in UTC, from nanoseconds, without a calendar."""
    assert clock(Nanos(0)) == "00:00:00.000"
    assert clock(Nanos((86_400 + 3_723) * 1_000_000_000 + 45_600_000)) == "01:02:03.045"


def test_rungs_rejected_for_the_same_reason_share_a_line() -> None:
    """What is said once need not be said five times."""
    assert rejections(["a: x", "b: x", "c: y", "alone"]) == ["a, b: x", "c: y", "alone"]
