"""In which order a step waits for copies: no rank may write over the step before while another still needs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.slot import Version
from keepstep.model.ids import JobId
from keepstep.trainer import loop_torch
from keepstep.trainer.loop_torch import Loop


class Told:
    """A session that only says what it is asked for."""

    def __init__(self, *, replicated: bool, buddy: bool) -> None:
        self.said: list[str] = []
        say = self.said.append
        self.cuda, self.token, self.snap_dir, self.rank, self.has_buddy = False, "", Path(), 0, buddy
        self.state = SimpleNamespace(replicated=replicated, settle_buckets=lambda: say("buckets"), touched=True)
        self.snapshots = SimpleNamespace(
            await_copy=lambda: say("await copy"),
            save=lambda *_, **how: say("save" if how["full"] else "save private part"),
            replicated=lambda: say("on another node?") or True,
            lag=lambda: (0, 0),
            held=list,
            waited_s=0.0,
            copied_s=0.0,
            whole=True,
            notes=SimpleNamespace(tell=lambda note: None),
            config=CheckpointConfig(job=JobId("j")),
        )
        self.groups = SimpleNamespace(before_reduce=None, world_ops_since_mark=lambda: 0)
        self.control = SimpleNamespace(slow_down_s=0.0, raise_injected=False, pending=None)
        self.roster = SimpleNamespace(epoch=65536, key="k", snapshot_every=1, world_size=2)
        self.losses = SimpleNamespace(write=lambda *_: say("loss"))
        self.beat = SimpleNamespace(commit=lambda _: None)

    def readable(self, loss: object) -> object:
        return loss


def loop_of(session: Any) -> Loop:
    loop = Loop(session, 10, 0)
    loop._set_gate()
    return loop


@pytest.mark.parametrize(
    ("replicated", "buddy", "order"),
    [
        (False, True, ["await copy", "on another node?"]),
        (False, False, ["await copy"]),
        (True, True, ["on another node?"]),
        (True, False, None),
    ],
)
def test_what_the_first_reduction_of_a_step_waits_for(replicated: bool, buddy: bool, order: list[str] | None) -> None:
    """Sharded state must be complete here, with or without another node; a replica's need not."""
    session = Told(replicated=replicated, buddy=buddy)
    loop_of(session)
    hook = session.groups.before_reduce
    if order is None:
        assert hook is None
        return
    hook()
    assert session.said == order


def test_a_commit_says_that_it_is_here_only_when_its_last_copy_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step has no reduction over all ranks, the commit's own is what lets others write over the step before:
    this rank's version is complete by then, whatever kind of device, and it writes over its own only afterwards."""
    session = Told(replicated=False, buddy=False)
    monkeypatch.setattr(loop_torch, "everybody", lambda good: session.said.append("everybody is here") or good)
    step: Any = SimpleNamespace(index=6, committed=False)
    loop = loop_of(session)
    loop.commit(step, 0.5)
    assert session.said == ["await copy", "everybody is here", "buckets", "loss", "save"]


def test_a_step_is_saved_once() -> None:
    """Between full snapshots the private part is kept; a full one has it in it, and a second save at the same commit
    would wait for the first one's copy."""
    session = Told(replicated=True, buddy=False)
    session.roster.snapshot_every = 4
    loop = loop_of(session)
    loop._pacing.restart(0, 4)
    for step in range(3, 6):
        loop._save(Version(step, 1))
    assert session.said == ["save private part", "save", "save private part"]
