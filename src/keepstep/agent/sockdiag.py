"""The kernel's books of TCP connections: what was sent, sent again, and could not leave, by the other end's address.

Asked by netlink (sock_diag(7)), once per window and for all connections together; needs no right over the processes
that own them. Which connections are whose says ``/proc/<pid>/fd``.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SOCK_DIAG_BY_FAMILY = 20
_NLM_REQUEST_DUMP = 0x1 | 0x300
_DONE, _ERROR = 3, 2
_ESTABLISHED = 1 << 1
_INFO = 2
"""INET_DIAG_INFO, the attribute with the kernel's ``tcp_info``."""
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_MESSAGE_BYTES = 72
"""Of ``inet_diag_msg``, before its attributes."""
_RTT = 68
"""Offsets in ``tcp_info`` (linux/tcp.h): smoothed round trip, microseconds."""
_TOTAL_RESENT = 100
_BYTES_ACKED = 120
_BUSY, _WINDOW_LIMITED = 168, 176
"""Microseconds with something to send, and of these the time in which the receiver's window was shut."""
REPLY_S = 1.0
BUFFER = 1 << 17


@dataclass(frozen=True, slots=True)
class Traffic:
    """One established connection since it was made.

    Attributes:
        peer: the other end's address, in digits.
        inode: of the socket, as ``/proc/<pid>/fd`` shows it.
        busy_s: time in which there was something to send and the network, not the receiver, did not take it.
    """

    peer: str
    inode: int
    bytes: int
    resent: int
    rtt_ms: float
    busy_s: float


def connections() -> list[Traffic]:
    """All established TCP connections of this network namespace to other addresses than their own.

    Raises:
        OSError: the kernel has no such books, or does not show them.
    """
    return [one for family in (socket.AF_INET, socket.AF_INET6) for one in _ask(family)]


def sockets_of(pid: int) -> frozenset[int]:
    """Inodes of a process's sockets; empty when it is gone or not ours."""
    found = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return frozenset()
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return frozenset(found)


def _ask(family: int) -> Iterator[Traffic]:
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED, b"")
    request = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_REQUEST_DUMP, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4) as sock:
        sock.settimeout(REPLY_S)
        sock.sendto(request, (0, 0))
        while True:
            data = sock.recv(BUFFER)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, _, _, _ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                    raise OSError(code, f"sock_diag: {os.strerror(code)}")
                found = parse(data[at + _HEADER.size : at + length])
                if found is not None:
                    yield found
                at += max(length + 3 & ~3, _HEADER.size)


def parse(message: bytes) -> Traffic | None:
    """One ``inet_diag_msg`` with its attributes; ``None`` for a connection to oneself or without books."""
    if len(message) < _MESSAGE_BYTES:
        return None
    family = message[0]
    size = 4 if family == socket.AF_INET else 16
    source, peer = message[8 : 8 + size], message[24 : 24 + size]
    (inode,) = struct.unpack_from("=I", message, 68)
    info = _attribute(message[_MESSAGE_BYTES:], _INFO)
    if source == peer or len(info) < _WINDOW_LIMITED + 8:
        return None
    (rtt,) = struct.unpack_from("=I", info, _RTT)
    (resent,) = struct.unpack_from("=I", info, _TOTAL_RESENT)
    (acked,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    busy, limited = struct.unpack_from("=QQ", info, _BUSY)
    return Traffic(
        peer=_digits(family, peer),
        inode=inode,
        bytes=acked,
        resent=resent,
        rtt_ms=rtt / 1000,
        busy_s=max(0, busy - limited) / 1e6,
    )


def _digits(family: int, address: bytes) -> str:
    if family == socket.AF_INET6 and address.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, address[12:])
    return socket.inet_ntop(family, address)


def _attribute(data: bytes, wanted: int) -> bytes:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if kind == wanted:
            return data[at + 4 : at + length]
        at += max(length + 3 & ~3, 4)
    return b""
