"""What a commit leaves behind when the process is killed in the middle of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.model.ids import JobId
from keepstep.trainer.loop_torch import Loop


class KilledHere(BaseException):
    """Stands for SIGKILL: nothing of the process runs after it."""


def test_a_step_that_can_be_resumed_from_has_its_loss_written() -> None:
    """A rank killed in its snapshot has written the loss already: whoever takes its place, from this version or the
    one before, no step is left without a line."""
    lines: list[int] = []
    at_death: list[list[int]] = []

    def save(state: object, version: object, **how: object) -> None:
        at_death.append(list(lines))
        raise KilledHere

    session: Any = SimpleNamespace(
        cuda=False, token="", snap_dir=Path(), rank=0, has_buddy=True,
        state=SimpleNamespace(settle_buckets=lambda: None, touched=True, replicated=True),
        snapshots=SimpleNamespace(
            save=save, await_copy=lambda: None, waited_s=0.0, lag=lambda: (6, 6),
            config=CheckpointConfig(job=JobId("j")),
        ),
        groups=SimpleNamespace(world_ops_since_mark=lambda: 1),
        control=SimpleNamespace(slow_down_s=0.0, raise_injected=False),
        roster=SimpleNamespace(epoch=65536, key="k", snapshot_every=1, world_size=2),
        losses=SimpleNamespace(write=lambda index, epoch, loss: lines.append(index)),
        readable=lambda loss: loss,
    )  # fmt: skip
    step: Any = SimpleNamespace(index=6, committed=False)
    with pytest.raises(KilledHere):
        Loop(session, 10, 0).commit(step, 0.5)
    assert at_death == [[6]]
