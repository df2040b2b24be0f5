"""A fork of the warm interpreter trains like a fresh one: same random state, own threads, no torch import to pay."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from shim_client import ShimClient

PROBE = """
import json, sys
was_imported = "torch" in sys.modules
import numpy, torch
own = torch.rand(1).item()
torch.manual_seed(3)
draws = torch.rand(3).tolist()
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 4)).sum().backward()
optimizer.step()
weight = layer.weight.detach().double().sum().item()
print(json.dumps({"warm": was_imported, "draws": draws, "weight": weight, "threads": torch.get_num_threads()}))
print(own, numpy.random.rand())
"""


@pytest.mark.acceptance
def test_warm_fork_equals_a_fresh_interpreter(tmp_path: Path) -> None:
    """Seeded draws and a first optimizer step are bitwise those of ``python script``; unseeded ones are its own."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    with tempfile.TemporaryDirectory(prefix="ks", dir="/dev/shm") as folder:
        shim = ShimClient(Path(folder), warm="torch")
        try:
            runs = [shim.run(f"w{i}", str(script), env={"OMP_NUM_THREADS": "1"}) for i in range(2)]
        finally:
            shim.close()
    plain = subprocess.run(
        [sys.executable, str(script)], env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    fresh = json.loads(plain.stdout.splitlines()[0])
    own = set()
    for code, out, err in runs:
        assert code == 0, err
        mine, luck = out.splitlines()
        assert json.loads(mine) == {**fresh, "warm": True}
        own.update(luck.split())
    assert len(own) == 4, "torch and NumPy draw other numbers in each fork"
