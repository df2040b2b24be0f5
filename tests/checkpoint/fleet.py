"""Keepers of several nodes as real processes, joined by a roster."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.notes import read as read_note
from keepstep.checkpoint.peers import PeerClient
from keepstep.checkpoint.slot import Slot
from keepstep.model.env import KEEPER_SOCKET, NOTES_SOCKET, SNAP_DIR
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Member, Place, Roster

TOKEN = "t0ken"


class Fleet:
    """Keepers of several nodes as real processes, and a roster that joins them in a ring."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
        (self.root / "token").write_text(TOKEN + "\n")
        self.nodes = nodes
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for node in nodes:
            (self.root / node / SNAP_DIR).mkdir(parents=True)
            self.start(node)

    def start(self, node: str, *more: str) -> None:
        words = [sys.executable, "-m", "keepstep.checkpoint.keeper", "--node-dir", str(self.root / node)]
        words += ["--host", "127.0.0.1", "--token-file", str(self.root / "token"), *more]
        with open(self.root / f"{node}.err", "ab") as err:
            self.processes[node] = subprocess.Popen(words, stderr=err)

    def kill(self, node: str) -> None:
        self.processes[node].send_signal(signal.SIGKILL)
        self.processes[node].wait()

    def port(self, node: str) -> int:
        until(lambda: (self.root / node / "keeper.port").exists(), f"port of {node}")
        return int((self.root / node / "keeper.port").read_text())

    def roster(self, epoch: int = 1, origin: str = "controller") -> Roster:
        homes = dict(zip(self.nodes, [*self.nodes[1:], self.nodes[0]], strict=True))
        return Roster(
            job=JobId("job"),
            epoch=Epoch(epoch),
            origin=origin,
            mode="fresh",
            world_size=len(self.nodes),
            members=tuple(
                Member(rank=Rank(i), node=NodeId(node), slot=SlotId(f"s{i}"), local_rank=0)
                for i, node in enumerate(self.nodes)
            ),
            places=tuple(
                Place(
                    node=NodeId(node),
                    host="127.0.0.1",
                    keeper_port=self.port(node),
                    peer_port=0,
                    buddy=NodeId(homes[node]),
                )
                for node in self.nodes
            ),
            store_host="127.0.0.1",
            store_port=0,
        )

    def announce(self, roster: Roster) -> None:
        for node in self.nodes:
            (self.root / node / "roster").write_bytes(msgspec.msgpack.encode(roster))
            with contextlib.suppress(ConnectionRefusedError):  # one that is down reads the file when it starts
                self.ring(node, b"roster")

    def ring(self, node: str, words: bytes) -> None:
        path = self.root / node / KEEPER_SOCKET
        until(path.exists, f"socket of {node}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.sendto(words, str(path))

    def client(self, node: str, *, epoch: int = 1, key: str = "e1/controller", token: str = TOKEN) -> PeerClient:
        return PeerClient(
            host="127.0.0.1",
            port=self.port(node),
            job=JobId("job"),
            token=token,
            epoch=epoch,
            key=key,
            stop=lambda: False,
        )

    def notes(self, node: str) -> socket.socket:
        """A socket on which the keeper's notes arrive; read it with ``note``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.bind(str(self.root / node / NOTES_SOCKET))
        sock.settimeout(20)
        return sock

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.wait(10)
        shutil.rmtree(self.root)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet(("a", "b"))
    yield made
    made.close()


def note(sock: socket.socket) -> Note:
    """The next one, waited for."""
    found = read_note(sock.recv(65536))
    assert found is not None
    return found


def until(condition: Callable[[], object], what: str, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.005)


def content(path: Path) -> bytes:
    slot = Slot(path)
    (entry,) = slot.describe().tensors
    return slot.memory[entry.offset : entry.offset + entry.nbytes]
