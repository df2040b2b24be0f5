"""What an SQLite error means for us: full, busy, damaged, or out of reach.

SQLite reports ENOSPC as SQLITE_FULL, but a used-up quota, a file size limit or a full disk that hinders the making
of its helper files come as general I/O errors. A small trial write tells those from a failing disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keepstep.store.exceptions import LogBusy, LogCorrupt, LogFull, LogUnavailable, NotALog, StoreError

TRIAL_BYTES = 64 * 1024
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def translated(path: Path, what: str) -> Iterator[None]:
    """Raise our errors instead of SQLite's."""
    try:
        yield
    except sqlite3.Error as error:
        raise _meaning(error, path, what) from error


def _meaning(error: sqlite3.Error, path: Path, what: str) -> StoreError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return LogFull(f"cannot {what} {path}: {_room(path)}; free some space there")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LogBusy(f"cannot {what} {path}: another process holds it locked ({error}); stop that process")
    if code == sqlite3.SQLITE_NOTADB:
        return NotALog(f"{path} is not a keepstep log ({error}); point run_dir somewhere else, or move the file away")
    if code == sqlite3.SQLITE_CORRUPT:
        return LogCorrupt(f"{path} is damaged ({error}); restore the file from a copy")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _is_full(path):
        return LogFull(f"cannot {what} {path}: {_room(path)}; free some space there")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return LogUnavailable(f"cannot {what} {path}: {error} ({name}); check its directory, permissions and disk")


def _room(path: Path) -> str:
    try:
        found = os.statvfs(path.parent)
    except OSError as error:
        return f"no space ({error.strerror})"
    return f"no space, {found.f_bavail * found.f_frsize} bytes left on the file system of {path.parent}"


def _is_full(path: Path) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = (path, path.with_name(path.name + "-wal"))
    if limit != resource.RLIM_INFINITY and any(f.exists() and f.stat().st_size + TRIAL_BYTES > limit for f in files):
        return True
    try:
        with tempfile.TemporaryFile(dir=path.parent) as trial:
            trial.write(bytes(TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return error.errno in _NO_SPACE
    return False
