"""Every example runs as its first lines say: with plain python, with torchrun, and with keepstep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.acceptance.checks import MakeCluster

from keepstep.cli.demo import clean_environment

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 120.0
STEPS = ("--steps", "6")


def run(words: list[str]) -> str:
    done = subprocess.run(
        words,
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["lm", "ddp", "fsdp2"])
def test_example_runs_alone(name: str) -> None:
    """Plain `python train.py`: a world of one, no launcher, the same script."""
    assert "loss" in run([sys.executable, str(EXAMPLES / name / "train.py"), *STEPS])


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_example_runs_under_torchrun(name: str) -> None:
    """`torchrun train.py`: the SDK joins torchrun's groups and gets out of the way."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "loss" in run([*words, str(EXAMPLES / name / "train.py"), *STEPS])


def test_example_runs_under_keepstep(make_cluster: MakeCluster) -> None:
    """`keepstep run train.py` of the sharded example finishes with exit code 0."""
    cluster = make_cluster(script=EXAMPLES / "fsdp2" / "train.py", args=STEPS, nodes=1, nproc=2)
    cluster.start()
    assert cluster.wait(LIMIT_S) == {"node-0": 0}, cluster.tail()
