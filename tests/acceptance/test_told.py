"""What ranks write reaches the incident's page: real processes, three faults in one job, each named for what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.checks import MakeCluster, assert_log_folds_to_one_state

from keepstep.model import env

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parent / "told_train.py"
LIMIT_S = 120.0


def ask(state: Path, *words: str) -> str:
    command = [sys.executable, "-m", "keepstep.cli.main", *words]
    done = subprocess.run(
        command, env={**os.environ, env.STATE_DIR: str(state)}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_lost_gpu_a_bug_and_a_corrupt_sample_are_told_apart(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """The lost GPU moves the rank to the spare node; the bug and the sample evict nobody; each page says why."""
    cluster = make_cluster(
        script=SCRIPT, args=("--steps", "160", "--met", str(tmp_path / "met")), nodes=2, standby_nodes=1, nproc=1
    )
    cluster.start()
    codes = cluster.wait(LIMIT_S)
    assert codes["node-0"] == 0, cluster.tail()
    assert len(list((tmp_path / "met").iterdir())) == 3
    state = cluster.home / "state"
    told: list[dict[str, Any]] = [json.loads(ask(state, "incident", f"i{n}", "-o", "json")) for n in (1, 2, 3)]
    lost, bug, data = told

    assert (lost["category"], lost["node"], lost["code"]) == ("infrastructure", "node-1", "GPU079")
    assert lost["root_cause"].startswith("gpu_fell_off_bus")
    assert lost["rung"] == "replace_node"
    assert "fallen off the bus" in lost["evidence"][0]
    page = ask(state, "incident", "i1")
    assert "keepstep explain GPU079" in page
    assert "said      node-1:r1 | " in page

    assert (bug["category"], bug["node"], bug["ranks"]) == ("user_code", None, "0")
    assert "KeyError" in bug["reason"]
    assert "told_train.py" in bug["reason"]

    assert (data["category"], data["node"], data["ranks"]) == ("data", None, "1")
    assert "shard-00017.tar" in ask(state, "incident", "i3")

    moved = [row["node"] for row in json.loads(ask(state, "job", "-o", "json"))["ranks"]]
    assert sorted(moved) == ["node-0", "spare-0"]
    assert_log_folds_to_one_state(cluster.run_dir)
