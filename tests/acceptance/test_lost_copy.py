"""A node is lost while its copies on the other node lag behind: the numbers must stay the same even then."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.acceptance.checks import REFERENCE_STEPS, WORLD, MakeCluster, assert_same_losses

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

PACE_S = 0.03
START_LIMIT_S = 60.0
STILL_S = 0.4
"""More than ten steps, and far below the two seconds after which training goes on without a copy."""


def test_a_lagging_copy_holds_the_job_back_and_a_lost_node_changes_no_loss(
    make_cluster: MakeCluster, undisturbed: Path
) -> None:
    """Plain DDP: parameters could be had from any rank, but batch norm's statistics and dropout's random state of the
    lost ranks are only in the copy. While the keeper cannot copy, no rank may run ahead of it; so when the node is
    lost then, all losses are those of the undisturbed run."""
    cluster = make_cluster(
        args=("--steps", str(REFERENCE_STEPS), "--pace", str(PACE_S)), nodes=2, standby_nodes=1, nproc=2,
        flags=("--standbys", "2"),
    )  # fmt: skip
    cluster.start()
    cluster.until(cluster.watch.settled, START_LIMIT_S, "the job to start")
    cluster.until(lambda: cluster.watch.standbys_on("spare-0") == 2, START_LIMIT_S, "two standbys on the spare node")
    keeper = cluster.role_pid("node-1", "keeper")
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)
    stopped, last, since = cluster.steps(), {0: -1}, time.monotonic()

    def still() -> bool:
        nonlocal last, since
        if (steps := cluster.steps()) != last:
            last, since = steps, time.monotonic()
        return time.monotonic() - since > STILL_S

    cluster.until(still, START_LIMIT_S, "the job to wait for its copy")
    assert max(last.values()) <= max(stopped.values()) + 2, f"from {stopped} to {last} without a copy"
    cluster.lose_node("node-1")
    top = max(last.values())
    cluster.until(lambda: cluster.floor() > top + 5, START_LIMIT_S, "training to go on")
    cluster.until(cluster.watch.settled, START_LIMIT_S, "calm")
    steps = cluster.floor()
    incidents = set(cluster.watch.incidents)
    assert not cluster.close()
    # All launchers were sent SIGTERM at once, as a scheduler does: an ordered end is nobody's fault.
    assert set(cluster.watch.incidents) == incidents
    assert_same_losses(cluster, undisturbed, steps, WORLD)
