"""Connections that get no answer, told from those that only wait."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from keepstep.agent import links
from keepstep.agent.links import links_of, read_address, take_links
from keepstep.model.ids import Rank


def row(*, state: str = "01", unacked: int = 0x200, timer: str = "01", timeouts: int = 3, inode: int = 7) -> str:
    return (
        f"   0: 0100007F:1F90 0200000A:C350 {state} {unacked:08X}:00000000 {timer}:00000064 {timeouts:08X} "
        f" 1000        0 {inode} 2 0000000000000000 20 4 30 10 -1"
    )


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rows: list[str] = []

    def told(pid: int, family: str) -> list[str]:
        return rows if family == "tcp" else []

    monkeypatch.setattr(links, "_lines", told)
    monkeypatch.setattr(links, "_inodes", lambda pid: iter([7]))
    return rows


def test_bytes_that_are_sent_again_and_again_are_told(table: list[str]) -> None:
    table.append(row())
    (found,), addresses = take_links(1, Rank(2))
    assert (found.rank, found.local, found.peer, found.unacked, found.timeouts) == (
        2, "127.0.0.1:8080", "10.0.0.2:50000", 512, 3,
    )  # fmt: skip
    assert addresses == ("127.0.0.1",)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(row(timer="04"), id="the peer has no room: it is stopped or busy, its kernel answers"),
        pytest.param(row(timeouts=1), id="one loss is no cut"),
        pytest.param(row(unacked=0), id="nothing is waited for"),
        pytest.param(row(inode=8), id="somebody else's connection"),
        pytest.param(row(state="0A"), id="a listening socket"),
        pytest.param("  1: nonsense", id="a line of another kernel"),
    ],
)
def test_what_merely_waits_is_not(table: list[str], other: str) -> None:
    table.append(other)
    assert take_links(1, Rank(2))[0] == ()


def test_addresses_in_both_families() -> None:
    assert read_address("0100007F:1F90") == "127.0.0.1:8080"
    assert read_address("00000000000000000000000001000000:0050") == "::1:80"
    assert read_address("0000000000000000FFFF00000100007F:0050") == "127.0.0.1:80"


def test_a_real_connection_to_a_peer_that_does_not_read(tmp_path: Path) -> None:
    """Full buffers on a healthy path: the kernel of the other side answers, so this is no broken link."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while client.send(bytes(65536)):
                    pass
            found, addresses = links_of({Rank(0): os.getpid()})
    assert found == ()
    assert "127.0.0.1" in addresses
