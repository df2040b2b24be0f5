"""One agent's connection: frames in, frames out, nothing decided.

Buffers are bounded in both directions. What an agent sends while the writer's queue is full stays in its own outbox
(we stop reading); an agent that does not read what we send is cut off, and finds all of it again when it reconnects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import structlog

from keepstep.controlplane.leases import NodeKey
from keepstep.model import exits
from keepstep.model.actions import AnyAction
from keepstep.model.wire import (
    Acked,
    AgentHello,
    AgentToController,
    Frame,
    FrameError,
    Orders,
    Refused,
    Reports,
    Unpacker,
    pack,
)

HELLO_TIMEOUT_S = 5.0
HELLO_BYTES = 256 * 1024
"""A connection that has sent this much without a complete hello is not an agent's."""
REFUSED_LINGER_S = 1.0
"""How long an agent that was refused may take to read why and to hang up itself."""
OUTGOING_LIMIT = 8 * 1024 * 1024
"""Bytes that may wait for an agent to read them; one roster of 50,000 ranks is about as long."""

log = structlog.get_logger(__name__)


class Desk(Protocol):
    """Who takes care of what a connection brings (``agents.AgentDesk``)."""

    def opened(self, connection: AgentConnection) -> bool: ...
    def hello(self, connection: AgentConnection, hello: AgentHello) -> None: ...
    def reports(self, connection: AgentConnection, reports: Reports) -> bool:
        """False when there is no room at the moment; the same reports are offered again after ``resume``."""
        ...

    def closed(self, connection: AgentConnection, why: str) -> None: ...


class AgentConnection(asyncio.Protocol):
    """States: waiting for the hello; then (``key`` set) letting reports through, or paused with some in hand."""

    def __init__(self, desk: Desk) -> None:
        self.key: NodeKey | None = None
        self.boot = ""
        self.peer = ""
        self.address = ""
        """The peer without its port."""
        self.paused = False
        self._desk = desk
        self._transport: asyncio.Transport | None = None
        self._unpacker: Unpacker[AgentHello | Reports] = Unpacker(AgentToController)
        self._held: deque[Reports] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._before_hello = 0
        self._refused = False
        self._why = "connection closed by the agent"

    # ------------------------------------------------------------ from asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self.peer = _show_peer(name)
        self.address = str(name[0]) if isinstance(name, tuple) and name else ""
        if not self._desk.opened(self):
            self._transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HELLO_TIMEOUT_S, self.drop, f"no hello within {HELLO_TIMEOUT_S} s")

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        try:
            if self.key is None:
                self._before_hello += len(data)
                if self._before_hello > HELLO_BYTES:
                    raise FrameError(f"no complete hello within {HELLO_BYTES} bytes; not an agent?")
            for frame in self._unpacker.feed(data):
                self._frame(frame)
                if self._refused or self._transport is None or self._transport.is_closing():
                    return
        except FrameError as error:
            if self.key is None:
                self.refuse(str(error), code=exits.BAD_CONFIG)
            else:
                self.drop(str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._cancel_timer()
        self._held.clear()
        self._desk.closed(self, f"connection lost: {error}" if error else self._why)

    # ------------------------------------------------------------ from the desk

    def accept(self, key: NodeKey, boot: str) -> None:
        self.key, self.boot = key, boot
        self._cancel_timer()

    def refuse(self, why: str, *, code: int) -> None:
        """Say why, and hang up.

        Only our half of the connection is closed at once. Closing all of it while the peer still sends would make the
        kernel reset it, and a reset discards the very sentence on its way (RFC 1122, 4.2.2.13).
        """
        log.warning("agent refused", peer=self.peer, why=why, code=code)
        self._why = f"refused: {why}"
        self.send(Refused(why=why, code=code))
        self._refused = True
        self._cancel_timer()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
            self._timer = asyncio.get_running_loop().call_later(REFUSED_LINGER_S, self.drop, self._why)

    def drop(self, why: str) -> None:
        """Hang up at once; whatever was still to be sent is repeated when the agent reconnects."""
        self._why = why
        if self._transport is not None:
            log.warning("connection dropped", peer=self.peer, key=self.key, why=why)
            self._transport.abort()

    def acknowledge(self, seq: int) -> None:
        self.send(Acked(seq=seq))

    def order(self, actions: Sequence[AnyAction]) -> None:
        self.send(Orders(actions=tuple(actions)))

    def send(self, frame: Frame) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._refused:
            return
        try:
            transport.write(pack(frame))
        except FrameError as error:
            log.error("cannot be sent", key=self.key, frame=type(frame).__name__, error=str(error))
            self.drop(f"{type(frame).__name__} cannot be sent: {error}")
            return
        waiting = transport.get_write_buffer_size()
        if waiting > OUTGOING_LIMIT:
            self.drop(f"the agent does not read: {waiting} bytes wait, the limit is {OUTGOING_LIMIT}")

    def resume(self) -> None:
        """There is room again: deliver what is in hand, then read on."""
        while self._held:
            if not self._desk.reports(self, self._held[0]):
                return
            self._held.popleft()
        self.paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _frame(self, frame: AgentHello | Reports) -> None:
        match frame:
            case AgentHello() if self.key is None:
                self._desk.hello(self, frame)
            case Reports() if self.key is not None:
                if self.paused or not self._desk.reports(self, frame):
                    self._hold(frame)
            case _:
                raise FrameError(f"{type(frame).__name__} out of turn: a hello comes first, and once")

    def _hold(self, reports: Reports) -> None:
        """Keep what one read brought (at most a receive buffer full) and read no more."""
        self._held.append(reports)
        if not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _show_peer(name: object) -> str:
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else str(name or "unknown")
