"""``keepstep stacks`` on a real job without the SDK: the rank that does not come to the collective is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.acceptance.checks import MakeCluster

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

LIMIT_S = 90.0
WORLD = 3
SCRIPT = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
def spin():
    while True:
        pass
def train():
    if dist.get_rank() == 1:
        pathlib.Path("{there}").touch()
        spin()
    dist.all_reduce(torch.ones(1))
train()
"""


def stacks(cluster_home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "keepstep.cli.main", "stacks", "--state-dir", str(cluster_home), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ)


def test_the_rank_that_is_elsewhere_is_named_with_the_line_it_is_at(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """Two ranks wait in an all-reduce, rank 1 loops in its own code: the page and the JSON say so."""
    there, script = tmp_path / "there", tmp_path / "loops.py"
    script.write_text(SCRIPT.format(there=there))
    cluster = make_cluster(script=script, nodes=1, nproc=WORLD)
    cluster.start()
    cluster.until(there.exists, LIMIT_S, "rank 1's loop")

    def waiting() -> bool:
        found = json.loads(stacks(cluster.home / "state", "--json").stdout)
        return bool(found["odd_ranks"] == [1])

    cluster.until(waiting, LIMIT_S, "the others in the all-reduce")
    page = stacks(cluster.home / "state")
    assert page.returncode == 0, page.stderr
    assert "ranks 0,2 wait in a collective" in page.stdout
    assert "rank 1 computes (most others do not)" in page.stdout
    assert f"spin ({script}:" in page.stdout
    assert "Rank 1 is not where the other 2 are" in page.stdout
    assert "become.py" not in page.stdout, "what started the program says nothing"
    one = json.loads(stacks(cluster.home / "state", "--json", "--rank", "1").stdout)
    assert {process["rank"] for process in one["processes"]} == {1}
    wrong = stacks(cluster.home / "state", "--rank", "9")
    assert wrong.returncode != 0
    assert "no rank 9" in wrong.stderr
