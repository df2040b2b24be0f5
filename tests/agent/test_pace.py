"""Windows of the pace: what the agent makes of heartbeat memory and of the kernel's books. Time is a number."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_rig import bare_node
from msgspec.structs import replace

from keepstep.agent import proc, sockdiag
from keepstep.agent.beats import create_beat
from keepstep.agent.clocks import Clocks
from keepstep.agent.nvml import Device, Nvml
from keepstep.agent.pace import Paces
from keepstep.agent.slots import Slot
from keepstep.agent.sockdiag import Traffic
from keepstep.model.beat import LAYOUT, SIZE, Phase, Word
from keepstep.model.facts import RanksPaced
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Member, Place, Roster

MS = 1_000_000
SECOND = 1_000 * MS
EPOCH = Epoch(1 << 16)
START = 50 * SECOND


class Rig:
    """One node with two ranks (this process stands for both) under a pace of one second per window."""

    def __init__(self, node_dir: Path, run_dir: Path) -> None:
        self.node = bare_node(node_dir, run_dir)
        stat = proc.stat(os.getpid())
        assert stat is not None
        self.words: list[memoryview] = []
        for rank in range(2):
            slot = Slot(
                id=SlotId(f"r{rank}"), role="worker", out="", err="", pid=os.getpid(), start=stat.start,
                rank=Rank(rank), epoch=EPOCH,
            )  # fmt: skip
            self.node.table.add(slot)
            create_beat(node_dir, slot.id)
            with open(node_dir / "beat" / slot.id, "r+b") as file:
                words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
            words[Word.PHASE], words[Word.LAYOUT] = Phase.STEP, LAYOUT
            self.words.append(words)
        self.roster(EPOCH)
        self.told: list[RanksPaced] = []
        self.node.report = self._report  # type: ignore[method-assign]
        self.books: list[Traffic] = []
        self.paces = Paces(self.node, clocks=Clocks(run_dir / "sys", devices=NoDevices()), books=lambda: self.books)
        self.paces.window_s = 1.0

    def _report(self, kind: Any, **fields: Any) -> Any:
        self.told.append(kind(job=JobId("j1"), at=0, node=NodeId("n0"), **fields))
        return self.told[-1]

    def roster(self, epoch: Epoch) -> None:
        names = ("n0", "n1")
        self.node.roster = Roster(
            job=JobId("j1"), epoch=epoch, origin="controller", mode="fresh", world_size=2, store_host="", store_port=1,
            members=tuple(
                Member(rank=Rank(r), node=NodeId("n0"), slot=SlotId(f"r{r}"), local_rank=r) for r in range(2)
            ),
            places=tuple(
                Place(node=NodeId(n), host=f"10.0.0.{i + 1}", keeper_port=1, peer_port=1) for i, n in enumerate(names)
            ),
        )  # fmt: skip
        for words in self.words:
            words[Word.EPOCH], words[Word.FIRST_NS] = epoch, START

    def steps(self, count: int, *, ms: float = 10, wait_ms: float = 4, data_ms: float = 1) -> None:
        """So many steady steps of both ranks; rank 1 waits for nobody."""
        for rank, words in enumerate(self.words):
            words[Word.STEP] += count
            words[Word.PACED] += count
            words[Word.PACED_NS] += int(count * ms * MS)
            words[Word.WAIT_NS] += int(count * wait_ms * MS) * (rank == 0)
            words[Word.DATA_NS] += int(count * data_ms * MS)
            words[Word.SIZE] += 64 * count

    def look(self, seconds: float) -> None:
        """At so many seconds after the first commit."""
        self.paces.look(int(START + seconds * SECOND))


class NoDevices:
    def devices(self) -> list[Device]:
        raise OSError("no driver")


@pytest.fixture
def rig(node_dir: Path, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(node_dir, tmp_path)
    yield made
    made.node.outbox.close()


def test_a_window_is_what_lies_between_its_two_ends(rig: Rig) -> None:
    """The ramp-up is not told; window 1 tells each rank's mean step, what it waited, and what it read."""
    rig.steps(3)
    rig.look(0.01)
    rig.steps(60)
    rig.look(1.0)
    assert rig.told == []
    rig.steps(50)
    rig.look(2.0)
    (fact,) = rig.told
    assert (fact.window, fact.epoch, fact.seconds, len(fact.ranks)) == (1, EPOCH, 1.0, 2)
    first, second = fact.ranks
    assert (first.first, first.last, first.size) == (63, 113, 64)
    assert (first.step_s, first.wait_s, first.data_s) == pytest.approx((0.010, 0.004, 0.001))
    assert second.own_s == pytest.approx(0.010)
    rig.steps(50)
    rig.look(3.0)
    assert [fact.window for fact in rig.told] == [1, 2]


def test_a_window_without_a_step_is_not_told(rig: Rig) -> None:
    """Nothing committed, or nothing but an evaluation: no numbers."""
    rig.steps(1)
    for second in range(5):
        rig.look(second)
    assert rig.told == []
    rig.words[0][Word.STEP] += 1  # a commit that was no steady step
    rig.look(5.0)
    assert rig.told == []


def test_another_epoch_begins_anew(rig: Rig) -> None:
    """A window never spans two epochs, nor a rollback, which restarts the count of commits."""
    rig.look(0.0)
    rig.look(1.0)
    rig.steps(10)
    rig.roster(Epoch(2 << 16))
    rig.look(2.0)
    rig.steps(10)
    assert rig.told == []
    for words in rig.words:
        words[Word.FIRST_NS] = START + 2 * SECOND
    rig.look(3.0)
    rig.look(4.0)
    rig.steps(10)
    rig.look(5.0)
    assert [fact.window for fact in rig.told] == [2]


def test_an_agent_that_was_away_tells_no_window_of_another_length(rig: Rig) -> None:
    """A look that comes late ends no window, and the next one is whole again."""
    for second in (0.0, 1.0):
        rig.look(second)
    rig.steps(40)
    rig.look(2.6)
    rig.look(3.0)
    rig.steps(30)
    rig.look(4.0)
    assert [(fact.window, fact.ranks[0].last - fact.ranks[0].first) for fact in rig.told] == [(3, 30)]


def test_a_timer_that_fires_a_little_early_has_met_its_boundary(rig: Rig) -> None:
    """And the look that follows it a moment later is none of its own: no window is lost, none is told twice."""
    for second in (0.0, 0.999, 1.0, 1.999, 2.0, 2.999, 3.0):
        rig.look(second)
        rig.steps(10)
    assert [fact.window for fact in rig.told] == [1, 2]


def test_the_next_look_is_at_the_end_of_the_window(rig: Rig) -> None:
    """The pause leads to the next boundary; without a window's length or an epoch it is a short one."""
    rig.look(0.3)
    assert rig.paces.pause_s(START + int(4.3 * SECOND)) == pytest.approx(0.7)
    rig.paces.window_s = 0.0
    assert 0 < rig.paces.pause_s(START) <= 1.0


def test_traffic_with_other_nodes_is_told_by_host(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections to one host are one link; strangers' sockets and hosts outside of the roster are none."""
    monkeypatch.setattr(sockdiag, "sockets_of", lambda pid: frozenset({1, 2, 3}))
    rig.paces._hosts = {"10.0.0.2": "10.0.0.2"}

    def book(inode: int, sent: int, busy: float, peer: str = "10.0.0.2") -> Traffic:
        return Traffic(peer=peer, inode=inode, bytes=sent, resent=sent // 1000, rtt_ms=0.5 * inode, busy_s=busy)

    rig.look(0.0)
    rig.books = [book(1, 1000, 0.1), book(2, 1000, 0.2), book(9, 5, 5.0), book(3, 7, 7.0, "10.0.0.9")]
    rig.look(1.0)
    rig.steps(10)
    rig.books = [book(1, 4000, 0.4), book(2, 3000, 0.9), book(9, 5, 5.0), book(3, 7, 7.0, "10.0.0.9")]
    rig.look(2.0)
    (link,) = rig.told[0].ranks[0].links
    assert (link.host, link.bytes, link.resent, link.rtt_ms) == ("10.0.0.2", 5000, 5, 1.0)
    assert link.blocked_s == pytest.approx(0.7)


def test_addresses_of_the_other_nodes_are_found_and_ones_own_is_none(rig: Rig) -> None:
    """Names and digits lead to the host of the roster; a host that this node shares with another one is left out."""
    roster = rig.node.roster
    assert roster is not None
    hosts = {"n0": rig.node.config.host, "n1": "127.0.0.9", "n2": "localhost", "n3": rig.node.config.host}
    rig.node.config = replace(rig.node.config, host="10.9.9.9")
    places = tuple(
        Place(node=NodeId(node), host="10.9.9.9" if node in ("n0", "n3") else host, keeper_port=1, peer_port=1)
        for node, host in hosts.items()
    )
    rig.node.roster = replace(roster, places=places)
    asyncio.run(rig.paces._resolve())
    assert rig.paces._hosts["127.0.0.9"] == "127.0.0.9"
    assert rig.paces._hosts["127.0.0.1"] == "localhost"
    assert "10.9.9.9" not in rig.paces._hosts


def test_the_kernels_books_show_a_connection_of_ours() -> None:
    """Bytes that were sent over a real connection are found again, under the socket's inode."""
    with socket.create_server(("127.0.0.2", 0)) as server, socket.socket() as client:
        client.bind(("127.0.0.3", 0))
        client.connect(server.getsockname())
        there, _ = server.accept()
        with there:
            drained = threading.Thread(target=lambda: there.recv(100_000, socket.MSG_WAITALL))
            drained.start()
            client.sendall(b"x" * 100_000)
            drained.join()
            own = sockdiag.sockets_of(os.getpid())
            try:
                books = sockdiag.connections()
            except OSError as error:
                pytest.skip(f"this kernel shows no books: {error}")
            mine = {one.peer: one for one in books if one.inode in own}
    assert mine["127.0.0.2"].bytes >= 100_000
    assert mine["127.0.0.2"].busy_s < 10
    assert sockdiag.sockets_of(2**22 + 1) == frozenset()


def test_damaged_messages_are_no_connections() -> None:
    """Short or strange answers of a kernel give nothing, and no error."""
    assert sockdiag.parse(b"") is None
    assert sockdiag.parse(b"\x02" * 72) is None
    assert sockdiag.parse(b"\x02" * 8 + bytes(64) + b"\x00\x00\x02\x00" + bytes(8)) is None


def test_clocks_from_the_kernels_files(tmp_path: Path) -> None:
    """Mean frequencies in MHz, throttling since the last look, and nothing where nothing can be read."""
    for cpu in range(40):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}"
        (folder / "cpufreq").mkdir(parents=True)
        (folder / "thermal_throttle").mkdir()
        (folder / "cpufreq/scaling_cur_freq").write_text("1200000\n")
        (folder / "cpufreq/cpuinfo_max_freq").write_text("2900000\n")
        (folder / "thermal_throttle/core_throttle_count").write_text("5\n")
    hot = [Device(index=0, clock_mhz=1900.0, limit_mhz=1980.0)]
    hot.append(Device(index=1, clock_mhz=900.0, limit_mhz=1980.0, reasons=("hw_thermal_slowdown",)))
    clocks = Clocks(tmp_path, devices=SimpleNamespace(devices=lambda: hot))
    first = clocks.read()
    assert (first.clock_mhz, first.clock_limit_mhz, first.throttled) == (1200.0, 2900.0, None)
    assert (first.gpu_clock_mhz, first.gpu_reasons) == (900.0, ("hw_thermal_slowdown",))
    (tmp_path / "devices/system/cpu/cpu7/thermal_throttle/core_throttle_count").write_text("8\n")
    assert clocks.read().throttled == 3
    bare = Clocks(tmp_path / "nothing", devices=NoDevices()).read()
    assert (bare.clock_mhz, bare.throttled, bare.gpu_clock_mhz, bare.gpu_reasons) == (None, None, None, ())


class FakeLibrary:
    """NVML with one device that is too hot; ``broken`` calls answer with an error."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlInit_v2": None,
            "nvmlDeviceGetCount_v2": 1,
            "nvmlDeviceGetHandleByIndex_v2": 77,
            "nvmlDeviceGetClockInfo": 990,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x40 | 0x80,
        }

        def call(*args: Any) -> int:
            if name == self.broken:
                return 999
            if args:
                ctypes.cast(args[-1], ctypes.POINTER(ctypes.c_uint))[0] = values[name]
            return 0

        return call


def test_what_the_driver_says_of_a_device() -> None:
    """Clocks and the reasons that are trouble; a driver that does not answer is an OSError, as no driver is."""
    (device,) = Nvml(FakeLibrary()).devices()
    assert device == Device(0, 990.0, 1980.0, ("hw_thermal_slowdown", "hw_power_brake"))
    with pytest.raises(OSError, match="nvmlInit_v2"):
        Nvml(FakeLibrary("nvmlInit_v2"))
    with pytest.raises(OSError, match="answers 999"):
        Nvml(FakeLibrary("nvmlDeviceGetClockInfo")).devices()
