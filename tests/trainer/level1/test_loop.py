"""The loop of level 1 in one process: what fails beside the training does not fail the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
