"""Ports, the address file and the lock, with real sockets, files and processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.controlplane import address
from keepstep.controlplane.address import Address, is_loopback, listen, read_address, sole_controller, write_address
from keepstep.controlplane.clock import AnchoredClock
from keepstep.controlplane.exceptions import PreflightFailed


def test_a_port_in_use_is_named() -> None:
    """A fixed port that somebody has is an error with the port and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = theirs.getsockname()[1]
        with pytest.raises(
            PreflightFailed, match=rf"port {port} for agents is in use on host '127.0.0.1'.*0 takes any"
        ):
            listen("127.0.0.1", port, what="agents")


def test_free_ports_lie_outside_the_range_of_outgoing_connections() -> None:
    """Otherwise an agent that retries could connect to itself on the port of a restarting controller."""
    low, high = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with listen("127.0.0.1", 0, what="agents", seed="x") as sock:
        assert not low <= sock.getsockname()[1] <= high


def test_the_last_port_is_taken_again_if_it_is_free() -> None:
    """A restarted controller is found where it was; if somebody took its port it finds another."""
    with listen("127.0.0.1", 0, what="agents", seed="y") as first:
        last = first.getsockname()[1]
    with listen("127.0.0.1", 0, what="agents", last=last, seed="z") as again:
        assert again.getsockname()[1] == last
        with listen("127.0.0.1", 0, what="agents", last=last, seed="z") as other:
            assert other.getsockname()[1] != last


def test_a_host_that_is_not_ours_is_named() -> None:
    """An address of another machine is refused as such."""
    with pytest.raises(PreflightFailed, match=r"192\.0\.2\.1.*an address of this machine"):
        listen("192.0.2.1", 0, what="HTTP")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("n1", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    """Only what surely cannot be reached from elsewhere goes without a token."""
    assert is_loopback(host) is expected


def test_the_address_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """What is written is read back; nothing temporary stays; damage reads as "none"."""
    assert read_address(tmp_path) is None
    for port in (1, 2):
        mine = Address(host="h", agent_port=port, http_port=9, pid=port, token_file="t", version="v")
        write_address(tmp_path, mine)
        assert read_address(tmp_path) == mine
    assert [path.name for path in tmp_path.iterdir()] == [address.ADDRESS_FILE]
    (tmp_path / address.ADDRESS_FILE).write_text('{"host": "h", "agent_p')
    assert read_address(tmp_path) is None


def test_one_controller_per_run_directory(tmp_path: Path) -> None:
    """A second process is told who holds the lock; kill -9 of the holder frees it."""
    code = (
        "import sys, pathlib\nfrom keepstep.controlplane.address import sole_controller\n"
        "with sole_controller(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(PreflightFailed, match=rf"another controller \(pid {holder.pid}\) holds"):
            with sole_controller(tmp_path):
                pass
    finally:
        holder.kill()
        holder.communicate()
    with sole_controller(tmp_path):
        pass


def test_the_clock_never_runs_backwards() -> None:
    """Neither a step of the wall clock nor a restart behind the log's newest record turns time back."""
    wall, mono = [1_000], [5]
    clock = AnchoredClock(wall=lambda: wall[0], monotonic=lambda: mono[0])
    first = clock.now()
    wall[0] = 10
    mono[0] += 7
    assert clock.now() == first + 7
    restarted = AnchoredClock(not_before=first + 7, wall=lambda: wall[0], monotonic=lambda: mono[0])
    assert restarted.now() >= first + 7
