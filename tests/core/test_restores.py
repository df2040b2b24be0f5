"""A restore that moves is no hang, however long it takes; one that stands still is one, and its ranks are named."""

from __future__ import annotations

from keepstep.core.detect import deadlines
from keepstep.model.facts import RestoreMoved
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import EpochOpened, SuspectNamed
from tests.core.fleet import Fleet, running

REBUILD_S = 60.0


def restoring(*ranks: int) -> Fleet:
    """Rank 1 was killed; its successor and all others have yet to resume."""
    fleet = running()
    fleet.checked = False
    fleet.slow = set(ranks)
    fleet.kill(1)
    fleet.pump()
    return fleet


def moved(fleet: Fleet, ranks: tuple[int, ...], count: int, node: str = "n0") -> None:
    at_it = tuple(Rank(rank) for rank in ranks)
    fleet.say(NodeId(node), RestoreMoved, epoch=fleet.job.epoch, ranks=at_it, bytes=count)
    fleet.pump()


def epochs(fleet: Fleet) -> int:
    return sum(isinstance(record, EpochOpened) for record in fleet.log)


def test_half_an_hour_of_bytes_is_no_hang_and_silence_after_it_is() -> None:
    """Bytes that arrive every 10 s keep the epoch for 30 times its limit; a minute without any ends it."""
    fleet = restoring(0, 1, 2, 3)
    before = epochs(fleet)
    for count in range(180):
        fleet.later(10.0)
        moved(fleet, (1,), 1000 * count + 1)
    assert epochs(fleet) == before
    fleet.later(REBUILD_S - 1)
    assert epochs(fleet) == before
    fleet.slow = set()
    fleet.later(0.25 * REBUILD_S + 5)
    assert epochs(fleet) == before + 1
    suspect = next(record for record in reversed(fleet.log) if isinstance(record, SuspectNamed))
    assert suspect.ranks == (Rank(1),)
    assert suspect.reason == "rank 1 has not resumed, and no bytes of any rank's state have arrived for 60 s"


def test_the_one_that_stands_is_named_and_not_those_that_wait_for_it() -> None:
    """Ranks 0 and 3 restore; 3 is through. Nobody has resumed, as all wait for all: rank 0 holds them up."""
    fleet = restoring(0, 1, 2, 3)
    moved(fleet, (0,), 10)
    moved(fleet, (3,), 10, "n1")
    moved(fleet, (), 20, "n1")
    fleet.slow = set()
    fleet.later(1.25 * REBUILD_S + 1)
    suspect = next(record for record in reversed(fleet.log) if isinstance(record, SuspectNamed))
    assert suspect.ranks == (Rank(0),)


def test_many_reports_set_few_deadlines() -> None:
    """A thousand reports within ten seconds are no thousand records of a deadline."""
    fleet = restoring(0, 1, 2, 3)
    before = len(fleet.log)
    for count in range(1000):
        fleet.later(0.01)
        moved(fleet, (1,), count + 1)
    assert len(fleet.log) - before < 1010


def test_words_about_another_epoch_move_nothing() -> None:
    """A late report of a past epoch, or of a job that trains, sets no deadline."""
    fleet = restoring(0, 1, 2, 3)
    due = fleet.job.deadlines[deadlines.REBUILD]
    fleet.later(50.0)
    old = type(fleet.job.epoch)(fleet.job.epoch - 1)
    fleet.say(NodeId("n0"), RestoreMoved, epoch=old, ranks=(Rank(1),), bytes=5)
    fleet.pump()
    assert fleet.job.deadlines[deadlines.REBUILD] == due
    assert not fleet.job.restoring
    fleet = running()
    moved(fleet, (0,), 5)
    assert deadlines.REBUILD not in fleet.job.deadlines
