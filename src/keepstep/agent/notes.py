"""Notes' door: what trainers, keeper and archiver say about checkpoints becomes facts, few enough for a log.

A note is worth a line in the story of a job, not a thousand: of those that are alike (same event, tier and rank) one
passes at once, and while it is fresh only the newest of its followers is kept and told later, with their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import msgspec

from keepstep.agent.node import Node
from keepstep.checkpoint.notes import MAX_NOTE, Note, read
from keepstep.model import env as names
from keepstep.model.facts import CheckpointNoted
from keepstep.model.ids import Rank

ALIKE_S = 5.0
"""Of notes that are alike one reaches the log in this time."""
MAX_KINDS = 4096
"""Kinds of notes that are told apart; a note of yet another kind is dropped until older ones are forgotten."""
NOTES_PER_TURN = 256
"""Datagrams read at once before the agent looks at its other work."""

Kind = tuple[str, str, int | None]


class Limiter:
    """Which notes pass when. Pure: the caller brings the time."""

    def __init__(self, alike_s: float = ALIKE_S) -> None:
        self._alike_s = alike_s
        self._until: dict[Kind, float] = {}
        self._kept: dict[Kind, tuple[Note, int]] = {}

    def offer(self, note: Note, now: float) -> Note | None:
        """The note, if it may pass now; else it is kept in place of an older one of its kind."""
        kind: Kind = (note.what, note.tier, note.rank)
        if kind not in self._kept and self._until.get(kind, now) <= now:
            if kind not in self._until and len(self._until) >= MAX_KINDS and not self._forget(now):
                return None
            self._until[kind] = now + self._alike_s
            return note
        _, count = self._kept.get(kind, (note, 0))
        self._kept[kind] = (note, count + 1)
        return None

    def due(self, now: float) -> list[Note]:
        """Kept notes whose time has come."""
        ready = [kind for kind in self._kept if self._until[kind] <= now]
        for kind in ready:
            self._until[kind] = now + self._alike_s
        return [self._take(kind) for kind in ready]

    def all(self) -> list[Note]:
        """All kept notes, whatever the time: nobody will ask again."""
        return [self._take(kind) for kind in list(self._kept)]

    @property
    def next_due(self) -> float | None:
        return min((self._until[kind] for kind in self._kept), default=None)

    def _take(self, kind: Kind) -> Note:
        note, count = self._kept.pop(kind)
        if count == 1:
            return note
        more = f"{count - 1} more like this before it"
        return msgspec.structs.replace(note, why=f"{note.why}; {more}" if note.why else more)

    def _forget(self, now: float) -> bool:
        """Drop kinds that have been quiet; true when that made room."""
        for kind in [k for k, until in self._until.items() if until <= now and k not in self._kept]:
            del self._until[kind]
        return len(self._until) < MAX_KINDS


class NotesDoor:
    """The datagram socket in the node directory."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._limiter = Limiter()
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Listen. Without this door only the log is poorer; what goes wrong with it is said and endured."""
        path = self._node.dir / names.NOTES_SOCKET
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.bind(str(path))
            os.chmod(path, 0o600)
        except OSError as error:
            sock.close()
            self._node.say(f"notes about checkpoints will not reach the log: {path}: {error.strerror}")
            return
        self._socket = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)

    def close(self) -> None:
        """What has been said so far is told; nothing is listened to any more."""
        if self._socket is None:
            return
        self._read()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        if self._timer is not None:
            self._timer.cancel()
        for note in self._limiter.all():
            self._report(note)

    def flush(self) -> None:
        """Tell what is kept: the job ends, and the controller shall hear the last word."""
        if self._socket is not None:
            self._read()
        for note in self._limiter.all():
            self._report(note)

    def _read(self) -> None:
        assert self._socket is not None
        now = asyncio.get_running_loop().time()
        for _ in range(NOTES_PER_TURN):
            try:
                data = self._socket.recv(MAX_NOTE)
            except OSError:
                break
            note = read(data)
            if note is not None and (passed := self._limiter.offer(note, now)) is not None:
                self._report(passed)
        self._wake(now)

    def _wake(self, now: float) -> None:
        due = self._limiter.next_due
        if due is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._late)

    def _late(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for note in self._limiter.due(now):
            self._report(note)
        self._wake(now)

    def _report(self, note: Note) -> None:
        self._node.report(
            CheckpointNoted,
            what=note.what,
            tier=note.tier,
            step=note.step,
            rank=None if note.rank is None else Rank(note.rank),
            why=note.why,
            bytes=note.bytes,
            seconds=note.seconds,
        )
