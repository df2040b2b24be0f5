"""The demo is the shortest proof of the whole; it runs here as a person would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from keepstep.cli.demo import RANKS, STEPS

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(400)]
LIMIT_S = 300.0
"""Of the test; the demo itself promises two minutes on an idle machine with two cores."""


def test_demo_recovers_from_everything() -> None:
    """Six faults: each is recovered from with all survivors kept, no step is lost, and losses are equal bit for bit."""
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "keepstep.v1/Demo"
    assert report["losses_identical"] is True
    assert (report["steps"], report["ranks"]) == (STEPS, RANKS)
    assert {f["fault"] for f in report["faults"]} == {"kill", "freeze", "node", "controller", "store"}
    for fault in report["faults"]:
        assert fault["steps_lost"] == 0, fault
        assert fault["kept"] == fault["could_keep"] == RANKS - 1, fault
    assert report["user_exception"]["exit_code"] == 1
    assert report["user_exception"]["category"] == "user_code"
    assert report["orphans"] == []
