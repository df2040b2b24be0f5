"""The log on disk: one SQLite file in WAL mode, one writer, every commit on stable storage before it returns.

SQLite of the standard library is the right size for one controller: thousands of events a second with group commit,
atomic batches, recovery after kill -9 without a line of ours, and a file that people can open with other tools.

Two connections per log. The writer's commits are whole batches in ``BEGIN IMMEDIATE``; the reader sees committed
entries only, even while a batch is being written by another thread. Each entry carries a CRC over its number and
its bytes, because SQLite does not checksum its pages.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from keepstep.model.records import SCHEMA, AnyRecord, decode_record, encode_record
from keepstep.ports import Entry
from keepstep.store.diagnosis import translated
from keepstep.store.exceptions import LogCorrupt, LogUnavailable, NewerSchema, NotALog, SequenceConflict

APPLICATION_ID = 0x4B53_4C47
"""``KSLG`` in the file's header: tells our logs from other SQLite files (and ``file(1)`` can, too)."""

BUSY_TIMEOUT_MS = 5_000
SNAPSHOTS_KEPT = 2
READ_PAGE = 512
"""Entries fetched per query, so that a reader of a long log holds neither a lock nor all of it in memory."""
CHECKPOINT_PAGES = 4_000
"""WAL pages (16 MiB) at which a commit moves them into the main file itself. Snapshots usually do so earlier."""

_TABLES = """
CREATE TABLE schema (version INTEGER NOT NULL);
CREATE TABLE entries (seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, state BLOB NOT NULL);
"""


def open_log(path: str | Path, *, readonly: bool = False, max_bytes: int | None = None) -> SqliteLog:
    """Open the log at ``path``; created when it is missing, unless ``readonly``.

    Args:
        max_bytes: ceiling for the main file; beyond it ``append`` raises ``LogFull``.

    Raises:
        NewerSchema, NotALog, LogCorrupt, LogFull, LogUnavailable
    """
    return SqliteLog(Path(path), readonly=readonly, max_bytes=max_bytes)


class SqliteLog:
    """See ``keepstep.ports.EventLog``; safe to use from several threads."""

    def __init__(self, path: Path, *, readonly: bool = False, max_bytes: int | None = None) -> None:
        self.path = path
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        if readonly and not path.exists():
            raise LogUnavailable(f"{path} does not exist: no controller has run there")
        with translated(path, "open"):
            if not readonly:
                self._writer = _connect(path, "rwc")
                try:
                    _prepare(self._writer, path, max_bytes)
                except BaseException:
                    self._writer.close()
                    raise
            self._reader = _connect(path, _reader_mode(path) if readonly else "rw")
            try:
                self._reader.execute("PRAGMA query_only = 1")
                _check(self._reader, path)
            except BaseException:
                self.close()
                raise

    # ------------------------------------------------------------ writing

    def append(self, records: Sequence[AnyRecord], *, expected: int) -> int:
        encoded = [encode_record(record) for record in records]
        rows = [(seq, _crc(seq, data), data) for seq, data in enumerate(encoded, start=expected + 1)]
        with self._write_lock, translated(self.path, "append to"):
            writer = self._writable()
            with _transaction(writer):
                last = _last(writer)
                if last != expected:
                    raise SequenceConflict(
                        f"{self.path} ends at entry {last}, not {expected}: another controller writes to it; stop one"
                    )
                writer.executemany("INSERT INTO entries (seq, crc, record) VALUES (?, ?, ?)", rows)
        return expected + len(rows)

    def save_snapshot(self, seq: int, state: bytes) -> None:
        """Keep ``state`` as the fold of entries 1 to ``seq``; the newest two are kept. Also tidies the WAL."""
        with self._write_lock, translated(self.path, "save a snapshot in"):
            writer = self._writable()
            with _transaction(writer):
                last = _last(writer)
                if seq > last:
                    raise SequenceConflict(f"snapshot of entry {seq}, but {self.path} ends at {last}")
                row = (seq, _crc(seq, state), state)
                writer.execute("INSERT OR REPLACE INTO snapshots (seq, crc, state) VALUES (?, ?, ?)", row)
                writer.execute(
                    "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)",
                    (SNAPSHOTS_KEPT,),
                )
            writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def limit_bytes(self, max_bytes: int | None) -> None:
        """Change the ceiling given to ``open_log``."""
        with self._write_lock:
            _limit(self._writable(), max_bytes)

    # ------------------------------------------------------------ reading

    def read(self, *, after: int = 0, limit: int | None = None) -> Iterator[Entry]:
        """Yield committed entries in order.

        Raises:
            LogCorrupt: an entry is missing or does not match its checksum.
        """
        left = limit
        while left is None or left > 0:
            page = READ_PAGE if left is None else min(READ_PAGE, left)
            with self._read_lock, translated(self.path, "read"):
                rows = self._reader.execute(
                    "SELECT seq, crc, record FROM entries WHERE seq > ? ORDER BY seq LIMIT ?", (after, page)
                ).fetchall()
            for seq, crc, data in rows:
                yield self._entry(after + 1, seq, crc, data)
                after = seq
            if len(rows) < page:
                return
            left = None if left is None else left - len(rows)

    def last(self) -> int:
        with self._read_lock, translated(self.path, "read"):
            return _last(self._reader)

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """The newest undamaged snapshot; a damaged one is passed over, for the log itself holds the truth."""
        with self._read_lock, translated(self.path, "read"):
            rows = self._reader.execute("SELECT seq, crc, state FROM snapshots ORDER BY seq DESC").fetchall()
        return next(((seq, state) for seq, crc, state in rows if crc == _crc(seq, state)), None)

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

    def _entry(self, wanted: int, seq: int, crc: int, data: bytes) -> Entry:
        if seq != wanted:
            raise LogCorrupt(f"{self.path}: entry {wanted} is missing (found {seq}); restore the file from a copy")
        if crc != _crc(seq, data):
            raise LogCorrupt(f"{self.path}: entry {seq} does not match its checksum; restore the file from a copy")
        try:
            return Entry(seq=seq, record=decode_record(data))
        except msgspec.DecodeError as error:
            raise LogCorrupt(f"{self.path}: entry {seq} is not a record of schema {SCHEMA}: {error}") from error

    def _writable(self) -> sqlite3.Connection:
        if self._writer is None:
            raise LogUnavailable(f"{self.path} was opened for reading only")
        return self._writer


class _transaction:
    """``BEGIN IMMEDIATE`` to ``COMMIT``; anything that goes wrong in between leaves no trace."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{'immutable=1' if mode == 'immutable' else f'mode={mode}'}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def _reader_mode(path: Path) -> str:
    """``ro`` still needs to make a shared-memory file next to the log; an archive on a read-only medium allows none."""
    closed_well = not path.with_name(path.name + "-wal").exists()
    return "immutable" if closed_well and not os.access(path.parent, os.W_OK) else "ro"


def _prepare(writer: sqlite3.Connection, path: Path, max_bytes: int | None) -> None:
    """Set the writer up, and make the tables in a file that is new."""
    is_new = _pragma(writer, "application_id") == 0 and _pragma(writer, "schema_version") == 0
    if not is_new:
        _check(writer, path)
    writer.execute("PRAGMA journal_mode = WAL").fetchall()
    writer.execute("PRAGMA synchronous = FULL")
    writer.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    writer.execute(f"PRAGMA journal_size_limit = {CHECKPOINT_PAGES * 4096}")
    _limit(writer, max_bytes)
    if not is_new:
        return
    with _transaction(writer):
        if _pragma(writer, "application_id") == 0:  # else another process was faster
            for statement in _TABLES.strip().splitlines():
                writer.execute(statement)
            writer.execute("INSERT INTO schema (version) VALUES (?)", (SCHEMA,))
            writer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is not ours, or not ours yet."""
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise NotALog(f"{path} is not a keepstep log; point run_dir somewhere else, or move the file away")
    row = connection.execute("SELECT version FROM schema").fetchone()
    if row is None or row[0] < 1:
        raise LogCorrupt(f"{path} has no schema version; restore the file from a copy")
    if row[0] > SCHEMA:
        raise NewerSchema(
            f"{path} has schema {row[0]}, this keepstep understands up to {SCHEMA}: "
            f"install the keepstep that wrote it, or start a new job with another run directory"
        )


def _limit(writer: sqlite3.Connection, max_bytes: int | None) -> None:
    pages = max(1, max_bytes // _pragma(writer, "page_size")) if max_bytes is not None else 2**32 - 2
    writer.execute(f"PRAGMA max_page_count = {pages}").fetchall()


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _last(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchone()[0])


def _crc(seq: int, data: object) -> int:
    """Checksum of an entry; -1, which none has, for a column that damage turned into something other than bytes."""
    return zlib.crc32(data, seq & 0xFFFF_FFFF) if isinstance(data, bytes) else -1
