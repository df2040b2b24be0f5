"""The control thread's decisions, taken without a thread: what an announced epoch means to this process."""

from __future__ import annotations

from pathlib import Path

from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Member, Place, Roster
from keepstep.model.wire import TakeSeat, WorkerCannotResume
from keepstep.trainer.control import Control


def seat(major: int) -> TakeSeat:
    node = NodeId("n0")
    roster = Roster(
        job=JobId("j"),
        epoch=Epoch(major << 16),
        origin="controller",
        mode="in_process",
        world_size=1,
        members=(Member(rank=Rank(0), node=node, slot=SlotId("s"), local_rank=0),),
        places=(Place(node=node, host="127.0.0.1", keeper_port=0, peer_port=0),),
        store_host="127.0.0.1",
        store_port=1,
    )
    return TakeSeat(roster=roster, rank=Rank(0))


def test_an_epoch_announced_before_the_end_is_entered_and_one_after_it_is_answered(tmp_path: Path) -> None:
    """A rank dies while another leaves its loop: the epoch is either entered or refused, never left lying."""
    aborted: list[str] = []
    control = Control(tmp_path / "agent.sock", "s", "test", aborted.append)
    control._hear(seat(1))
    assert control.take(lambda: 0) is not None
    control._hear(seat(2))
    assert not control.complete(), "the loop has to go round once more"
    assert not control.done
    taken = control.take(lambda: len(aborted))
    assert taken is not None
    assert (taken[0].roster.epoch >> 16, taken[1]) == (2, 1)
    assert control.complete()
    control._hear(seat(3))
    assert control.pending is None
    [answer] = control._queue
    assert isinstance(answer, WorkerCannotResume)
    assert (answer.epoch >> 16, len(aborted)) == (3, 2)


def test_a_process_that_waits_for_its_seat_shows_signs_of_life(tmp_path: Path) -> None:
    """Once per turn of the wait, about once a second: the agent takes a standby without any for dead."""
    control = Control(tmp_path / "agent.sock", "s", "test", lambda why: None)
    signs: list[int] = []
    assert not control.wait(0.0, lambda: signs.append(1))
    assert signs
    assert not control.wait(1.2, lambda: signs.append(1))
    assert len(signs) >= 3
