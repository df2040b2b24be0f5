"""DDP and FSDP2 after a step that broke off, and set-up with nobody else there."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("kind", ["ddp", "ddp-view", "fsdp2"])
def test_a_broken_step_leaves_nothing_behind(stage: Any, kind: str) -> None:
    """Broken off in the backward pass, reset and repeated: all losses are bitwise those of an undisturbed run.

    Step 0 is before DDP rearranges its buckets, step 1 the first with the new ones.
    """
    runs = [stage.start("broken_step", port=0, kind=kind, break_at=at) for at in (None, 0, 1, 3)]
    undisturbed, *broken = [run.hear() for run in runs]
    assert len(set(undisturbed)) == 5
    assert broken == [undisturbed] * 3


def test_a_newcomer_takes_over_the_bucket_order(stage: Any) -> None:
    """A fresh DDP gets exactly the wanted buckets, keeps them, and a model that differs is refused."""
    member = stage.start("layouts", port=stage.store())
    fresh, trained = member.hear()
    assert fresh == 1
    assert trained > 1
    assert member.hear() == (True, True, False)
    assert member.hear() == (True, True)
    # At the end of its first step, what the next forward pass would do; and back again, for a repeated first step.
    assert member.hear() == (True, True, False)
    assert member.hear() == (True, True)
    assert member.hear()
    other, static = member.hear()
    assert "build the same model on every rank" in other
    assert "static_graph" in static


def test_set_up_needs_nobody_on_a_stand_in(stage: Any) -> None:
    """DDP, DeviceMesh, fully_shard, a step and object collectives work alone; receiving an object says it cannot."""
    member = stage.start("set_up_alone", rank=1, world=4, port=stage.store())
    assert member.hear() == [1, 1, 1, 1]
    assert "broadcast_object_list" in member.hear()
    assert member.hear()
