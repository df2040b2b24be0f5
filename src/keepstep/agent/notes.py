"""Notes' door: what trainers, keeper and archiver say about checkpoints becomes facts, few enough for a log.

A note is worth a line in the story of a job, not a thousand: of those that are alike (same event, tier and rank) one
passes at once, and while it is fresh only the newest of its followers is kept and told later, with their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from keepstep.agent.node import Node
from keepstep.checkpoint.limiter import Limiter
from keepstep.checkpoint.notes import MAX_NOTE, Note, read
from keepstep.model import env as names
from keepstep.model.facts import CheckpointNoted
from keepstep.model.ids import Rank

NOTES_PER_TURN = 256
"""Datagrams read at once before the agent looks at its other work."""
DURABLE = ("local", "remote")
"""Tiers whose troubles are said at the terminal; those of memory are said by the ranks."""


class NotesDoor:
    """The datagram socket in the node directory."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._limiter = Limiter()
        self._told: set[str] = set()
        """Tiers whose trouble people have been told and that have not worked since."""
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
            if note is None:
                continue
            self._tell(note)  # as it comes: what is kept back for the log is late, and out of its order
            if (passed := self._limiter.offer(note, now)) is not None:
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

    def _tell(self, note: Note) -> None:
        """What is not written any more is said at the terminal, once until it works again: a run that nobody looks at
        closely would be without checkpoints for days."""
        if note.tier not in DURABLE:
            return
        if note.what == "saved" and note.tier in self._told:
            self._told.discard(note.tier)
            self._node.say(f"checkpoints are written again, step {note.step} is durable ({note.tier} tier)")
        elif note.what == "skipped" and note.tier not in self._told:
            self._told.add(note.tier)
            self._node.say(
                f"the checkpoint of step {note.step} is left out: {note.why}; training goes on, "
                f"`keepstep ckpt ls --job {self._node.job}` shows what there is"
            )

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
