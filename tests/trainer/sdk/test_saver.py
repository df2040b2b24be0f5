"""A snapshot without room is a gap that people hear of, not the end of the training."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.exceptions import SlotFull, SlotInvalid
from keepstep.checkpoint.slot import Version
from keepstep.trainer.exceptions import StateMismatch, StateNotPlain
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
    assert said.count("snapshots are taken again") == 2
    assert "rank 4: snapshots are taken again, the first one of step 4" in said


@pytest.mark.parametrize(
    ("error", "replaced", "passes"),
    [
        (SlotInvalid("not ours"), True, True),
        (OSError("the memory went away"), True, True),
        (SlotInvalid("not ours"), False, False),
        (OSError("the memory went away"), False, False),
        (SlotFull("no room"), False, False),
        (StateNotPlain("a lambda"), False, True),
        (StateMismatch("another shape"), False, True),
        (ValueError("ours"), False, True),
    ],
)
def test_what_a_fresh_process_may_mend_is_raised_only_where_there_will_be_one(
    error: Exception, replaced: bool, passes: bool
) -> None:
    """Where nobody replaces a rank a failed snapshot never costs the run; what the script has to mend is raised in any
    case, and so are our own mistakes."""
    notes: list[Any] = []

    def save(*_: Any, **__: Any) -> None:
        raise error

    snapshots: Any = SimpleNamespace(save=save, notes=SimpleNamespace(tell=notes.append))
    saver = Saver(snapshots, 0, replaced=replaced)
    with pytest.raises(type(error)) if passes else nullcontext():
        saver.save(None, Version(1, 1))  # type: ignore[arg-type]
    assert len(notes) == (not passes)
