"""What a deputy decides, without any agent: one seat changes, the epoch is a minor, nothing else moves."""

from __future__ import annotations

import msgspec
import pytest
from agent_rig import JOB, roster_of

from keepstep.agent.deputyplan import again, plan
from keepstep.model.facts import WorkerExited
from keepstep.model.ids import MINOR_BITS, Epoch, Nanos, NodeId, Rank, SlotId
from keepstep.model.topology import Roster
from keepstep.model.wire import PeerFault

ROSTER = roster_of("a", "b", epoch=3, newcomers=(0,), incident="j1-i1")


def fault(roster: Roster, rank: int, offer: str = "s9", **more: object) -> PeerFault:
    seat = roster.seat_of(rank)
    assert seat is not None
    cause = WorkerExited(
        job=JOB, at=Nanos(1), node=seat.node, slot=seat.slot, rank=Rank(rank), epoch=roster.epoch, signal=9
    )
    fields = {"job": JOB, "node": seat.node, "token": "", "epoch": roster.epoch, "cause": cause, "offer": SlotId(offer)}
    return PeerFault(**{**fields, **more})  # type: ignore[arg-type]


def made(roster: Roster, question: PeerFault, *, resumed: bool = True) -> Roster | str:
    return plan(roster, question, deputy=NodeId("a"), store_host="h", store_port=5, resumed=resumed)


def test_one_seat_changes() -> None:
    """The offered slot is the only newcomer; all others keep seat and slot; minor epoch, own origin, own store."""
    new = made(ROSTER, fault(ROSTER, 2))
    assert isinstance(new, Roster)
    assert (new.epoch, new.origin, new.mode) == (ROSTER.epoch + 1, "a", "in_process")
    assert (new.store_host, new.store_port, new.incident) == ("h", 5, None)
    assert [(m.rank, m.node, m.local_rank) for m in new.members] == [
        (m.rank, m.node, m.local_rank) for m in ROSTER.members
    ]
    assert [m.slot for m in new.members] == [m.slot if m.rank != 2 else "s9" for m in ROSTER.members]
    assert [m.rank for m in new.members if m.newcomer] == [2]
    assert new.key != ROSTER.key


def test_unfinished_newcomers_stay_newcomers() -> None:
    """A second fault before the rebuild was over: who had no state then has none now."""
    new = made(ROSTER, fault(ROSTER, 2), resumed=False)
    assert isinstance(new, Roster)
    assert [m.rank for m in new.members if m.newcomer] == [0, 2]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (fault(ROSTER, 2, epoch=Epoch(1 << 16)), "epoch 1"),
        (fault(ROSTER, 2, job="other"), "other"),
        (fault(ROSTER, 2, node=NodeId("a")), "no seat"),
        (fault(ROSTER, 2, offer=str(ROSTER.members[3].slot)), "seat already"),
    ],
)
def test_refusals_say_why(question: PeerFault, words: str) -> None:
    """A fault of another epoch or job, of a slot without seat, an offer that sits elsewhere."""
    answer = made(ROSTER, question)
    assert isinstance(answer, str)
    assert words in answer


def test_minors_end_before_the_next_major() -> None:
    """A deputy can never open the controller's epoch."""
    last = msgspec.structs.replace(ROSTER, epoch=Epoch((3 << MINOR_BITS) + (1 << MINOR_BITS) - 1))
    assert isinstance(made(last, fault(last, 1)), str)


def test_again_is_above_the_rival() -> None:
    """After a rival's minor: the same seats, a newer epoch, another store."""
    new = made(ROSTER, fault(ROSTER, 2))
    assert isinstance(new, Roster)
    more = again(new, Epoch(new.epoch + 4), store_port=6)
    assert (more.epoch, more.store_port, more.members) == (new.epoch + 5, 6, new.members)


def test_deputies_are_asked_by_lowest_rank() -> None:
    """Whatever the order of members in the roster."""
    shuffled = msgspec.structs.replace(ROSTER, members=ROSTER.members[::-1])
    assert shuffled.node_order == ("a", "b")
