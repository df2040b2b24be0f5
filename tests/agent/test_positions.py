"""Flight memory: what the trainer stores, read by another process without asking it, whatever happens meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keepstep.agent.positions import IDLE_KEPT, read_positions
from keepstep.model.env import FLIGHT_DIR
from keepstep.model.flight import DTYPES, HEAD_WORDS, OPS, RING, ROWS, Head, Row, code
from keepstep.model.ids import Rank, SlotId
from keepstep.model.position import GroupPosition, RankPosition, fold_members, unfold_members
from keepstep.trainer.flight import Flight

SLOT = SlotId("s0")
REDUCE = code(OPS.index("all_reduce"), DTYPES.index("float32"))
BARRIER = code(OPS.index("barrier"), 0)


def flight(node: Path) -> Flight:
    return Flight(node / FLIGHT_DIR / SLOT)


def read(node: Path) -> RankPosition:
    found = read_positions(node, SLOT, Rank(3))
    assert found is not None
    return found


def only(node: Path) -> GroupPosition:
    (group,) = read(node).groups
    return group


def test_the_newest_operation_is_told_with_what_it_takes(tmp_path: Path) -> None:
    track = flight(tmp_path).track("0", range(8))
    track.finish(track.launch(BARRIER, 0))
    track.launch(REDUCE, 4096)
    found = only(tmp_path)
    assert (found.group, found.ranks, found.launched, found.finished) == ("0", tuple(range(8)), 2, 1)
    assert found.last is not None
    assert (found.last.sequence, found.last.op, found.last.elements, found.last.dtype) == (
        2, "all_reduce", 4096, "float32",
    )  # fmt: skip
    assert found.inside == found.last
    assert [one.op for one in found.recent] == ["barrier", "all_reduce"]
    assert 0 <= found.last.age_s < 60


def test_what_ends_out_of_order_leaves_the_others_open(tmp_path: Path) -> None:
    track = flight(tmp_path).track("0", [0, 1])
    first, second, third = (track.launch(REDUCE, n) for n in (1, 2, 3))
    track.finish(second)
    found = only(tmp_path)
    assert found.pending == (first, third)
    assert found.inside is not None
    assert found.inside.sequence == first


def test_the_ring_keeps_the_newest(tmp_path: Path) -> None:
    """But for the one that may be under the writer's pen; of a group at rest they are fewer."""
    track = flight(tmp_path).track("0", [0, 1])
    for number in range(1, 101):
        track.finish(track.launch(REDUCE, number))
    assert [one.sequence for one in only(tmp_path).recent] == list(range(101 - IDLE_KEPT, 101))
    track.launch(REDUCE, 101)
    assert [one.sequence for one in only(tmp_path).recent] == list(range(101 + 2 - RING, 102))


def test_an_operation_that_is_counted_and_not_yet_written_is_left_out(tmp_path: Path) -> None:
    """As on a machine that makes stores visible in another order: the entry still bears an older number."""
    memory = flight(tmp_path)
    track = memory.track("0", [0, 1])
    for number in range(1, RING + 1):
        track.launch(REDUCE, number)
    memory._words[HEAD_WORDS + Row.LAUNCHED] += 1
    assert [one.sequence for one in only(tmp_path).recent] == list(range(3, RING + 1))


def test_a_table_that_is_being_changed_is_not_read(tmp_path: Path) -> None:
    memory = flight(tmp_path)
    memory.track("0", [0, 1])
    memory._words[Head.VERSION] += 1
    assert read_positions(tmp_path, SLOT, Rank(0)) is None
    memory._words[Head.VERSION] += 1
    assert read(tmp_path).groups


def test_messages_are_counted_by_themselves(tmp_path: Path) -> None:
    """A send to rank 5 is no collective; it is told while it is not over."""
    memory = flight(tmp_path)
    memory.track("1", [4, 5]).launch(REDUCE, 7)
    messages = memory.track("1", [4, 5], messages=True)
    messages.finish(messages.launch(code(OPS.index("recv"), 1, 5), 3))
    messages.launch(code(OPS.index("send"), 1, 5), 3)
    found = only(tmp_path)
    assert found.launched == 1
    assert [(one.op, one.peer, one.elements) for one in found.messages] == [("send", 5, 3)]


def test_a_group_that_is_connected_anew_counts_from_one(tmp_path: Path) -> None:
    """What an older epoch still had in the air ends without being counted in the new one."""
    memory = flight(tmp_path)
    old = memory.track("0", [0, 1])
    numbers = [old.launch(REDUCE, 1) for _ in range(3)]
    new = memory.track("0", [0, 1])
    for number in numbers:
        old.finish(number)
    old.launch(REDUCE, 9)
    new.launch(BARRIER, 0)
    found = only(tmp_path)
    assert (found.launched, found.finished) == (1, 0)
    assert [one.op for one in found.recent] == ["barrier"]


def test_the_place_of_a_destroyed_group_is_used_again(tmp_path: Path) -> None:
    memory = flight(tmp_path)
    for number in range(ROWS * 5):
        memory.track(f"g{number:04}", [0, 1]).launch(REDUCE, number)
        memory.forget(f"g{number:04}")
    memory.track("last", [0, 1]).launch(BARRIER, 0)
    assert only(tmp_path).group == "last"


def test_too_many_groups_do_no_harm(tmp_path: Path) -> None:
    memory = flight(tmp_path)
    for number in range(ROWS + 5):
        track = memory.track(str(number), [0, 1])
        track.finish(track.launch(REDUCE, 1))
    assert len(read(tmp_path).groups) == ROWS


def test_names_that_do_not_fit_do_no_harm(tmp_path: Path) -> None:
    memory = flight(tmp_path)
    everybody = [n * n for n in range(5_000)]
    for number in range(3):
        memory.track(str(number), everybody).launch(REDUCE, 1)
    assert [group.ranks for group in read(tmp_path).groups] == [tuple(everybody)]


def test_who_tells_nothing_is_told_as_nothing(tmp_path: Path) -> None:
    """No file, another file, a process that has made no group yet."""
    assert read_positions(tmp_path, SLOT, Rank(0)) is None
    flight(tmp_path)
    assert read_positions(tmp_path, SLOT, Rank(0)) is None
    (tmp_path / FLIGHT_DIR / SLOT).write_bytes(b"\xff" * 100)
    assert read_positions(tmp_path, SLOT, Rank(0)) is None


def test_without_room_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / FLIGHT_DIR).write_text("a file where the folder should be")
    track = flight(tmp_path).track("0", [0, 1])
    track.finish(track.launch(REDUCE, 1))


@pytest.mark.timeout(60)
def test_no_read_is_torn_while_the_trainer_runs(tmp_path: Path) -> None:
    """Each operation bears its number as its size: an entry of which one half is another's would not match."""
    memory = flight(tmp_path)
    stop = threading.Event()

    def train() -> None:
        track = memory.track("0", [0, 1])
        while not stop.is_set():
            for _ in range(50):
                track.finish(track.launch(REDUCE, track.launched + 1))
            track = memory.track("0", [0, 1])

    thread = threading.Thread(target=train)
    thread.start()
    try:
        seen = 0
        for _ in range(2000):
            found = read_positions(tmp_path, SLOT, Rank(0))
            for one in found.groups[0].recent if found else ():
                assert (one.elements, one.op) == (one.sequence, "all_reduce")
                seen += 1
        assert seen > 100
    finally:
        stop.set()
        thread.join()


@given(st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted))
def test_members_unfold_to_what_they_were(ranks: list[int]) -> None:
    assert list(unfold_members(fold_members(ranks))) == ranks


def test_members_are_told_briefly() -> None:
    assert fold_members(range(8192)) == "0-8191"
    assert fold_members(range(3, 8192, 8)) == "3-8187:8"
    assert fold_members([0, 1, 2, 9]) == "0-2,9"
    assert unfold_members("-,x-3,4") == (4,)
