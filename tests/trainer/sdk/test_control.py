"""The control thread's decisions, taken without a thread: what an announced epoch means to this process."""

from __future__ import annotations

import threading
from pathlib import Path

from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.position import GroupPosition
from keepstep.model.topology import Member, Place, Roster
from keepstep.model.wire import ShowPositions, TakeSeat, WorkerCannotResume, WorkerPositions
from keepstep.trainer.control import Control


def seat(major: int, *, boundary_s: float = 0.0) -> TakeSeat:
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
        boundary_s=boundary_s,
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


def training(tmp_path: Path) -> tuple[Control, list[str]]:
    """A process in epoch 1, in the middle of a step."""
    aborted: list[str] = []
    control = Control(tmp_path / "agent.sock", "s", "test", aborted.append)
    control._hear(seat(1))
    assert control.take(lambda: 0) is not None
    aborted.clear()
    return control, aborted


def test_a_planned_seat_waits_for_the_end_of_the_step(tmp_path: Path) -> None:
    """Nothing is aborted and nothing shows before the main thread says that its step is done."""
    control, aborted = training(tmp_path)
    control._hear(seat(2, boundary_s=30.0))
    control._hear(seat(2, boundary_s=30.0))
    assert (control.pending, aborted) == (None, [])
    assert 0 < control._end_patience() <= 5.0
    assert (control.pending, aborted) == (None, [])
    control.boundary()
    assert len(aborted) == 1
    taken = control.take(lambda: 0)
    assert taken is not None
    assert taken[0].roster.epoch >> 16 == 2
    control.boundary()
    assert len(aborted) == 1


def test_a_step_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    """After boundary_s the seat is published as any other, by the control thread."""
    control, aborted = training(tmp_path)
    control._hear(seat(2, boundary_s=1e-9))
    control._end_patience()
    assert control.pending is not None
    assert len(aborted) == 1


def test_a_real_fault_overtakes_a_planned_seat(tmp_path: Path) -> None:
    """An epoch of a fault comes while the boundary is waited for: it counts at once, and the planned one never."""
    control, aborted = training(tmp_path)
    control._hear(seat(2, boundary_s=30.0))
    control._hear(seat(3))
    assert control.pending is not None
    assert (control.pending.roster.epoch >> 16, control.planned, len(aborted)) == (3, None, 1)
    control._hear(seat(2))
    assert control.pending.roster.epoch >> 16 == 3


def test_whoever_waits_or_ends_takes_a_planned_seat_at_once(tmp_path: Path) -> None:
    """A broken step has no end to wait for, nor has a loop that is done; a standby never had a step."""
    control, aborted = training(tmp_path)
    control._hear(seat(2, boundary_s=30.0))
    assert control.wait(5.0)
    assert len(aborted) == 1
    control, aborted = training(tmp_path)
    waiting = threading.Event()
    heard = threading.Thread(target=lambda: (waiting.wait(10), control._hear(seat(2, boundary_s=30.0))))
    heard.start()
    assert control.wait(10.0, waiting.set)
    heard.join()
    assert len(aborted) == 1
    control, _ = training(tmp_path)
    control._hear(seat(2, boundary_s=30.0))
    assert not control.complete(), "the loop has to go round once more"
    standby = Control(tmp_path / "agent.sock", "s", "test", lambda why: None)
    standby._hear(seat(2, boundary_s=30.0))
    assert standby.pending is not None


def test_positions_are_shown_when_they_are_asked_for(tmp_path: Path) -> None:
    """On a thread of its own: what is asked may have to wait for locks of torch's."""
    control = Control(tmp_path / "agent.sock", "s", "test", lambda why: None)
    here = (GroupPosition(group="0", members="0-1", launched=3, finished=2),)
    asked, stuck = threading.Event(), threading.Event()

    def positions() -> tuple[GroupPosition, ...]:
        asked.set()
        assert stuck.wait(30)
        return here

    control.positions = positions
    control._hear(ShowPositions(request=5))
    assert asked.wait(30)
    assert not control._queue
    asking = next(thread for thread in threading.enumerate() if thread.name == "keepstep-positions")
    stuck.set()
    asking.join(30)
    [answer] = control._queue
    assert answer == WorkerPositions(request=5, groups=here)
