"""Line: one connection between keepers, or of a newcomer to one: frames and raw bytes on a blocking socket.

Every wait is cut into ticks, so that it ends when nothing has moved for too long, or when the caller has something
more urgent. Bulk goes from a file's pages into the socket and from the socket into mapped memory, without a copy of
our own in between.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from keepstep.checkpoint.exceptions import PeerUnreachable, SlotInvalid
from keepstep.model.wire import Frame, pack

TICK_S = 0.1
"""How long a call may block before the caller is asked whether it still wants this."""
SILENCE_S = 10.0
"""A transfer in which nothing moves for this long has broken off."""
CONNECT_S = 2.0
"""How long a keeper may take to accept a connection."""
MAX_REQUEST = 64 * 1024
"""Bytes of a frame between keepers; more is not one of their words."""
BUFFER_BYTES = 4 * 1024 * 1024
"""Socket buffers are asked for where the kernel would not let them grow to this by itself."""
WAKE_BYTES = 512 * 1024
"""While much more than this is to come, a reader is woken for so much at a time: a third more bytes per second and
core than with a wake-up for each segment (measured over loopback)."""
_LENGTH = struct.Struct(">I")
_TICK = struct.pack("@ll", 0, int(TICK_S * 1_000_000))


class Line:
    """One end of a connection.

    Args:
        sock: connected; belongs to this object from here on.
        who: what people call the other end.
        stop: true when the caller has something more urgent; any wait then ends with ``PeerUnreachable``.
    """

    def __init__(self, sock: socket.socket, who: str, stop: Callable[[], bool] = lambda: False) -> None:
        self.who, self._stop, self._socket = who, stop, sock
        self._cut = False
        self._to_come, self._wake_bytes = 0, 1
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            widen(sock)

    @classmethod
    def dial(cls, host: str, port: int, stop: Callable[[], bool] = lambda: False) -> Line:
        """Connect to a keeper."""
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
        except OSError as error:
            raise PeerUnreachable(f"keeper {host}:{port} cannot be reached: {error}") from error
        return cls(sock, f"keeper {host}:{port}", stop)

    def idle(self, timeout_s: float) -> bool:
        """Wait for something to happen on a line on which nothing is owed; true when there is something to read.

        The end of the connection is something to read, too. Costs no processor time meanwhile.
        """
        self._wake_for(1)  # what is left over from the last bulk would hold a poll up as it holds up a read
        waiter = select.poll()
        waiter.register(self._socket, select.POLLIN)
        return bool(waiter.poll(timeout_s * 1000))

    # ---------------------------------------------------------------- words

    def say(self, frame: Frame) -> None:
        self.send(pack(frame))

    def hear(self, union: Any, *, patience_s: float = SILENCE_S) -> Any:
        """The next frame, which must be one of ``union``.

        Raises:
            PeerUnreachable: it did not come in time, or is something else.
        """
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size, patience_s))
        if length > MAX_REQUEST:
            raise PeerUnreachable(f"{self.who} does not speak like a keeper: a word of {length} bytes")
        body = self.read(length)
        try:
            return msgspec.msgpack.decode(body, type=union)
        except msgspec.DecodeError as error:
            raise PeerUnreachable(f"{self.who} does not speak like a keeper of this version: {error}") from error

    # ---------------------------------------------------------------- bytes

    def send(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as view:
            sent, waiting = 0, _Patience(self, SILENCE_S)
            while sent < len(view):
                try:
                    sent += self._socket.send(view[sent:])
                    waiting.moved()
                except BlockingIOError:
                    waiting.tick()
                except OSError as error:
                    raise PeerUnreachable(f"{self.who} broke off: {error}") from error

    def send_file(self, fd: int, start: int, end: int) -> None:
        """Bytes of a file in memory, straight from its pages: a quarter less processor time than from a mapping.

        What is overwritten before the other end has it arrives as something else, which its checksum tells.
        """
        waiting = _Patience(self, SILENCE_S)
        while start < end:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, start, end - start)
            except BlockingIOError:
                waiting.tick()
                continue
            except OSError as error:
                raise PeerUnreachable(f"{self.who} broke off: {error}") from error
            if not sent:
                raise SlotInvalid(f"a file that is being sent ends at byte {start}, not {end}")
            start += sent
            waiting.moved()

    def read(self, size: int, patience_s: float = SILENCE_S) -> bytearray:
        data = bytearray(size)
        with memoryview(data) as view:
            self.read_into(view, patience_s)
        return data

    def expect(self, size: int) -> None:
        """Raw bytes that are known to come: the next calls of ``read_into`` take them in large helpings."""
        self._to_come = size

    def read_into(self, view: memoryview, patience_s: float = SILENCE_S) -> None:
        """Fill ``view``, straight from the socket."""
        at, size, waiting = 0, len(view), _Patience(self, patience_s)
        while at < size:
            self._wake_for(WAKE_BYTES if self._to_come >= WAKE_BYTES else 1)
            try:
                got = self._socket.recv_into(view[at:])
            except BlockingIOError:
                waiting.tick()
                continue
            except OSError as error:
                raise PeerUnreachable(f"{self.who} broke off: {error}") from error
            if not got:
                raise PeerUnreachable(f"{self.who} closed the connection early")
            at += got
            self._to_come = max(0, self._to_come - got)
            waiting.moved()

    def _wake_for(self, size: int) -> None:
        """Linux does not wake a reader before so much is there, even one that asks for less: never more than comes."""
        if size != self._wake_bytes:
            self._wake_bytes = size
            with contextlib.suppress(OSError):  # a socket that has been cut; reading it will tell
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    # ---------------------------------------------------------------- the end

    def wanted(self) -> bool:
        return not self._cut and not self._stop()

    def cut(self) -> None:
        """From any thread: whoever waits on this line leaves it at once."""
        self._cut = True
        with contextlib.suppress(OSError):  # it was broken already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Patience:
    """How long nothing has moved in one call."""

    def __init__(self, line: Line, limit_s: float) -> None:
        self._line, self._limit_s = line, limit_s
        self._since = time.monotonic()
        self.moved()

    def moved(self) -> None:
        if not self._line.wanted():
            raise PeerUnreachable(f"{self._line.who} is no longer needed")
        self._since = time.monotonic()

    def tick(self) -> None:
        if not self._line.wanted() or time.monotonic() - self._since > self._limit_s:
            raise PeerUnreachable(f"{self._line.who} went silent or is no longer needed")


def widen(sock: socket.socket) -> None:
    """Large buffers. A size that is asked for is fixed, so the kernel's own growth is left alone where it suffices."""
    for name, option in (("tcp_rmem", socket.SO_RCVBUF), ("tcp_wmem", socket.SO_SNDBUF)):
        if _ceiling(name) < BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


@functools.cache
def _ceiling(name: str) -> int:
    """To which size the kernel lets a socket's buffer grow by itself."""
    try:
        return int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return BUFFER_BYTES
