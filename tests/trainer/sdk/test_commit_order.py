"""What a commit leaves behind when the process is killed in the middle of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.slot import Version
from keepstep.model.env import COPY
from keepstep.model.ids import JobId
from keepstep.trainer import loop_torch
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
        cuda=False, token="", snap_dir=Path(), rank=0, beat=None, has_buddy=True,
        state=SimpleNamespace(settle_buckets=lambda: None, touched=True, replicated=True),
        snapshots=SimpleNamespace(
            save=save, await_copy=lambda: None, whole=True, waited_s=0.0, lag=lambda: (6, 6),
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


def test_a_node_alone_has_its_versions_sealed_and_its_last_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper hears of every full version, whether or not it goes to another node: it adds the checksums. The last
    version is complete when its commit returns: what the script does to the model after it spoils nothing."""
    monkeypatch.setenv(COPY, "overlapped")
    saved: dict[Version, dict[str, Any]] = {}
    session: Any = SimpleNamespace(
        cuda=False, token="", snap_dir=Path(), rank=0, has_buddy=False,
        state=SimpleNamespace(settle_buckets=lambda: None, touched=True, replicated=True),
        snapshots=SimpleNamespace(
            save=lambda state, version, **how: saved.update({version: how}), await_copy=lambda: None, waited_s=0.0,
            whole=True, copied_s=0.0, config=CheckpointConfig(job=JobId("j")),
        ),
        groups=SimpleNamespace(world_ops_since_mark=lambda: 1),
        control=SimpleNamespace(slow_down_s=0.0, raise_injected=False),
        roster=SimpleNamespace(epoch=1, key="k", snapshot_every=1, world_size=2),
        losses=SimpleNamespace(write=lambda index, epoch, loss: None),
        beat=SimpleNamespace(commit=lambda step: None),
        readable=lambda loss: loss,
    )  # fmt: skip
    loop = Loop(session, 3, 0)
    for index in range(3):
        step: Any = SimpleNamespace(index=index, committed=False)
        loop.commit(step, 0.5)
    assert [how["ring"] for how in saved.values()] == [True, True, True]
    assert [how["overlap"] for how in saved.values()] == [True, True, False]


def test_a_device_works_on_while_the_other_nodes_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the step before comes at the commit, before ranks meet and before the device is waited for. With a
    budget it ends as it does without a device."""
    dear = False
    order: list[str] = []
    session: Any = SimpleNamespace(
        cuda=True, token="", snap_dir=Path(), rank=0, has_buddy=True, await_device=lambda: order.append("device"),
        state=SimpleNamespace(settle_buckets=lambda: None, touched=True, replicated=True),
        snapshots=SimpleNamespace(
            save=lambda state, version, **how: order.append("save"), await_copy=lambda: order.append("copy"),
            whole=True, waited_s=0.0, copied_s=0.0, lag=lambda: (1, 1), config=CheckpointConfig(job=JobId("j")),
        ),
        groups=SimpleNamespace(mark=lambda: None, world_ops_since_mark=lambda: 0, aborted=False),
        control=SimpleNamespace(slow_down_s=0.0, raise_injected=False, pending=None),
        roster=SimpleNamespace(epoch=1, key="k", snapshot_every=1, world_size=1),
        losses=SimpleNamespace(write=lambda index, epoch, loss: None),
        beat=SimpleNamespace(phase=lambda phase: None, commit=lambda step: None),
        readable=lambda loss: loss,
    )  # fmt: skip
    loop = Loop(session, 5, 0)
    loop._gated = loop._replicated = True
    monkeypatch.setattr(loop._gate, "wait", lambda step: order.append(f"replica of {step}"))
    monkeypatch.setattr(loop._pacing, "too_dear", lambda gate: dear)
    for index in range(3):
        step: Any = SimpleNamespace(index=index, committed=False)
        loop.begin(step)
        loop.commit(step, 0.5)
        dear = True
    assert order == [
        *("copy", "replica of 0", "device", "save"),
        *("copy", "replica of 1", "device", "save"),
        *("copy", "device", "save"),
    ]


@pytest.mark.parametrize(
    ("replicated", "common", "every", "forgets"),
    [(False, False, 1, True), (False, True, 1, False), (True, False, 1, False), (False, False, 4, False)],
)
def test_a_version_that_some_rank_lacks_gives_way_before_the_next_is_written(
    monkeypatch: pytest.MonkeyPatch, replicated: bool, common: bool, every: int, forgets: bool
) -> None:
    """Sharded state: all ranks hear of it before they write over the last version that is everywhere. A live replica
    needs none of that, nor does a step that writes nothing."""
    order: list[str] = []
    session: Any = SimpleNamespace(
        cuda=False, token="", snap_dir=Path(), rank=0, has_buddy=False,
        state=SimpleNamespace(settle_buckets=lambda: None, touched=True, replicated=replicated),
        snapshots=SimpleNamespace(
            save=lambda state, version, **how: order.append("save" if how["full"] else "part"),
            await_copy=lambda: order.append("copy"), forget_newest=lambda: order.append("forget"),
            whole=True, waited_s=0.0, copied_s=0.0, config=CheckpointConfig(job=JobId("j")),
        ),
        groups=SimpleNamespace(world_ops_since_mark=lambda: 1), beat=SimpleNamespace(commit=lambda step: None),
        control=SimpleNamespace(slow_down_s=0.0, raise_injected=False),
        roster=SimpleNamespace(epoch=1, key="k", snapshot_every=every, world_size=2),
        losses=SimpleNamespace(write=lambda index, epoch, loss: None), readable=lambda loss: loss,
    )  # fmt: skip
    monkeypatch.setattr(loop_torch, "everybody", lambda good: common)
    loop = Loop(session, 9, 0)
    loop.done, loop._replicated = 4, replicated
    loop._pacing.restart(4, every)
    loop.commit(SimpleNamespace(index=4, committed=False), 0.5)  # type: ignore[arg-type]
    assert order == ["copy", *(["forget"] if forgets else []), "save" if every == 1 else "part"]
