"""The door of the keeper: one thread per connection, one request after another, nobody served who is not let in.

A sender of replicas keeps its connection (``keeper_wire``). Each request carries what fences it, whatever was let in
before it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import CheckpointError, SlotInvalid
from keepstep.checkpoint.keeper_take import Inbox
from keepstep.checkpoint.line import Line
from keepstep.checkpoint.peers import Answer, Get, Have, KeeperRequest, Put
from keepstep.checkpoint.scrub import Traffic
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.transfer import send

MAX_CONNECTIONS = 64
"""At the same time; whoever comes then is told so."""
IDLE_S = 150.0
"""A connection without a request for this long is closed; a sender's next version opens another one."""


class Desk:
    """Answers other keepers and newcomers.

    Args:
        directories: where complete versions may lie.
        let_in: why a request must not be served, in a sentence; empty where it may.
    """

    def __init__(
        self,
        directories: tuple[Path, ...],
        *,
        let_in: Callable[[KeeperRequest], str],
        inbox: Inbox,
        traffic: Traffic,
        say: Callable[[str, str], None],
    ) -> None:
        self._directories, self._let_in, self._inbox = directories, let_in, inbox
        self._traffic, self._say = traffic, say
        self._open, self._lock = 0, threading.Lock()

    def accept(self, server: socket.socket) -> None:
        """Somebody is at the door."""
        with contextlib.suppress(OSError):  # gone again, or no file descriptor left: it will try again
            sock, address = server.accept()
            threading.Thread(target=self._serve, args=(sock, f"peer {address[0]}"), daemon=True).start()

    def _serve(self, sock: socket.socket, who: str) -> None:
        with self._lock:
            self._open += 1
            crowded = self._open > MAX_CONNECTIONS
        try:
            with Line(sock, who) as line:
                if crowded:
                    line.say(Answer(ok=False, why=f"{MAX_CONNECTIONS} transfers are open already; try again"))
                else:
                    while self._answer(line, line.hear(KeeperRequest)) and line.idle(IDLE_S):
                        pass
        except (OSError, CheckpointError):
            pass  # the peer is gone or speaks nonsense: nothing was completed, nobody waits
        finally:
            with self._lock:
                self._open -= 1

    def _answer(self, line: Line, request: KeeperRequest) -> bool:
        """Whether the line can carry another request."""
        if why := self._let_in(request):
            line.say(Answer(ok=False, why=why))
            return False
        match request:
            case Have():
                versions = dict.fromkeys(version for version, _ in self._held(request.rank))
                line.say(Answer(ok=True, versions=tuple(versions)))
            case Get():
                with self._traffic:
                    self._give(line, request)
            case Put():
                with self._traffic:
                    return self._inbox.take(line, request)
        return False

    def _held(self, rank: int) -> list[tuple[Version, Path]]:
        held = [found for directory in self._directories for found in pair.look(directory, rank)]
        return sorted(held, key=lambda item: item[0], reverse=True)

    def _give(self, line: Line, request: Get) -> None:
        """A newcomer waits for this: no budget holds it back."""
        path = next((p for v, p in self._held(request.rank) if v == request.version), None)
        try:
            if path is None:
                raise SlotInvalid(f"no version of step {request.version.step} of rank {request.rank} here")
            slot = Slot(path)
        except SlotInvalid as error:
            line.say(Answer(ok=False, why=str(error)))
            return
        with contextlib.closing(slot):
            try:
                if not slot.sealed:
                    slot.seal()
            except SlotInvalid as error:
                line.say(Answer(ok=False, why=str(error)))
                return
            line.say(Answer(ok=True, size=slot.used))
            try:
                send(line, slot, request.version)
            except SlotInvalid as error:  # overwritten, or not to be had undamaged: the newcomer knows, or sees the end
                self._say(f"give {request.rank}", str(error))
