"""A log in memory, of the same shape as the one on disk: for tests, rehearsals and replays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice

from keepstep.model.records import AnyRecord, decode_record, encode_record
from keepstep.ports import Entry
from keepstep.store.exceptions import LogFull, SequenceConflict

SNAPSHOTS_KEPT = 2


class MemoryLog:
    """Keeps encoded records, so that whatever could not be written to disk cannot be written here either.

    Args:
        max_entries: raise ``LogFull`` beyond this many; assign a larger number (or ``None``) to make room.
    """

    def __init__(self, *, max_entries: int | None = None) -> None:
        self.max_entries = max_entries
        self._entries: list[bytes] = []
        self._snapshots: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def append(self, records: Sequence[AnyRecord], *, expected: int) -> int:
        encoded = [encode_record(record) for record in records]
        with self._lock:
            last = len(self._entries)
            if expected != last:
                raise SequenceConflict(f"log in memory ends at entry {last}, not {expected}: there is a second writer")
            if self.max_entries is not None and last + len(encoded) > self.max_entries:
                raise LogFull(f"log in memory is full: {len(encoded)} records after {last} of {self.max_entries}")
            self._entries += encoded
            return len(self._entries)

    def read(self, *, after: int = 0, limit: int | None = None) -> Iterator[Entry]:
        with self._lock:
            held = tuple(islice(self._entries, after, None if limit is None else after + limit))
        for seq, data in enumerate(held, start=after + 1):
            yield Entry(seq=seq, record=decode_record(data))

    def last(self) -> int:
        with self._lock:
            return len(self._entries)

    def save_snapshot(self, seq: int, state: bytes) -> None:
        with self._lock:
            if seq > len(self._entries):
                raise SequenceConflict(f"snapshot of entry {seq}, but the log in memory ends at {len(self._entries)}")
            kept = [snapshot for snapshot in self._snapshots if snapshot[0] != seq]
            self._snapshots = sorted([*kept, (seq, bytes(state))])[-SNAPSHOTS_KEPT:]

    def load_snapshot(self) -> tuple[int, bytes] | None:
        with self._lock:
            return self._snapshots[-1] if self._snapshots else None

    def close(self) -> None:
        """Nothing to release; a closed log in memory stays readable."""
