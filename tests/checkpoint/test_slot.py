"""Slots: a version is complete or does not count, whatever happens to its writer."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import SlotInvalid
from keepstep.checkpoint.slot import HEADER, Description, Slot, TensorEntry, Version, lay_out, to_overwrite

KILLS = 100


def fill(slot: Slot, version: Version, byte: int, size: int) -> None:
    slot.begin()
    (offset,), end = lay_out([size])
    slot.grow(end)
    slot.memory[offset : offset + size] = bytes([byte]) * size
    entry = TensorEntry("t", "uint8", (size,), offset, size)
    slot.complete(version, end, Description(tensors=(entry,), plain=bytes([byte]) * 100, key="e1/controller"))


def test_a_version_counts_only_between_complete_and_begin(tmp_path: Path) -> None:
    """The state word is what makes a version exist; beginning to write takes it away first."""
    slot = Slot(tmp_path / "rank0.0", create=True)
    assert slot.version is None
    fill(slot, Version(3, 1), 7, 1000)
    assert slot.version == Version(3, 1)
    serial = slot.serial
    slot.begin()
    assert slot.version is None
    assert slot.serial != serial
    with pytest.raises(SlotInvalid, match="incomplete"):
        slot.describe()


def test_another_process_sees_the_version_after_the_file_has_grown(tmp_path: Path) -> None:
    """A reader that mapped the small file finds the description of a much larger later version."""
    writer = Slot(tmp_path / "rank0.0", create=True)
    fill(writer, Version(1, 1), 1, 10)
    reader = Slot(tmp_path / "rank0.0")
    fill(writer, Version(2, 1), 2, 300_000)
    assert reader.version == Version(2, 1)
    description = reader.describe()
    entry = description.tensors[0]
    assert reader.memory[entry.offset : entry.offset + entry.nbytes] == bytes([2]) * 300_000


def test_a_damaged_description_is_found(tmp_path: Path) -> None:
    """One flipped bit in the description is an error, not a wrong tensor table."""
    slot = Slot(tmp_path / "rank0.0", create=True)
    fill(slot, Version(1, 1), 1, 10)
    slot.memory[slot.used - 3] ^= 4
    with pytest.raises(SlotInvalid, match="checksum"):
        slot.describe()


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A short or foreign file never looks like a version."""
    (tmp_path / "rank0.0").write_bytes(b"short")
    with pytest.raises(SlotInvalid, match="header"):
        Slot(tmp_path / "rank0.0")
    (tmp_path / "rank0.1").write_bytes(os.urandom(2 * HEADER))
    assert pair.look(tmp_path, 0) == []


@pytest.mark.parametrize(
    ("held", "step", "index"),
    [
        ([None, None], 0, 0),
        ([Version(4, 1), None], 5, 1),
        ([Version(4, 1), Version(5, 1)], 6, 0),
        ([Version(6, 1), Version(5, 1)], 6, 0),
        ([Version(5, 1), Version(6, 1)], 6, 1),
    ],
)
def test_the_newest_older_version_is_never_overwritten(held: list[Version | None], step: int, index: int) -> None:
    """After a roll-back the undone future is written over, not the step that was rolled back to."""
    assert to_overwrite(held, step) == index


def test_rolled_back_versions_are_forgotten(tmp_path: Path) -> None:
    """A step of a fenced-off history can never be resumed from, neither later steps nor the same step twice."""
    both = pair.Pair(tmp_path, 3)
    fill(both.slots[0], Version(5, 1), 1, 10)
    fill(both.slots[1], Version(6, 1), 2, 10)
    both.forget_after(Version(5, 1))
    assert both.versions() == (Version(5, 1),)
    fill(both.slots[1], Version(5, 2), 2, 10)
    both.forget_after(Version(5, 2))
    assert both.versions() == (Version(5, 2),)


def test_a_pinned_version_stays_while_two_others_alternate(tmp_path: Path) -> None:
    """With a third file a pin costs no step its safety: the newest version and the pinned one are both never the
    target, and once the pin is lifted its file is used again."""
    three = pair.Pair(tmp_path, 0, files=3)
    for step in range(1, 5):
        fill(three.slots[three.target(step)], Version(step, 1), step, 10)
    (held,) = [slot for slot in three.slots if slot.version == Version(4, 1)]
    held.pin()
    for step in range(5, 12):
        newest = three.versions()[0]
        slot = three.slots[three.target(step)]
        assert slot.version != newest
        assert slot is not held
        fill(slot, Version(step, 1), step, 10)
    assert held.version == Version(4, 1)
    assert list(three.pinned()) == [held]
    held.unpin()
    assert three.slots[three.target(12)] is held
    assert pair.ranks_in(tmp_path) == {0}


def test_a_third_file_that_is_there_belongs_to_the_pair(tmp_path: Path) -> None:
    """Whoever opens a rank's files with two in mind still forgets, and finds, what the third one holds."""
    with_tiers = pair.Pair(tmp_path, 0, files=3)
    fill(with_tiers.slots[2], Version(9, 1), 1, 10)
    with_tiers.close()
    assert [version for version, _ in pair.look(tmp_path, 0)] == [Version(9, 1)]
    without = pair.Pair(tmp_path, 0)
    assert without.find(Version(9, 1)) is not None
    without.forget_after(Version(4, 1))
    assert pair.look(tmp_path, 0) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    held=st.lists(st.one_of(st.none(), st.builds(Version, st.integers(0, 6), st.just(1))), min_size=2, max_size=3),
    step=st.integers(0, 7),
    pins=st.sets(st.integers(0, 2)),
)
def test_no_target_costs_the_newest_older_step(held: list[Version | None], step: int, pins: set[int]) -> None:
    """For every content of the files: the newest version below the step stays, and so does the only pinned one
    wherever there are three files."""
    index = to_overwrite(held, step, pins)
    below = [version for version in held if version is not None and version.step < step]
    if below and held.count(max(below)) == 1:
        assert held[index] != max(below)
    if len(held) == 3 and len(pins) == 1 and all(v is not None and v.step < step for v in held):
        assert index not in pins


def write_for_ever(directory: Path, pipe: int) -> None:
    both = pair.Pair(directory, 0)
    step = max((version.step for version in both.versions()), default=0)
    os.write(pipe, b"!")
    while True:
        step += 1
        fill(both.slots[both.target(step)], Version(step, 1), step % 251, 400_000 + step % 7 * 1000)


def test_kill_9_of_a_writer_leaves_a_whole_version(tmp_path: Path) -> None:
    """At any of many random instants: at least one version is complete, all complete ones are whole, and the newest
    is at most two steps behind what the writer may have begun."""
    seed = int(time.time())
    print(f"seed {seed}")
    draw = random.Random(seed)
    last = 0
    for _ in range(KILLS):
        ready, pipe = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(tmp_path, pipe)
            finally:
                os._exit(1)
        assert os.read(ready, 1) == b"!"
        time.sleep(draw.uniform(0.001, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(ready)
        os.close(pipe)
        found = pair.look(tmp_path, 0)
        if last:
            assert found, "both versions were lost"
        for version, path in found:
            slot = Slot(path)
            description = slot.describe()
            (entry,) = description.tensors
            want = version.step % 251
            assert slot.memory[entry.offset : entry.offset + entry.nbytes] == bytes([want]) * entry.nbytes
            assert description.plain == bytes([want]) * 100
            slot.close()
        newest = found[0][0].step if found else 0
        assert newest >= last
        last = newest
    assert last > KILLS


def test_sealer_that_was_held_up_writes_into_nothing_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped right before it puts the table there, while a larger version is completed and sealed: that one stays."""
    slot = Slot(tmp_path / "rank0.0", create=True)
    fill(slot, Version(1, 1), 1, 100)
    real, done = os.replace, []

    def overtake() -> None:
        newer = Slot(slot.path)
        fill(newer, Version(3, 1), 2, 9000)
        newer.seal()
        newer.close()

    def late(source: str | Path, target: str | Path) -> None:
        if not done:
            done.append(True)
            other = threading.Thread(target=overtake)
            other.start()
            other.join()
        real(source, target)

    monkeypatch.setattr(os, "replace", late)
    slot.seal()
    slot.refresh()
    assert slot.version == Version(3, 1)
    with pytest.raises(SlotInvalid):  # it has the table of another version: as good as none, until it is sealed again
        slot.verify()
    slot.seal()
    slot.verify()
    assert slot.memory[HEADER : HEADER + 9000] == bytes([2]) * 9000
