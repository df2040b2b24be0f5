"""JSON lines over a local socket for a loop that must never block: whole messages come in, a bounded buffer goes out.

Only the standard library, as everything that the shim is made of.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT_BYTES = 4 * 1024 * 1024
"""Whoever lets this much pile up is not reading; it is cut off and may connect again."""
LINE_BYTES = 4 * 1024 * 1024
"""Longest message; whoever sends more without a line's end is cut off."""
READ_BYTES = 256 * 1024
WAITING = 8
"""Connections that the kernel keeps for us until we accept them."""

Message = dict[str, Any]


class Lines:
    """One stream. The selector's owner calls ``serve`` when it says so; the key's ``data`` is this object.

    Args:
        on_message: takes each message, in order.
        on_end: called once, when the other side has hung up or has been cut off.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_message: Callable[[Message], None],
        on_end: Callable[[Lines], None],
    ) -> None:
        self.sock = sock
        self._selector = selector
        self._on_message = on_message
        self._on_end = on_end
        self._inbox = bytearray()
        self._outbox = bytearray()
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def serve(self, mask: int) -> None:
        """Read and write what can be read and written at once."""
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop()
            return
        self._inbox += data
        while (end := self._inbox.find(b"\n")) >= 0:
            line = bytes(self._inbox[:end])
            del self._inbox[: end + 1]
            self._on_message(json.loads(line))
        if len(self._inbox) > LINE_BYTES:
            self.drop()

    def say(self, message: Message) -> None:
        """Send a message now, or as soon as there is room for it."""
        self._outbox += json.dumps(message).encode() + b"\n"
        self._flush()
        if len(self._outbox) > OUT_BYTES:
            self.drop()

    def drop(self) -> None:
        """Hang up, and say so to our own side."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self.sock)
        self.sock.close()
        self._on_end(self)

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = self.sock.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(self.sock, events, self)


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at ``path``, in place of one that a dead process has left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener.bind(str(path))
    listener.listen(WAITING)
    listener.setblocking(False)
    return listener
