"""The loop of level 1 in one process: what fails beside the training does not fail the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.model.ids import JobId
from keepstep.trainer import level1_loop_torch
from keepstep.trainer.level1_loop_torch import Level1Loop

SCRIPT = """
import sys
import torch
import keepstep
from keepstep.checkpoint.exceptions import SlotFull
from keepstep.trainer import attended, snapshots_torch

attended.CONNECT_S = 0.2
attended.Attended._leader = property(lambda self: False, lambda self, value: None)  # nobody starts an attendant
whole = snapshots_torch.Snapshots.save

def save(self, state, version, **how):
    if 2 <= version.step <= 4:
        raise SlotFull(f"no room for step {version.step}")
    whole(self, state, version, **how)

snapshots_torch.Snapshots.save = save
ks = keepstep.init(checkpoint=keepstep.Checkpoint(linger_s=0.1))
assert ks.level == 1
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ks.register(model=model, optimizer=optimizer)
for step in ks.steps(6):
    with step:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        step.commit(loss=loss)
print("done", [version.step for version in sorted(ks._alone.snapshots.full())])
"""


def test_without_keeper_and_without_room_training_goes_on(tmp_path: Path) -> None:
    """No attendant can be had, and three snapshots fail: both are said once, and the loop comes to its end."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    environ |= {"KEEPSTEP_RUNTIME_DIR": str(tmp_path / "r"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done [5, 6]\n"
    assert "no attendant could be had" in done.stderr
    assert done.stderr.count("no snapshot of step") == 1
    assert "no snapshot of step 2: no room for step 2; training goes on" in done.stderr


@pytest.mark.parametrize(
    ("every", "replicated", "buddy", "port", "waits"),
    [
        (1, True, True, 7000, True),
        (1, False, True, 7000, True),
        (2, False, True, 7000, True),
        (2, True, True, 7000, False),
        (1, False, False, 7000, False),
        (1, False, True, 0, False),
    ],
)
def test_nothing_is_overwritten_before_another_node_has_what_came_after_it(
    monkeypatch: pytest.MonkeyPatch, every: int, replicated: bool, buddy: bool, port: int, waits: bool
) -> None:
    """A lost node's ranks go on from the copy elsewhere: the others must still have the step that this copy is of. So
    each rank waits for its own copy, and then for all ranks, before it writes over the step before."""
    order: list[str] = []
    part: Any = SimpleNamespace(
        rank=0, has_buddy=buddy, line=SimpleNamespace(keeper_port=port),
        who=SimpleNamespace(device="cpu", world_size=2),
        config=CheckpointConfig(job=JobId("j"), snapshot_every=every), roster=SimpleNamespace(epoch=1, key="k"),
        state=SimpleNamespace(settle_buckets=lambda: None, touched=True, replicated=replicated),
        snapshots=SimpleNamespace(
            save=lambda state, version, **how: order.append(f"save {version.step}"), lag=lambda: (1, 1), waited_s=0.0,
            await_copy=lambda: order.append("copy"), whole=True, copied_s=0.0, config=CheckpointConfig(job=JobId("j")),
        ),
    )  # fmt: skip
    monkeypatch.setattr(level1_loop_torch, "everybody", lambda good: order.append("everybody") or good)
    loop = Level1Loop(part, 9, 0)
    monkeypatch.setattr(loop._gate, "wait", lambda step: order.append(f"replica of {step}"))
    loop._begin(3)
    step: Any = SimpleNamespace(index=3)
    loop.commit(step, None)
    assert order == ["copy", *(["replica of 3"] if waits else []), "everybody", "save 4"]
