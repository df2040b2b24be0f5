"""What an examination has done so far, line by line: written down and synced before anything follows from it.

One JSON object per line: how it began, each round that was ordered, the outcome of each group, the judgement on each
round, the end. A process that was killed at any point goes on from there: groups that have an outcome are not run
again, and a torn last line is cut off. One process writes a record at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct

from keepstep.core.locate.replay import Phase
from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Terms, Verdict
from keepstep.model.ids import NodeId
from keepstep.probes.exceptions import ForeignRecord, UnreadableRecord
from keepstep.probes.groups import Job, Outcome

SCHEMA = 1


class Begun(Struct, frozen=True, kw_only=True, tag=True):
    """What is searched and how; a record is only gone on with under the same words."""

    schema: int
    machines: tuple[NodeId, ...]
    suspicion: dict[NodeId, float]
    terms: Terms
    prior: Prior
    job: Job


class Ordered(Struct, frozen=True, kw_only=True, tag=True):
    """A round, to be repeated until a group fails."""

    step: int
    phase: Phase
    repeats: int
    reason: str


class Ran(Struct, frozen=True, kw_only=True, tag=True):
    """One group of one repeat."""

    step: int
    repeat: int
    outcome: Outcome


class Judged(Struct, frozen=True, kw_only=True, tag=True):
    """All groups of one repeat, results compared."""

    step: int
    repeat: int
    failed: tuple[int, ...]
    void: tuple[int, ...]
    reasons: tuple[str, ...]


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    verdict: Verdict


Line = Begun | Ordered | Ran | Judged | Ended
_decoder = msgspec.json.Decoder(Line)


class Record:
    """The file, locked for this process until it is closed; ``lines`` is what it held when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.lines = self._read()
        except BlockingIOError:
            os.close(self._fd)
            raise ForeignRecord(
                f"{path} is being written by another process; wait for it, or use another file"
            ) from None
        except BaseException:
            os.close(self._fd)
            raise
        self._sync_folder()

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def append(self, line: Line) -> None:
        """Durable when it returns."""
        data = msgspec.json.encode(line) + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def _read(self) -> list[Line]:
        with open(self._fd, "rb", closefd=False) as file:
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._fd, whole)
        os.lseek(self._fd, whole, os.SEEK_SET)
        lines: list[Line] = []
        for number, text in enumerate(data[:whole].splitlines(), 1):
            try:
                lines.append(_decoder.decode(text))
            except (msgspec.MsgspecError, ValueError) as error:
                raise UnreadableRecord(f"{self.path}:{number}: {error}; move the file away to begin anew") from error
        if lines and not (isinstance(lines[0], Begun) and lines[0].schema == SCHEMA):
            raise UnreadableRecord(f"{self.path}:1: not the beginning of a record of version {SCHEMA}")
        return lines

    def _sync_folder(self) -> None:
        with contextlib.suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
