"""A snapshot without room is a gap that people hear of, not the end of the training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.exceptions import SlotFull, SlotInvalid
from keepstep.checkpoint.slot import Version
from keepstep.trainer.saver import Saver


def test_no_room_is_said_once_and_noted_each_time(capfd: pytest.CaptureFixture[str]) -> None:
    """Steps 2, 3 and 5 find no room: two lines on stderr, three notes, every other step is saved, nothing is raised."""
    saved: list[tuple[int, dict[str, Any]]] = []
    notes: list[Any] = []

    def save(state: object, version: Version, **how: Any) -> None:
        if version.step in (2, 3, 5):
            raise SlotFull("no room")
        saved.append((version.step, how))

    snapshots: Any = SimpleNamespace(save=save, notes=SimpleNamespace(tell=notes.append))
    saver = Saver(snapshots, 4)
    for step in range(1, 7):
        saver.save(None, Version(step, 1), full=True)  # type: ignore[arg-type]
    assert saved == [(1, {"full": True}), (4, {"full": True}), (6, {"full": True})]
    assert [(note.what, note.tier, note.step, note.rank) for note in notes] == [
        ("skipped", "memory", step, 4) for step in (2, 3, 5)
    ]
    said = capfd.readouterr().err
    assert said.count("training goes on") == 2
    assert "rank 4: no snapshot of step 2: no room" in said


def test_other_faults_are_not_swallowed() -> None:
    """Only the lack of room is forgiven: anything else is a fault that somebody has to see."""

    def save(*_: Any, **__: Any) -> None:
        raise SlotInvalid("not ours")

    snapshots: Any = SimpleNamespace(save=save)
    with pytest.raises(SlotInvalid):
        Saver(snapshots, 0).save(None, Version(1, 1))  # type: ignore[arg-type]
