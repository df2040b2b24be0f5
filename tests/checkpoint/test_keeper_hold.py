"""Hold: a copy of a version for a slow link, and nothing of it once it is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import room
from keepstep.checkpoint.exceptions import SlotFull
from keepstep.checkpoint.keeper_hold import HOLD_DIR, Hold
from keepstep.checkpoint.slot import HEADER, Slot, Version
from tests.checkpoint.states import slot_path, write_slot


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "snap").mkdir()
    return tmp_path


def held(node: Path, rank: int = 0, step: int = 7) -> Hold:
    """A hold with one version in it."""
    write_slot(slot_path(node, rank), Version(step, 1), rank=rank)
    slot, hold = Slot(slot_path(node, rank)), Hold(node, rank)
    hold.take(slot, Version(step, 1))
    slot.close()
    return hold


def files(node: Path) -> list[str]:
    return sorted(path.name for path in (node / HOLD_DIR).iterdir())


def test_a_dropped_copy_leaves_no_byte_behind(node: Path) -> None:
    """Copy and checksums go; those of a rank whose number begins alike stay."""
    one, ten = held(node, 1), held(node, 10)
    assert files(node) == ["rank1", "rank1.sums", "rank10", "rank10.sums"]
    one.drop()
    one.drop()
    assert files(node) == ["rank10", "rank10.sums"]
    assert one.held is None
    assert ten.held is not None
    ten.drop()
    assert files(node) == []


def test_a_successor_clears_what_a_killed_keeper_held(node: Path) -> None:
    """Also the checksums that it had begun to write under a name of their own."""
    held(node)
    (node / HOLD_DIR / "rank0.sums.123.456").write_bytes(b"half")
    Hold(node, 0)
    assert files(node) == []


def test_without_room_nothing_is_begun(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence has both numbers, and no file was made."""
    write_slot(slot_path(node, 0), Version(7, 1))
    monkeypatch.setattr(room, "free", lambda _: 10)
    slot, hold = Slot(slot_path(node, 0)), Hold(node, 0)
    with pytest.raises(SlotFull, match=r"no room to hold .* 10\.0 B can be had"):
        hold.take(slot, Version(7, 1))
    slot.close()
    assert not (node / HOLD_DIR).exists()


def test_what_is_held_is_the_version_byte_for_byte(node: Path) -> None:
    """And stays when the trainer goes on."""
    hold = held(node)
    slot = Slot(slot_path(node, 0))
    before = bytes(slot.memory[HEADER : slot.used])
    slot.close()
    write_slot(slot_path(node, 0), Version(8, 1))
    assert hold.held is not None
    version, copy = hold.held
    assert version == Version(7, 1)
    assert bytes(copy.memory[HEADER : copy.used]) == before
