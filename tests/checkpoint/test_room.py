"""Room for snapshots is worked out before the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import room
from keepstep.checkpoint.exceptions import NotEnoughMemory


def test_the_refusal_shows_the_whole_sum() -> None:
    """The message holds every factor, the need and what there is, and the ways out."""
    with pytest.raises(NotEnoughMemory) as caught:
        room.check(version_bytes=3 << 30, ranks=8, has_buddy=True, room=50 << 30)
    words = str(caught.value)
    for part in (
        "96.0 GiB",
        "3.0 GiB per version",
        "x 8 ranks",
        "2 versions + 2 replicas",
        "50.0 GiB",
        "--snapshot-every 0",
    ):
        assert part in words


def test_without_a_buddy_half_suffices() -> None:
    """One node alone keeps nobody's replicas."""
    room.check(version_bytes=3 << 30, ranks=8, has_buddy=False, room=50 << 30)


def test_durable_tiers_and_differences_have_their_share() -> None:
    """A third file per rank for the version that is held, and one more to take differences from."""
    gib = 1 << 30
    assert room.need(gib, 4, has_buddy=False) == 8 * gib
    assert room.need(gib, 4, has_buddy=False, durable=True) == 12 * gib
    assert room.need(gib, 4, has_buddy=True, durable=True) == 20 * gib
    assert room.need(gib, 4, has_buddy=True, durable=True, full_every=10) == 24 * gib
    assert room.need(gib, 4, has_buddy=True, full_every=10) == 16 * gib
    with pytest.raises(NotEnoughMemory, match=r"1 held for the durable tiers.*1 to take differences from"):
        room.check(version_bytes=gib, ranks=4, has_buddy=True, room=23 * gib, durable=True, full_every=10)


def test_free_and_used_look_at_the_real_file_system(tmp_path: Path) -> None:
    """What is written is counted as used; something is free."""
    (tmp_path / "rank0.0").write_bytes(b"x" * 100_000)
    assert room.used(tmp_path, tmp_path / "absent") >= 100_000
    assert room.free(tmp_path) > 0
