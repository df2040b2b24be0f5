"""What every event log promises; one suite over all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from log_records import batch, record

from keepstep.ports import EventLog
from keepstep.store.exceptions import LogFull, SequenceConflict
from keepstep.store.memory import MemoryLog
from keepstep.store.sqlite import SqliteLog, open_log


class Harness:
    """One log plus what differs between kinds: how to fill it up, how to make room, how to reopen it."""

    def __init__(self, log: EventLog, fill: Callable[[], None], room: Callable[[], None]) -> None:
        self.log = log
        self.fill = fill
        self.room = room


@pytest.fixture(params=["memory", "sqlite"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    if request.param == "memory":
        memory = MemoryLog()
        yield Harness(
            memory, lambda: setattr(memory, "max_entries", memory.last()), lambda: setattr(memory, "max_entries", None)
        )
        return
    sqlite: SqliteLog = open_log(tmp_path / "log.sqlite")
    yield Harness(sqlite, lambda: sqlite.limit_bytes(1), lambda: sqlite.limit_bytes(None))
    sqlite.close()


def test_entries_come_back_in_order_and_counted_from_one(harness: Harness) -> None:
    """What was appended is what is read, numbered without gaps over several batches."""
    log = harness.log
    assert log.last() == 0
    assert list(log.read()) == []
    assert log.append(batch(1, 3), expected=0) == 3
    assert log.append(batch(4, 2), expected=3) == 5
    assert log.last() == 5
    assert [entry.seq for entry in log.read()] == [1, 2, 3, 4, 5]
    assert [entry.record for entry in log.read()] == batch(1, 5)


@pytest.mark.parametrize(
    ("after", "limit", "expected"),
    [(0, 2, [1, 2]), (3, None, [4, 5]), (5, None, []), (9, 3, []), (1, 0, []), (4, 9, [5])],
)
def test_reading_a_part(harness: Harness, after: int, limit: int | None, expected: list[int]) -> None:
    """``after`` and ``limit`` cut out a window, also beyond the end."""
    harness.log.append(batch(1, 5), expected=0)
    assert [entry.seq for entry in harness.log.read(after=after, limit=limit)] == expected


def test_long_logs_are_read_whole(harness: Harness) -> None:
    """Reading in pages loses nothing at the seams."""
    count = 512 * 2 + 1
    harness.log.append(batch(1, count), expected=0)
    assert [entry.seq for entry in harness.log.read()] == list(range(1, count + 1))
    assert [entry.seq for entry in harness.log.read(after=1, limit=1023)] == list(range(2, 1025))


@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_a_wrong_expectation_writes_nothing(harness: Harness, wrong: int) -> None:
    """Optimistic concurrency: an append at any other place than the end is refused as a whole."""
    harness.log.append(batch(1, 3), expected=0)
    with pytest.raises(SequenceConflict, match="3"):
        harness.log.append(batch(9, 2), expected=wrong)
    assert [entry.record for entry in harness.log.read()] == batch(1, 3)


def test_of_two_writers_one_wins(harness: Harness) -> None:
    """Two threads that append at the same place: exactly one succeeds, whole."""
    outcomes: list[int | type[Exception]] = []
    start = threading.Barrier(2)

    def write(first: int) -> None:
        start.wait()
        try:
            outcomes.append(harness.log.append(batch(first, 10), expected=0))
        except SequenceConflict as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=write, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == sorted(map(str, [10, SequenceConflict]))
    records = [entry.record for entry in harness.log.read()]
    assert records in (batch(100, 10), batch(200, 10))


def test_an_empty_batch_is_no_entry(harness: Harness) -> None:
    """Appending nothing keeps the end where it is."""
    harness.log.append(batch(1, 2), expected=0)
    assert harness.log.append([], expected=2) == 2
    assert harness.log.last() == 2


def test_full_means_nothing_written_and_room_means_go_on(harness: Harness) -> None:
    """A full log refuses the whole batch, says so, keeps what it has, and goes on once there is room."""
    log = harness.log
    log.append(batch(1, 3), expected=0)
    harness.fill()
    big = batch(4, 50, padding=4096)
    with pytest.raises(LogFull):
        log.append(big, expected=3)
    assert log.last() == 3
    assert [entry.record for entry in log.read()] == batch(1, 3)
    harness.room()
    assert log.append(big, expected=3) == 53
    assert [entry.record for entry in log.read(after=3)] == big


def test_the_newest_snapshot_is_loaded(harness: Harness) -> None:
    """Snapshots are replaced by newer ones and may be saved again."""
    log = harness.log
    assert log.load_snapshot() is None
    log.append(batch(1, 9), expected=0)
    for seq in (3, 6, 9):
        log.save_snapshot(seq, b"state %d" % seq)
        assert log.load_snapshot() == (seq, b"state %d" % seq)
    log.save_snapshot(9, b"again")
    assert log.load_snapshot() == (9, b"again")


def test_no_snapshot_of_what_is_not_in_the_log(harness: Harness) -> None:
    """A snapshot beyond the end would let a restart skip entries that are still to come."""
    harness.log.append([record(1)], expected=0)
    with pytest.raises(SequenceConflict):
        harness.log.save_snapshot(2, b"future")
    assert harness.log.load_snapshot() is None
