"""Keepers: a version reaches the buddy node whole or not at all, and comes back from there."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import PeerRefused, PeerUnreachable, SlotInvalid
from keepstep.checkpoint.peers import CHUNK, CHUNK_HEAD, Answer, Arrival, PeerClient, Put, chunk_head
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.model.env import KEEPER_SOCKET, REPLICA_DIR, SNAP_DIR
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.placement import Host, place
from keepstep.model.topology import Member, Place, Roster
from keepstep.model.wire import Unpacker, pack
from tests.checkpoint.test_slot import fill

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

    def start(self, node: str) -> None:
        words = [sys.executable, "-m", "keepstep.checkpoint.keeper", "--node-dir", str(self.root / node)]
        words += ["--host", "127.0.0.1", "--token-file", str(self.root / "token")]
        with open(self.root / f"{node}.err", "ab") as err:
            self.processes[node] = subprocess.Popen(words, stderr=err)

    def kill(self, node: str) -> None:
        self.processes[node].send_signal(signal.SIGKILL)
        self.processes[node].wait()

    def port(self, node: str) -> int:
        until(lambda: (self.root / node / "keeper.port").exists(), f"port of {node}")
        return int((self.root / node / "keeper.port").read_text())

    def roster(self, epoch: int = 1, origin: str = "controller") -> Roster:
        homes = place([Host(NodeId(node), (i,)) for i, node in enumerate(self.nodes)]).buddy
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
                    buddy=homes[NodeId(node)],
                )
                for node in self.nodes
            ),
            store_host="127.0.0.1",
            store_port=0,
        )

    def announce(self, roster: Roster) -> None:
        for node in self.nodes:
            (self.root / node / "roster").write_bytes(msgspec.msgpack.encode(roster))
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


def until(condition: Callable[[], object], what: str, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.005)


def content(path: Path) -> bytes:
    slot = Slot(path)
    (entry,) = slot.describe().tensors
    return slot.memory[entry.offset : entry.offset + entry.nbytes]


SIZE = CHUNK + 12345


def test_a_version_travels_to_the_buddy_and_back(fleet: Fleet, tmp_path: Path) -> None:
    """A rung bell brings the newest version to the buddy; the acknowledged step appears in the trainer's own slot;
    a newcomer on a third node fetches the same bytes."""
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    for step in (4, 5):
        slot = both.slots[both.target(step)]
        fill(slot, Version(step, 1), step, SIZE)
        fleet.ring("a", f"0 {step}".encode())
        until(lambda s=slot, n=step: s.acked == n, f"step {step} to be acknowledged")
    client = fleet.client("b")
    assert client.have(0) == (Version(5, 1), Version(4, 1))
    path = client.fetch(0, Version(4, 1), tmp_path)
    assert content(path) == bytes([4]) * SIZE
    assert [v for v, _ in pair.look(tmp_path, 0)] == [Version(4, 1)]


def test_a_restarted_keeper_goes_on_where_files_are(fleet: Fleet) -> None:
    """kill -9 of both keepers loses nothing: same port, versions still served, what was written meanwhile is sent."""
    fleet.announce(fleet.roster())
    port = fleet.port("a")
    fleet.kill("a")
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(7, 1), 7, 1000)
    fleet.start("a")
    until(lambda: both.slots[0].acked == 7, "the restarted keeper to send")
    assert fleet.port("a") == port
    fleet.kill("b")
    fleet.start("b")
    until(lambda: fleet.client("b").have(0) == (Version(7, 1),) if reachable(fleet.port("b")) else False, "b to serve")


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_damaged_chunk_never_becomes_a_version(fleet: Fleet) -> None:
    """A flipped bit on the way is found by the receiver and refused with a sentence; nobody can resume from it."""
    fleet.announce(fleet.roster())
    source = Slot(fleet.root / "rank1.0", create=True)
    fill(source, Version(3, 1), 3, SIZE)
    size = source.used
    with socket.create_connection(("127.0.0.1", fleet.port("b"))) as sock:
        put = Put(job=JobId("job"), token=TOKEN, epoch=1, key="e1/controller", rank=1, version=Version(3, 1), size=size)
        sock.sendall(pack(put))
        answers: Unpacker[Answer] = Unpacker(Answer)
        (first,) = answers.feed(sock.recv(4096))
        assert first.ok
        for start in range(0, size, CHUNK):
            data = bytearray(source.memory[start : min(start + CHUNK, size)])
            head = chunk_head(data)
            if start:
                data[100] ^= 1
            sock.sendall(head + data)
        (last,) = answers.feed(sock.recv(4096))
        assert not last.ok
        assert "damaged" in last.why
    assert pair.look(fleet.root / "b" / REPLICA_DIR, 1) == []
    assert fleet.client("b").have(1) == ()


def test_a_sender_that_dies_half_way_leaves_the_older_version(fleet: Fleet, tmp_path: Path) -> None:
    """The replica before stays whole and is what a newcomer gets."""
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    fleet.ring("a", b"0 1")
    until(lambda: both.slots[0].acked == 1, "step 1 to be acknowledged")
    with socket.create_connection(("127.0.0.1", fleet.port("b"))) as sock:
        put = Put(
            job=JobId("job"),
            token=TOKEN,
            epoch=1,
            key="e1/controller",
            rank=0,
            version=Version(2, 1),
            size=SIZE + HEADER,
        )
        sock.sendall(pack(put))
        assert sock.recv(4096)
        sock.sendall(CHUNK_HEAD.pack(CHUNK, 0) + b"x" * 1000)
    assert fleet.client("b").have(0) == (Version(1, 1),)
    assert content(fleet.client("b").fetch(0, Version(1, 1), tmp_path)) == bytes([1]) * SIZE


@pytest.mark.parametrize(
    ("epoch", "key", "token", "why"),
    [
        (1, "e1/controller", TOKEN, "fenced off"),
        (2, "e2/other", TOKEN, "rival"),
        (2, "e2/controller", "wrong", "wrong token"),
    ],
)
def test_strangers_and_the_past_are_refused(fleet: Fleet, epoch: int, key: str, token: str, why: str) -> None:
    """An older epoch, a rival roster of the same epoch, and a wrong token each get a sentence instead of data."""
    fleet.announce(fleet.roster(epoch=2))
    until(lambda: asks(fleet) == "ok", "the roster to be read")
    with pytest.raises(PeerRefused, match=why):
        fleet.client("b", epoch=epoch, key=key, token=token).have(0)


def asks(fleet: Fleet) -> str:
    try:
        fleet.client("b", epoch=1).have(0)
    except PeerRefused:
        return "ok"
    return "not yet"


def test_a_new_buddy_gets_everything_again(fleet: Fleet) -> None:
    """When the ring changes, the acknowledgement is taken back until the new buddy has the version."""
    fleet.nodes = ("a", "b", "c")
    (fleet.root / "c" / SNAP_DIR).mkdir(parents=True)
    fleet.start("c")
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, 1000)
    fleet.ring("a", b"0 1")
    until(lambda: fleet.client("b").have(0) == (Version(1, 1),), "b to have it")
    fleet.nodes = ("a", "c")
    fleet.announce(fleet.roster(epoch=2))
    until(lambda: fleet.client("c", epoch=2, key="e2/controller").have(0) == (Version(1, 1),), "c to have it")
    until(lambda: both.slots[0].acked == 1, "the new acknowledgement")
    fleet.nodes = ("a", "b", "c")


def test_a_silent_keeper_does_not_hold_a_newcomer_up() -> None:
    """A port that accepts and says nothing ends the request as soon as the caller has something better to do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = threading.Event()
        client = PeerClient(
            host="127.0.0.1",
            port=server.getsockname()[1],
            job=JobId("job"),
            token="",
            epoch=1,
            key="",
            stop=lambda: asked.set() or True,
        )
        with pytest.raises(PeerUnreachable, match="silent"):
            client.have(0)
        assert asked.is_set()
    with pytest.raises(PeerUnreachable, match="cannot be reached"):
        client.have(0)


def test_an_absurd_size_is_refused(tmp_path: Path) -> None:
    """An announced size outside all reason allocates nothing."""
    with pytest.raises(SlotInvalid, match="cannot be right"):
        Arrival(tmp_path, 0, Version(1, 1), 1 << 60)


def test_remains_of_a_broken_transfer_do_not_mix_into_the_next(tmp_path: Path) -> None:
    """A sender comes back while bytes of its first try are still in some buffer: only the second try counts."""
    sent = Slot(tmp_path / "sent", create=True)
    fill(sent, Version(5, 1), 5, 10_000)
    size, body = sent.used, bytes(sent.memory[: sent.used])
    half = size // 2
    first = Arrival(tmp_path / "replica", 0, Version(5, 1), size)
    first.add(body[:half], zlib.crc32(body[:half]))
    second = Arrival(tmp_path / "replica", 0, Version(5, 1), size)
    assert first.slot.path == second.slot.path
    second.add(body, zlib.crc32(body))
    late = bytes([9]) * (size - half)
    with pytest.raises(SlotInvalid, match="newer transfer"):
        first.add(late, zlib.crc32(late))
    path = second.finish()
    with pytest.raises(SlotInvalid, match=f"{half} of {size} bytes"):
        first.finish()
    first.close()
    second.close()
    arrived = Slot(path)
    assert arrived.version == Version(5, 1)
    assert bytes(arrived.memory[HEADER:size]) == body[HEADER:]
    arrived.close()
    sent.close()
