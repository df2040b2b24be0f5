"""The connection between two keepers: one for many versions, and a new one whenever the old one is of no use."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint import keeper_serve, pair
from keepstep.checkpoint.exceptions import PeerRefused, PeerUnreachable
from keepstep.checkpoint.keeper_serve import Desk
from keepstep.checkpoint.keeper_take import Inbox
from keepstep.checkpoint.keeper_wire import Wire
from keepstep.checkpoint.line import WAKE_BYTES
from keepstep.checkpoint.peers import KeeperRequest, Put
from keepstep.checkpoint.scrub import Traffic
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.sums import CHUNK
from keepstep.checkpoint.transfer import send
from keepstep.model.ids import JobId
from tests.checkpoint.fleet import until
from tests.checkpoint.test_slot import fill


class Buddy:
    """The receiving half of a keeper, whose visitors are counted."""

    def __init__(self, home: Path) -> None:
        self.replica, self.visitors = home / "replica", 0
        self.fenced = ""
        inbox = Inbox(self.replica, fence=lambda put: self.fenced, tell=lambda note: None, say=lambda topic, text: None)
        self.desk = Desk(
            (self.replica,), let_in=self._let_in, inbox=inbox, traffic=Traffic(), say=lambda topic, text: None
        )
        self.server = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._welcome, daemon=True)
        self.thread.start()

    @property
    def where(self) -> tuple[str, int]:
        host, port = self.server.getsockname()
        return str(host), int(port)

    def holds(self) -> list[int]:
        return [version.step for version, _ in pair.look(self.replica, 0)]

    def _let_in(self, request: KeeperRequest) -> str:
        return self.fenced

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.desk.accept(_Door(self.server.accept()))  # type: ignore[arg-type]
                self.visitors += 1

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.thread.join(20)
        self.server.close()


class _Door:
    """One visitor, as a listening socket hands it out."""

    def __init__(self, visitor: tuple[socket.socket, object]) -> None:
        self._visitor = visitor

    def accept(self) -> tuple[socket.socket, object]:
        return self._visitor


@pytest.fixture
def buddy(tmp_path: Path) -> Iterator[Buddy]:
    made = Buddy(tmp_path)
    yield made
    made.close()


def bring(wire: Wire, buddy: Buddy, home: Path, step: int, size: int = 1000, rank: int = 0) -> None:
    slot = Slot(home / "own", create=True)
    try:
        fill(slot, Version(step, 1), step, size)
        slot.seal()
        put = Put(job=JobId("j"), token="", epoch=1, key="", rank=rank, version=Version(step, 1), size=slot.used)
        with wire.carry(buddy.where, put, lambda: False) as line:
            send(line, slot, Version(step, 1))
    finally:
        slot.close()


@pytest.mark.parametrize("size", [1000, WAKE_BYTES + 1, CHUNK + 12345])
def test_many_versions_take_one_connection(buddy: Buddy, tmp_path: Path, size: int) -> None:
    """Also after a bulk for which the reader had asked to be woken rarely: the next word is short."""
    with contextlib.closing(Wire()) as wire:
        for step in range(1, 9):
            bring(wire, buddy, tmp_path, step, size)
            assert buddy.holds()[0] == step
    assert buddy.visitors == 1


@pytest.mark.parametrize("idle_s", [0.0, 0.05])
def test_a_connection_that_the_other_end_closed_is_opened_again(
    buddy: Buddy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """A keeper that takes one request per connection, or that has waited long enough: no version is lost by it."""
    monkeypatch.setattr(keeper_serve, "IDLE_S", idle_s)
    with contextlib.closing(Wire()) as wire:
        for step in (1, 2, 3):
            bring(wire, buddy, tmp_path, step)
            assert buddy.holds()[0] == step
            line = wire._line
            assert line is not None
            assert line.idle(20), "the other end did not close"
    assert buddy.visitors == 3


def test_a_connection_that_is_lost_between_the_look_and_the_word_is_opened_again(
    buddy: Buddy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end may close at any instant: also right after it was seen to be there."""
    with contextlib.closing(Wire()) as wire:
        bring(wire, buddy, tmp_path, 1)
        line = wire._line
        assert line is not None
        line.cut()
        monkeypatch.setattr(line, "idle", lambda timeout_s: False)
        bring(wire, buddy, tmp_path, 2)
    assert buddy.holds() == [2, 1]
    assert buddy.visitors == 2


def test_a_kept_connection_lets_nobody_past_the_fence(buddy: Buddy, tmp_path: Path) -> None:
    """Each version is asked about anew; a refusal ends the connection, and the next one begins with a new one."""
    with contextlib.closing(Wire()) as wire:
        bring(wire, buddy, tmp_path, 1)
        buddy.fenced = "epoch 1 is fenced off by 2"
        with pytest.raises(PeerRefused, match="fenced off"):
            bring(wire, buddy, tmp_path, 2)
        buddy.fenced = ""
        bring(wire, buddy, tmp_path, 3)
    assert buddy.holds() == [3, 1]
    assert buddy.visitors == 2


def test_a_transfer_that_broke_off_leaves_no_connection_behind(buddy: Buddy, tmp_path: Path) -> None:
    """Words may be owed on it; the next version must not read them as answers to its own."""
    put = Put(job=JobId("j"), token="", epoch=1, key="", rank=0, version=Version(1, 1), size=10_000)
    with contextlib.closing(Wire()) as wire:
        with pytest.raises(PeerUnreachable, match="on purpose"), wire.carry(buddy.where, put, lambda: False):
            raise PeerUnreachable("on purpose")
        assert wire._line is None
        bring(wire, buddy, tmp_path, 2)
    assert buddy.holds() == [2]
    assert buddy.visitors == 2


def test_places_are_free_again_when_senders_leave(buddy: Buddy, tmp_path: Path) -> None:
    """A kept connection counts among those that a keeper takes, and no longer."""
    wires = [Wire() for _ in range(3)]
    for rank, wire in enumerate(wires):
        bring(wire, buddy, tmp_path, 1, rank=rank)
    assert buddy.desk._open == 3
    for wire in wires:
        wire.close()
    until(lambda: buddy.desk._open == 0, "the places to be free")
