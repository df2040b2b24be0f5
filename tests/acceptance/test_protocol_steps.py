"""Everybody may die, at every step of the protocol: the table below, played on real processes with kill -9.

Rows are protocol steps of a recovery, as the event log shows them; columns are the processes of a job. In each cell a
rank is killed, and when its recovery has come to the row's step, the column's process is killed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.acceptance.checks import (
    REFERENCE_STEPS,
    WORLD,
    MakeCluster,
    assert_log_folds_to_one_state,
    assert_same_losses,
    until,
)

from keepstep.cli.demo_cluster import Cluster
from keepstep.cli.demo_proc import is_alive
from keepstep.cli.demo_watch import Watch

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

PACE_S = 0.03
RECOVERY_LIMIT_S = 60.0
FIRST, SECOND = 1, 2
"""The rank whose death starts each recovery (on node-0), and the survivor that dies in the column ``survivor``."""

Reached = Callable[[Watch, int, int], bool]

PROTOCOL_STEPS: dict[str, Reached] = {
    "training": lambda watch, epoch, open_: True,
    "opened": lambda watch, epoch, open_: len(watch.incidents) > open_,
    "epoch": lambda watch, epoch, open_: watch.roster is not None and watch.roster.epoch > epoch,
    "rebuild": lambda watch, epoch, open_: any(e > epoch and ranks for e, ranks in watch.joins.items()),
    "restore": lambda watch, epoch, open_: any(e > epoch and ranks for e, ranks in watch.resumed.items()),
    "verify": lambda watch, epoch, open_: any(e > epoch and ranks for e, ranks in watch.advanced.items()),
}

VICTIMS: dict[str, Callable[[Cluster], str]] = {
    "survivor": lambda cluster: cluster.kill_rank(SECOND),
    "newcomer": lambda cluster: kill_newcomer(cluster),
    "agent": lambda cluster: kill_role(cluster, "node-0", "agent"),
    "other agent": lambda cluster: kill_role(cluster, "node-1", "agent"),
    "shim": lambda cluster: kill_role(cluster, "node-0", "shim"),
    "keeper": lambda cluster: kill_role(cluster, "node-0", "keeper"),
    "controller": lambda cluster: cluster.kill_controller(),
    "store": lambda cluster: kill_role(cluster, "node-0", "store"),
}


@pytest.mark.parametrize("victim", list(VICTIMS))
def test_kill_at_every_protocol_step(victim: str, make_cluster: MakeCluster, undisturbed: Path) -> None:
    """Whoever is killed at whichever step: the job goes on, no step is lost, all losses equal the undisturbed run's."""
    cluster = make_cluster(
        args=("--steps", str(REFERENCE_STEPS), "--pace", str(PACE_S)), nodes=2, nproc=2, flags=("--standbys", "2")
    )
    cluster.start()
    for name, reached in PROTOCOL_STEPS.items():
        play_cell(cluster, name, reached, VICTIMS[victim])
    steps = cluster.floor()
    assert steps < REFERENCE_STEPS, "the table took longer than the job"
    cluster.close()
    measured = [i.measured for i in cluster.watch.incidents.values() if i.measured is not None]
    assert sum(m.steps_lost for m in measured) == 0, measured
    assert_same_losses(cluster, undisturbed, steps, WORLD)
    assert_log_folds_to_one_state(cluster.run_dir)


def kill_newcomer(cluster: Cluster) -> str:
    """Kill whoever holds the seat now, as soon as somebody does."""

    def seated() -> bool:
        beat = cluster.beats().get(FIRST)
        return beat is not None and is_alive(beat.pid)

    until(cluster, seated, RECOVERY_LIMIT_S, "a living process in the seat")
    return cluster.kill_rank(FIRST)


def kill_role(cluster: Cluster, node: str, role: str) -> str:
    """Kill it as soon as it is there: it may have died in the step before, and be on its way back."""
    until(cluster, lambda: cluster.role_pid(node, role) is not None, RECOVERY_LIMIT_S, f"{role} on {node}")
    return cluster.kill_role(node, role)


def play_cell(cluster: Cluster, name: str, reached: Reached, kill: Callable[[Cluster], str]) -> None:
    watch = cluster.watch
    cluster.until(watch.settled, RECOVERY_LIMIT_S, f"calm before {name!r}")
    cluster.until(lambda: watch.standbys_on(cluster.node_of(FIRST)) > 0, RECOVERY_LIMIT_S, f"a standby before {name!r}")
    assert watch.roster is not None
    epoch, open_ = watch.roster.epoch, len(watch.incidents)
    before = cluster.steps()
    if name != "training":
        cluster.kill_rank(FIRST)
        until(cluster, lambda: reached(watch, epoch, open_), RECOVERY_LIMIT_S, f"protocol step {name!r}")
    kill(cluster)
    top = max(before.values())
    cluster.until(lambda: cluster.floor() > top + 2, RECOVERY_LIMIT_S, f"training to go on after {name!r}")
