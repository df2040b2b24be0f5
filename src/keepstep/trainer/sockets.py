"""Sockets of a communicator: find them, and end them without closing them.

Gloo gives no handle to its connections. They are found by looking at what appeared in ``/proc/self/fd`` while a
communicator was built, and told apart from anybody else's by the send and receive timeouts that gloo sets.
``shutdown(2)`` then ends a connection at once for both sides while the descriptor stays its owner's. A listening
socket is never touched: gloo ends the process when its listener breaks.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

_TIMEVAL = struct.Struct("ll")
_FD_DIR = "/proc/self/fd"


class Handle(NamedTuple):
    """A socket by descriptor and inode: the pair tells whether the descriptor has been reused since."""

    fd: int
    inode: int


def open_sockets() -> set[Handle]:
    """All sockets of this process."""
    found = set()
    for name in os.listdir(_FD_DIR):
        try:
            target = os.readlink(f"{_FD_DIR}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(Handle(int(name), int(target[8:-1])))
    return found


def connected(handles: Iterable[Handle], wanted: Callable[[socket.socket], bool]) -> tuple[Handle, ...]:
    """Those of ``handles`` that are connected TCP sockets and ``wanted``."""
    return tuple(sorted(h for h in handles if _with_socket(h, lambda s: _is_tcp_peer(s) and wanted(s))))


def has_timeout(milliseconds: int) -> Callable[[socket.socket], bool]:
    """True for sockets whose send timeout is ``milliseconds``: the mark that gloo leaves on its connections."""
    # The kernel keeps timeouts in ticks of down to 100 per second and rounds up.
    slack_ms = 10

    def check(sock: socket.socket) -> bool:
        seconds, micros = _TIMEVAL.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.size))
        return bool(0 <= seconds * 1000 + micros // 1000 - milliseconds <= slack_ms)

    return check


def has_peer_port(port: int) -> Callable[[socket.socket], bool]:
    """True for sockets whose other end is ``port``."""
    return lambda sock: bool(sock.getpeername()[1] == port)


def listening_address(handle: Handle) -> str | None:
    """The address of a listening TCP socket, in digits; ``None`` for any other socket and for a wildcard."""
    found: list[str] = []

    def look(sock: socket.socket) -> bool:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            address = str(sock.getsockname()[0])
            if address not in ("0.0.0.0", "::"):
                found.append(address)
        return True

    _with_socket(handle, look)
    return found[0] if found else None


def shut_down(handles: Iterable[Handle]) -> int:
    """End each connection for both sides; descriptors that now mean something else are left alone.

    Returns:
        How many connections were ended.
    """
    return sum(_with_socket(h, _shutdown) for h in handles)


def _shutdown(sock: socket.socket) -> bool:
    if not _is_tcp_peer(sock):
        return False
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _is_tcp_peer(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _with_socket(handle: Handle, use: Callable[[socket.socket], bool]) -> bool:
    """Use a duplicate of the descriptor, verified after duplication, so that reuse in between cannot fool us."""
    try:
        copy = os.dup(handle.fd)
    except OSError:
        return False
    try:
        if os.fstat(copy).st_ino != handle.inode:
            return False
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    try:
        return bool(use(sock))
    except OSError:
        return False
    finally:
        sock.close()
