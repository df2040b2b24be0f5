"""The faults of ``benchmarks.localise`` that need root: files that are not answered, a network that is cut."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.localise_files import StallingFiles
from benchmarks.localise_net import Hosts, missing
from benchmarks.progress import until

CLONE_NEWNET = 0x40000000
LIMIT_S = 10.0
SILENT_S = 0.2

needs_files = pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK) or os.geteuid() != 0, reason="root and /dev/fuse")
needs_network = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StallingFiles]:
    made = StallingFiles(tmp_path / "files", 2)
    made.start()
    yield made
    made.close()


def reader(files: StallingFiles, rank: int, place: int = 0) -> subprocess.Popen[bytes]:
    """A process that reads 512 bytes: this one would keep its own server from answering."""
    path = files.folder / f"rank{rank}"
    return subprocess.Popen(
        ["dd", f"if={path}", "bs=512", "count=1", f"skip={place // 512}", "status=none"], stdout=subprocess.PIPE
    )


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@needs_files
def test_reads_beyond_a_place_wait_until_they_are_released(files: StallingFiles) -> None:
    """Other ranks and what lies before are answered; the released reader gets its bytes."""
    files.stall({1}, 1024)
    for rank, place in ((0, 4096), (1, 512)):
        assert reader(files, rank, place).communicate(timeout=LIMIT_S)[0] == bytes(512)
    slow = reader(files, 1, 1024)
    until(lambda: files.waiting == 1, LIMIT_S, "the read")
    assert slow.poll() is None
    files.release()
    assert slow.communicate(timeout=LIMIT_S)[0] == bytes(512)


@needs_files
def test_a_killed_reader_stays_until_it_is_answered_or_the_server_is_gone(files: StallingFiles) -> None:
    """As with a dead file server that is mounted hard: state D, and no signal helps."""
    files.stall({0}, 0)
    stuck = reader(files, 0)
    until(lambda: files.waiting == 1, LIMIT_S, "the read")
    stuck.send_signal(signal.SIGKILL)
    until(lambda: state(stuck.pid) == "D", LIMIT_S, "state D")
    files.close()
    assert stuck.wait(LIMIT_S) == -signal.SIGKILL
    assert os.listdir(files.folder) == []
    stuck.stdout.close()  # type: ignore[union-attr]


@needs_files
def test_other_names_are_not_there(files: StallingFiles) -> None:
    """Only one file per rank."""
    done = subprocess.run(["cat", files.folder / "rank2"], capture_output=True, text=True, check=False)
    assert os.strerror(errno.ENOENT) in done.stderr


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(3, subnet="10.91.8")
    try:
        made.up()
        yield made
    finally:
        made.down()


def socket_on(hosts: Hosts, index: int) -> socket.socket:
    """A datagram socket on that host: a thread of its own enters the namespace, and the socket stays there."""

    def make() -> socket.socket:
        fd = os.open(f"/run/netns/{hosts.names[index]}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(fd, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(fd)
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((hosts.address(index), 0))
        made.settimeout(LIMIT_S)
        return made

    with ThreadPoolExecutor(1) as pool:
        assert threading.current_thread() is threading.main_thread()
        return pool.submit(make).result()


@needs_network
def test_a_cut_is_silent_and_only_between_two(hosts: Hosts) -> None:
    """Nothing is refused, the third host reaches both, and healing brings everything back."""
    lines = [socket_on(hosts, index) for index in range(3)]

    def arrives(sender: int, receiver: int, limit_s: float = LIMIT_S) -> bool:
        lines[sender].sendto(b"x", lines[receiver].getsockname())
        lines[receiver].settimeout(limit_s)
        try:
            return lines[receiver].recv(8) == b"x"
        except TimeoutError:
            return False

    assert arrives(0, 1)
    hosts.cut(0, 1)
    assert not arrives(0, 1, SILENT_S)
    assert not arrives(1, 0, SILENT_S)
    assert all(arrives(*pair) for pair in ((0, 2), (2, 0), (1, 2), (2, 1)))
    hosts.heal()
    assert arrives(0, 1)
    assert arrives(1, 0)
    for line in lines:
        line.close()
