"""Scripts without the SDK: watched, started again from their own checkpoint, and stopped with their own exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.acceptance.checks import MakeCluster, assert_log_folds_to_one_state

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 90.0


def test_plain_script_is_restarted_from_its_own_checkpoint(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """kill -9 of one rank of a plain script: all ranks start again, go on from the checkpoint, and finish with 0."""
    checkpoint = tmp_path / "plain.pt"
    script = tmp_path / "slow_plain.py"
    text = (EXAMPLES / "plain" / "train.py").read_text()
    script.write_text(
        text.replace("        loss.backward()\n", "        loss.backward()\n        import time; time.sleep(0.02)\n")
    )
    cluster = make_cluster(
        script=script, args=("--steps", "200", "--every", "10", "--checkpoint", str(checkpoint)), nodes=1, nproc=2
    )
    cluster.start()
    cluster.until(checkpoint.exists, LIMIT_S, "the first checkpoint")
    (victim,) = [slot["pid"] for slot in cluster.slots("node-0") if slot["role"] == "worker" and slot["rank"] == 1]
    os.kill(victim, signal.SIGKILL)
    assert cluster.wait(LIMIT_S) == {"node-0": 0}, cluster.tail()
    assert "going on from step" in "".join(p.read_text() for p in cluster.run_dir.glob("logs/**/rank_0.out"))
    assert len(cluster.watch.incidents) >= 1
    assert_log_folds_to_one_state(cluster.run_dir)


@pytest.mark.parametrize("code", [3, 93])
def test_exit_code_is_passed_through(code: int, tmp_path: Path, make_cluster: MakeCluster) -> None:
    """A script that fails by itself every time ends the job with its own code, and the report blames the code."""
    script = tmp_path / "fails.py"
    script.write_text(
        f"import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit({code} if os.environ['RANK'] == '1' else 0)\n"
    )
    cluster = make_cluster(script=script, nodes=1, nproc=2, flags=("--max-restarts", "1"))
    cluster.start()
    assert cluster.wait(LIMIT_S) == {"node-0": code}, cluster.tail()
    report = cluster.exit_report()
    assert report["code"] == code
    assert report["category"] == "user_code"
