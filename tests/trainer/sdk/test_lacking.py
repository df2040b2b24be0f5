"""A rank that lacks the newest version of sharded state: whoever dies next, all still have a step in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.exceptions import SlotFull
from keepstep.checkpoint.slot import Version
from tests.trainer.sdk.test_overlap import LIMIT_S, Held, Two


def trained(directory: Path) -> Two:
    """A rank that holds steps 1 and 2."""
    run = Two(directory)
    for step in (1, 2):
        run.train()
        run.save(step, overlap=False)
    return run


def test_the_common_step_outlives_the_writing_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's copy of step 3 is spoilt, the other's is whole. Whenever one of them dies in the middle of writing
    step 4, both still have step 2: the other one writes over step 3, of which no world could be made."""
    one, other = trained(tmp_path / "one"), trained(tmp_path / "other")
    held = Held(monkeypatch)
    one.train()
    one.save(3)
    with torch.no_grad():
        one.one.weight.clamp_(-0.01, 0.01)
    held.go.set()
    one.keep.settle()
    other.train()
    other.save(3)
    other.keep.settle()
    assert (one.keep.whole, other.keep.whole) == (False, True)
    for run in (one, other):  # what all ranks do when they hear that one of them lacks the newest version
        run.keep.forget_newest()
    assert one.keep.full()[0] == other.keep.full()[0] == Version(2, 1)
    for run in (one, other):
        slot = run.keep._full.slots[run.keep._full.target(4)]
        assert slot.version != Version(2, 1), "the common step would be written over"
        run.train()
        run.save(4, overlap=False)
        assert run.keep.full() == (Version(4, 1), Version(2, 1))
        assert run.keep.whole
        run.keep.settle(LIMIT_S)


def test_a_rank_without_room_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks the newest version itself, so its own newest one is the common step and stays; a rollback to a step that
    all have, or a version that is written, ends that."""
    run = trained(tmp_path)

    def full(*_: Any) -> None:
        raise SlotFull("no room")

    for mend in (lambda: run.save(3, overlap=False), lambda: run.keep.forget_after(Version(2, 1))):
        with monkeypatch.context() as patch:
            patch.setattr(run.keep, "_write", full)
            with pytest.raises(SlotFull):
                run.save(3, overlap=False)
        assert not run.keep.whole
        before = run.keep.full()
        run.keep.forget_newest()
        assert run.keep.full() == before
        mend()
        assert run.keep.whole
