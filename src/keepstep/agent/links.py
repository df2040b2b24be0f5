"""Links: connections of a rank's process to which nobody answers, as the kernel sees them.

When a network is cut, the kernel sends what was not acknowledged again and again, each time later
(https://www.rfc-editor.org/rfc/rfc6298). A peer that is stopped or busy still acknowledges, its kernel does, so this
tells a broken path from a process that does not read. ``/proc/<pid>/net/tcp`` shows the process's own network
namespace and needs no rights (columns: net/ipv4/tcp_ipv4.c, get_tcp4_sock).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from keepstep.model.ids import Rank
from keepstep.model.position import Link

SILENT = 2
"""Timeouts in a row from which on a connection counts as unanswered: 0.2 s and 0.4 s with the kernel's least ones."""
MAX_LINKS = 64
"""Per rank; beyond that the picture is clear."""

_ESTABLISHED = "01"
_RETRANSMITS = "01"
"""Kind of the timer that runs: 1 retransmission, 4 probing a peer that has no room to receive."""


class _Row(Struct, frozen=True):
    local: str
    peer: str
    unacked: int
    timer: str
    timeouts: int
    inode: int


def links_of(pids: Mapping[Rank, int]) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Unanswered connections of these ranks' processes, and the addresses by which they are connected."""
    taken = [take_links(pid, rank) for rank, pid in pids.items()]
    return (
        tuple(link for links, _ in taken for link in links),
        tuple(sorted({address for _, addresses in taken for address in addresses})),
    )


def take_links(pid: int, rank: Rank) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """The process's unanswered connections, and the addresses by which it is connected. Never raises."""
    own = set(_inodes(pid))
    rows = [row for family in ("tcp", "tcp6") for row in _rows(pid, family) if row.inode in own]
    silent = [
        Link(rank=rank, local=row.local, peer=row.peer, unacked=row.unacked, timeouts=row.timeouts)
        for row in rows
        if row.timer == _RETRANSMITS and row.timeouts >= SILENT and row.unacked
    ]
    return tuple(silent[:MAX_LINKS]), tuple(sorted({row.local.rpartition(":")[0] for row in rows}))


def _inodes(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _rows(pid: int, family: str) -> Iterator[_Row]:
    for line in _lines(pid, family):
        if row := _row(line.split()):
            yield row


def _lines(pid: int, family: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
    except OSError:
        return []


def _row(words: list[str]) -> _Row | None:
    """``sl local peer state tx:rx timer:when timeouts uid probes inode ...``, numbers in hexadecimal."""
    try:
        if words[3] != _ESTABLISHED:
            return None
        return _Row(
            local=read_address(words[1]),
            peer=read_address(words[2]),
            unacked=int(words[4].split(":")[0], 16),
            timer=words[5].split(":")[0],
            timeouts=int(words[6], 16),
            inode=int(words[9]),
        )
    except (IndexError, ValueError):
        return None


def read_address(word: str) -> str:
    """``0100007F:1F90`` is ``127.0.0.1:8080``: each four bytes are one word of the machine's own byte order."""
    address, _, port = word.partition(":")
    count = len(address) // 8
    packed = struct.pack(f"={count}I", *struct.unpack(f">{count}I", bytes.fromhex(address)))
    family = socket.AF_INET if count == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed).removeprefix('::ffff:')}:{int(port, 16)}"
