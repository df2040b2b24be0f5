"""What has to be true of every job, whatever was done to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from keepstep.cli.demo_cluster import Cluster
from keepstep.cli.demo_watch import differences
from keepstep.core.controller import Controller
from keepstep.model.settings import Policy
from keepstep.store.sqlite import open_log

WORLD = 4
REFERENCE_STEPS = 1500

MakeCluster = Callable[..., Cluster]

LOOK_S = 0.001
"""Between two looks at the log when a protocol step of a few milliseconds has to be hit."""


def assert_log_folds_to_one_state(run_dir: Path) -> None:
    """Folding the log from its start, twice, and from its snapshot gives the same state: nothing is decided twice."""
    log = open_log(run_dir / "log.sqlite", readonly=True)
    try:
        first, second = Controller(Policy()), Controller(Policy())
        for entry in log.read():
            first.evolve(entry.record)
            second.evolve(entry.record)
        assert first.dump() == second.dump()
        saved = log.load_snapshot()
        if saved is not None:
            seq, state = saved
            third = Controller.load(state, Policy())
            for entry in log.read(after=seq):
                third.evolve(entry.record)
            assert third.dump() == first.dump(), f"the snapshot at entry {seq} leads to another state"
    finally:
        log.close()


def assert_same_losses(cluster: Cluster, undisturbed: Path, steps: int, world_size: int = 4) -> None:
    """Every loss of every rank up to ``steps`` equals the undisturbed run's, bit for bit."""
    assert steps > 0
    found = differences(cluster.run_dir, undisturbed, world_size=world_size, steps=range(steps))
    assert not found, f"{len(found)} differ, first: {found[:3]}"


def until(cluster: Cluster, done: Callable[[], bool], limit_s: float, what: str) -> None:
    """As ``Cluster.until``, with looks so close that short protocol steps are not missed."""
    deadline = time.monotonic() + limit_s
    while True:
        cluster.watch.poll()
        if done():
            return
        assert time.monotonic() < deadline, f"{limit_s:.0f} s without {what}\n{cluster.tail()}"
        time.sleep(LOOK_S)
