"""What only a log on disk can get wrong: other files, newer schemas, damage, full disks, other processes."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_records import batch

from keepstep.model.records import SCHEMA
from keepstep.store.exceptions import (
    LogCorrupt,
    LogFull,
    LogUnavailable,
    NewerSchema,
    NotALog,
    SequenceConflict,
)
from keepstep.store.sqlite import open_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.sqlite"


def _filled(path: Path, count: int = 5) -> None:
    log = open_log(path)
    log.append(batch(1, count), expected=0)
    log.close()


def test_a_log_survives_being_closed(path: Path) -> None:
    """Entries and snapshots are there after reopening, for writers and for readers."""
    _filled(path)
    log = open_log(path)
    log.save_snapshot(5, b"five")
    log.close()
    for readonly in (False, True):
        log = open_log(path, readonly=readonly)
        assert [entry.record for entry in log.read()] == batch(1, 5)
        assert log.load_snapshot() == (5, b"five")
        log.close()


def test_two_snapshots_are_kept_and_a_damaged_one_is_passed_over(path: Path) -> None:
    """The last two snapshots stay; if the newest is damaged the one before serves."""
    _filled(path)
    log = open_log(path)
    for seq in (1, 3, 5):
        log.save_snapshot(seq, b"%d" % seq)
    log.close()
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT seq FROM snapshots ORDER BY seq").fetchall() == [(3,), (5,)]
    raw.execute("UPDATE snapshots SET state = 'text' WHERE seq = 5")
    raw.commit()
    raw.close()
    log = open_log(path)
    assert log.load_snapshot() == (3, b"3")
    log.close()


def test_a_newer_schema_is_refused_by_name(path: Path) -> None:
    """Both versions and the way out are in the message, for writers and readers alike."""
    _filled(path)
    raw = sqlite3.connect(path)
    raw.execute("UPDATE schema SET version = ?", (SCHEMA + 41,))
    raw.commit()
    raw.close()
    for readonly in (False, True):
        with pytest.raises(NewerSchema, match=rf"schema {SCHEMA + 41}.*up to {SCHEMA}: install"):
            open_log(path, readonly=readonly)


def test_other_files_are_left_alone(path: Path) -> None:
    """Neither another program's database nor arbitrary bytes are taken for a log or changed."""
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE theirs (x)")
    raw.commit()
    raw.close()
    before = path.read_bytes()
    with pytest.raises(NotALog, match="not a keepstep log"):
        open_log(path)
    assert path.read_bytes() == before
    path.write_bytes(b"hello" * 1000)
    with pytest.raises(NotALog, match="not a keepstep log"):
        open_log(path)
    assert path.read_bytes() == b"hello" * 1000


def test_damage_is_found_when_read(path: Path) -> None:
    """A flipped byte or a lost entry is an error that names the entry, never a silently different history."""
    _filled(path)
    raw = sqlite3.connect(path)
    raw.execute("UPDATE entries SET record = CAST(record || 'x' AS BLOB) WHERE seq = 3")
    raw.commit()
    log = open_log(path)
    with pytest.raises(LogCorrupt, match="entry 3 does not match"):
        list(log.read())
    raw.execute("DELETE FROM entries WHERE seq = 3")
    raw.commit()
    raw.close()
    with pytest.raises(LogCorrupt, match="entry 3 is missing"):
        list(log.read())
    log.close()


def test_missing_places_are_named(tmp_path: Path) -> None:
    """A missing log (for readers) or directory (for writers) is reported with its path."""
    with pytest.raises(LogUnavailable, match=r"nowhere\.sqlite does not exist"):
        open_log(tmp_path / "nowhere.sqlite", readonly=True)
    with pytest.raises(LogUnavailable, match=r"no/log\.sqlite"):
        open_log(tmp_path / "no" / "log.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_readers_cannot_write(path: Path) -> None:
    """A log opened for reading refuses appends."""
    _filled(path)
    log = open_log(path, readonly=True)
    with pytest.raises(LogUnavailable, match="reading only"):
        log.append(batch(6, 1), expected=5)
    log.close()


def test_a_reader_follows_a_live_writer(path: Path) -> None:
    """A second, read-only handle sees each batch once it is committed."""
    writer = open_log(path)
    reader = open_log(path, readonly=True)
    for first in range(0, 30, 3):
        writer.append(batch(first, 3), expected=first)
        assert reader.last() == first + 3
    writer.close()
    reader.close()


def test_two_handles_on_one_file_conflict(path: Path) -> None:
    """A second writer that missed an append is told so and writes nothing."""
    one, two = open_log(path), open_log(path)
    one.append(batch(1, 2), expected=0)
    with pytest.raises(SequenceConflict, match="ends at entry 2, not 0: another controller"):
        two.append(batch(7, 1), expected=0)
    assert two.last() == 2
    one.close()
    two.close()


def test_space_and_percent_in_the_path(tmp_path: Path) -> None:
    """The path is a path, not a piece of a URI."""
    odd = tmp_path / "a b?c#d%41"
    odd.mkdir()
    _filled(odd / "log.sqlite")
    assert (odd / "log.sqlite").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 1 MiB of space."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_refuses_batches_whole_and_recovers(small_disk: Path) -> None:
    """On a really full file system: LogFull with the bytes left, no half batch, and on it goes after making room."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(400 * 1024))
    log = open_log(small_disk / "log.sqlite")

    def append_until_full() -> None:
        while True:
            log.append(batch(log.last(), 7, padding=2000), expected=log.last())

    with pytest.raises(LogFull, match=r"\d+ bytes left on the file system of .*small"):
        append_until_full()
    written = log.last()
    assert written > 0
    assert written % 7 == 0
    for _ in range(3):
        with pytest.raises(LogFull):
            log.append(batch(written, 200, padding=2000), expected=written)
        assert log.last() == written
    ballast.unlink()
    written = log.append(batch(written, 7, padding=2000), expected=written)
    log.close()
    log = open_log(small_disk / "log.sqlite")
    assert [entry.record for entry in log.read()] == batch(0, written, padding=2000)
    log.close()


def test_no_space_for_a_new_log(small_disk: Path) -> None:
    """A log that cannot even be created says that the disk is full, not that permissions are odd."""
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    with pytest.raises(LogFull, match="bytes left on the file system"):
        open_log(small_disk / "log.sqlite")


def test_a_log_on_a_read_only_medium_can_be_read(small_disk: Path) -> None:
    """An archived log opens where nothing may be written."""
    _filled(small_disk / "log.sqlite")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    log = open_log(small_disk / "log.sqlite", readonly=True)
    assert log.last() == 5
    log.close()


def test_file_mode_is_not_widened(path: Path) -> None:
    """The log is created with the process's umask, no more."""
    old = os.umask(0o077)
    try:
        _filled(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
