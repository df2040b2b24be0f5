"""Notes: what trainers, keeper and archiver say about checkpoints, on its way to the job's log.

A note is a datagram to the agent. Nobody waits for it and nobody depends on it: the checkpoints themselves are the
truth, the log tells their story.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from keepstep.model.env import NOTES_SOCKET

What = Literal["saved", "verified", "skipped", "damaged", "gap", "closed", "interval", "expired", "restored"]
TierLabel = Literal["memory", "peer", "local", "remote"]
MAX_NOTE = 16 * 1024
"""Bytes of one datagram."""
MAX_WHY = 500
"""Characters of an explanation; the rest is cut."""


class Note(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As ``CheckpointNoted``, which the agent makes of it by adding job, node and time."""

    what: What
    tier: TierLabel
    step: int
    rank: int | None = None
    why: str = ""
    bytes: int = 0
    seconds: float = 0.0


class Teller:
    """Sends notes from one process. Never waits, never fails."""

    def __init__(self, node_dir: Path) -> None:
        self._to = str(node_dir / NOTES_SOCKET)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def tell(self, note: Note) -> None:
        short = msgspec.structs.replace(note, why=note.why[:MAX_WHY])
        with contextlib.suppress(OSError):
            self._socket.sendto(msgspec.msgpack.encode(short), self._to)

    def close(self) -> None:
        self._socket.close()


def read(data: bytes) -> Note | None:
    """A note from a datagram; ``None`` for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=Note)
    except msgspec.DecodeError:
        return None
