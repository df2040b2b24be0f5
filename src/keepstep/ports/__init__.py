"""Ports: what the mind and the shells expect of the world, as Protocols."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from keepstep.model.ids import Nanos
from keepstep.model.records import AnyRecord


class Entry(Struct, frozen=True, kw_only=True):
    """One record in the log; ``seq`` counts from 1 without gaps."""

    seq: int
    record: AnyRecord


class EventLog(Protocol):
    """Append-only log of one controller.

    ``append`` is atomic: all records or none, durable when it returns. Errors are of ``keepstep.store.exceptions``.
    """

    def append(self, records: Sequence[AnyRecord], *, expected: int) -> int:
        """Append after entry ``expected`` (0 for an empty log) and return the new last sequence number.

        Raises:
            SequenceConflict: somebody else has appended; nothing was written.
            LogFull: no space; nothing was written.
        """
        ...

    def read(self, *, after: int = 0, limit: int | None = None) -> Iterator[Entry]: ...

    def last(self) -> int: ...

    def save_snapshot(self, seq: int, state: bytes) -> None: ...

    def load_snapshot(self) -> tuple[int, bytes] | None: ...

    def close(self) -> None: ...


class Clock(Protocol):
    """Wall time that never runs backwards within a process."""

    def now(self) -> Nanos: ...
