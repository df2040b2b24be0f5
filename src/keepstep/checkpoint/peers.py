"""Keepers' words, and the client that a newcomer uses to fetch its rank's state from another node.

A request is a frame of ``model.wire``'s shape, and gets an ``Answer``; after ``Get`` and ``Put`` follows the
transfer of one version (``transfer``). The connection ends with it; only after a ``Put`` that went well it may carry
another request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.checkpoint.arrival import Shelf
from keepstep.checkpoint.exceptions import PeerRefused, PeerUnreachable
from keepstep.checkpoint.line import SILENCE_S, Line
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.transfer import receive
from keepstep.model.ids import JobId
from keepstep.model.wire import Frame

FETCH_TRIES = 3
"""Connections for one version; each goes on with the first chunk that has not arrived yet."""


class Request(Frame, frozen=True, kw_only=True):
    """``epoch`` and ``key`` fence: a keeper refuses words of a roster older than its own, or of its rival."""

    job: JobId
    token: str
    epoch: int
    key: str
    rank: int


class Have(Request, frozen=True, kw_only=True):
    """Which complete versions of this rank are there?"""


class Get(Request, frozen=True, kw_only=True):
    version: Version


class Put(Request, frozen=True, kw_only=True):
    """Keep this version of ``size`` bytes for me."""

    version: Version
    size: int


class Answer(Frame, frozen=True, kw_only=True):
    ok: bool
    why: str = ""
    versions: tuple[Version, ...] = ()
    size: int = 0


KeeperRequest = Have | Get | Put


def hear_answer(line: Line, *, patience_s: float = SILENCE_S) -> Answer:
    """Raises ``PeerRefused`` with the other's sentence."""
    answer: Answer = line.hear(Answer, patience_s=patience_s)
    if not answer.ok:
        raise PeerRefused(f"{line.who}: {answer.why}")
    return answer


class PeerClient:
    """Talks to one keeper with blocking sockets; every wait has a limit and asks ``stop`` in between.

    Args:
        stop: true when the caller has something more urgent; the transfer then ends with ``PeerUnreachable``.
    """

    def __init__(
        self, *, host: str, port: int, job: JobId, token: str, epoch: int, key: str, stop: Callable[[], bool]
    ) -> None:
        self._host, self._port, self._stop = host, port, stop
        self._base: dict[str, Any] = {"job": job, "token": token, "epoch": epoch, "key": key}

    def have(self, rank: int) -> tuple[Version, ...]:
        """Complete versions of ``rank`` over there, newest first."""
        with Line.dial(self._host, self._port, self._stop) as line:
            line.say(Have(**self._base, rank=rank))
            return hear_answer(line).versions

    def fetch(
        self,
        rank: int,
        version: Version,
        directory: Path,
        progress: Callable[[int, int], None] = lambda done, size: None,
    ) -> Path:
        """Bring one version into ``directory`` (as this rank's own) and return its file.

        Args:
            progress: called after each chunk with the bytes that are here and their number in the end.

        Raises:
            PeerRefused: the keeper does not have it, or does not give it.
            PeerUnreachable: there is no connection, or it broke ``FETCH_TRIES`` times.
            SlotDamaged: what came did not match its checksums, however often it was asked for.
            SlotFull: there is no room for it here.
        """
        shelf = Shelf(directory, rank, trusted=False)
        try:
            for left in reversed(range(FETCH_TRIES)):
                before = shelf.received
                try:
                    with Line.dial(self._host, self._port, self._stop) as line:
                        line.say(Get(**self._base, rank=rank, version=version))
                        hear_answer(line)
                        return receive(line, shelf, version, progress=progress)
                except PeerUnreachable:
                    # One that cannot be reached, or gives nothing, is not asked again: another holder may be near.
                    if not left or self._stop() or shelf.received <= before:
                        raise
            raise AssertionError("the last try returns or raises")
        finally:
            shelf.close()
