"""How long after a fault until training goes on: kill to the first new *global* step, same script, same fault.

    python -m benchmarks.recovery --fault kill --trials 5 --json

Lanes: keepstep with warm standbys, keepstep without (a cold process takes the seat), and torchrun with the script's own
checkpoint. "New" means a step that had not been done before the fault, so steps done twice count as time lost.

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, each restart on gloo finds the dead attempt's keys
in the shared store and dies again. For ``freeze`` its script gets a process-group timeout of ``--gloo-timeout``
seconds, because with torch's default of 30 minutes nothing would happen before that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.progress import Progress, spread, until
from benchmarks.torchrun_lane import Torchrun
from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster, end_on_sigterm

WORKLOAD = Path(__file__).with_name("workload.py")
RANKS = 4
BREATH_STEPS = 12
"""Undisturbed steps before each fault."""
LIMIT_S = 180.0


class KeepstepLane:
    """One job, struck several times."""

    def __init__(self, home: Path, fault: str, *, warm: bool) -> None:
        self.fault, self.warm = fault, warm
        self.progress = Progress(home / "progress", RANKS)
        spread_out = fault == "node"
        self.cluster = Cluster(
            home,
            job=home.name,
            script=WORKLOAD,
            args=("--lane", "sdk", "--progress", str(home / "progress")),
            nodes=RANKS if spread_out else 1,
            standby_nodes=1 if spread_out and warm else 0,
            nproc=1 if spread_out else RANKS,
            flags=("--standbys", "1" if warm else "0"),
            environ=clean_environment(),
        )
        self.detect_ms: list[float] = []
        self.steps_lost = 0
        self.kept = 0
        self.possible = 0
        self._fresh = 0

    def start(self) -> None:
        self.cluster.start()

    def strike(self, victim: int) -> float:
        """One fault; seconds until the first new global step."""
        cluster, watch = self.cluster, self.cluster.watch
        cluster.until(watch.settled, LIMIT_S, "all ranks to train")
        if self.warm:
            cluster.until(lambda: self._standby_ready(victim), LIMIT_S, "a parked standby")
        base = self.progress.newest()
        until(lambda: self.progress.newest() >= base + BREATH_STEPS, LIMIT_S, "quiet steps", cluster.tail)
        known, before = set(watch.incidents), cluster.beats()
        wall, at = time.time_ns(), time.monotonic_ns()
        top = self.progress.newest()
        self._hurt(victim)
        done_at = 0

        def moved_on() -> bool:
            nonlocal done_at
            done_at = self.progress.first_after(top + 1) or 0
            return done_at > 0 and cluster.beats().get(victim, before[victim]).pid != before[victim].pid

        cluster.until(moved_on, LIMIT_S, "the first new step")
        cluster.until(lambda: self._closed(known), LIMIT_S, "the incident to be closed")
        fresh = [i for name, i in watch.incidents.items() if name not in known]
        self.detect_ms.append((fresh[0].opened - wall) / 1e6)
        self.steps_lost += sum(i.measured.steps_lost for i in fresh if i.measured)
        after = cluster.beats()
        self.kept += sum(1 for r, b in before.items() if r != victim and r in after and after[r].pid == b.pid)
        self.possible += RANKS - 1
        return (done_at - at) / 1e9

    def _closed(self, known: set[str]) -> bool:
        fresh = [i for name, i in self.cluster.watch.incidents.items() if name not in known]
        return bool(fresh) and all(i.over and i.measured for i in fresh)

    def _standby_ready(self, victim: int) -> bool:
        watch = self.cluster.watch
        if self.fault == "node":
            home = {m.node for m in watch.roster.members} if watch.roster else set()
            return any(node not in home for node, _ in watch.parked)
        return watch.standbys_on(self.cluster.node_of(victim)) > 0

    def _hurt(self, victim: int) -> None:
        if self.fault == "kill":
            self.cluster.kill_rank(victim)
        elif self.fault == "freeze":
            self.cluster.freeze_rank(victim)
        else:
            self.cluster.lose_node(self.cluster.node_of(victim))
            if not self.warm:  # as a scheduler would: another machine comes as soon as the old one is gone
                self._fresh += 1
                self.cluster.add_node(f"fresh-{self._fresh}", standby=False)

    def close(self) -> list[str]:
        return self.cluster.close()


def keepstep_lane(home: Path, fault: str, trials: int, *, warm: bool) -> tuple[list[float], KeepstepLane]:
    """All trials of one lane. A lost node is gone for good, so node loss takes a new job per trial."""
    times: list[float] = []
    lane = KeepstepLane(home / "job", fault, warm=warm)
    for trial in range(trials):
        if trial and fault == "node":
            fresh = KeepstepLane(home / f"job{trial}", fault, warm=warm)
            fresh.detect_ms, fresh.steps_lost = lane.detect_ms, lane.steps_lost
            fresh.kept, fresh.possible = lane.kept, lane.possible
            lane = fresh
        if trial == 0 or fault == "node":
            lane.start()
        try:
            times.append(lane.strike(1 + trial % (RANKS - 1)))
        except BaseException:
            lane.close()
            raise
        print(f"keepstep {'warm' if warm else 'cold'}: {times[-1]:.2f} s", file=sys.stderr)
        if fault == "node" or trial == trials - 1:
            lane.close()
    return times, lane


def torchrun_lane(home: Path, fault: str, trials: int, *, every: int, gloo_timeout: float) -> list[float]:
    """The same faults under torchrun. A lost node is replaced at once by another launcher, as a scheduler would."""
    words = ["--lane", "own", "--checkpoint", str(home / "checkpoint.pt"), "--every", str(every)]
    if fault == "freeze":
        words += ["--timeout", str(gloo_timeout)]
    times: list[float] = []
    lane = Torchrun(home, WORKLOAD, words, ranks=RANKS, nodes=RANKS if fault == "node" else 1, restarts=10 * trials)
    progress = Progress(lane.progress, RANKS)
    lane.start()
    try:
        for trial in range(trials):
            base = progress.newest()
            until(lambda: progress.newest() >= base + BREATH_STEPS, LIMIT_S, "quiet steps", lane.tail)  # noqa: B023
            top, at = progress.newest(), time.monotonic_ns()
            lane.hurt(fault, 1 + trial % (RANKS - 1))
            until(lambda: progress.first_after(top + 1) is not None, LIMIT_S, "the first new step", lane.tail)  # noqa: B023
            times.append(((progress.first_after(top + 1) or 0) - at) / 1e9)
            print(f"torchrun: {times[-1]:.2f} s", file=sys.stderr)
    finally:
        lane.close()
    return times


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--fault", choices=["kill", "freeze", "node"], default="kill")
    ask.add_argument("--trials", type=int, default=5)
    ask.add_argument("--lanes", nargs="+", choices=["warm", "cold", "torchrun"], default=["warm", "cold", "torchrun"])
    ask.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints in torchrun's lane")
    ask.add_argument("--gloo-timeout", type=float, default=10.0, help="seconds, torchrun's lane with --fault freeze")
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    end_on_sigterm()

    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    found: dict[str, object] = {"benchmark": "recovery", "fault": args.fault, "ranks": RANKS, "trials": args.trials}
    medians: dict[str, float] = {}
    try:
        for lane in args.lanes:
            if lane == "torchrun":
                times = torchrun_lane(
                    home / "torchrun",
                    args.fault,
                    args.trials,
                    every=args.checkpoint_every,
                    gloo_timeout=args.gloo_timeout,
                )
                found["torchrun_s"] = spread(times)
                found["torchrun_checkpoint_every"] = args.checkpoint_every
                if args.fault == "freeze":
                    found["torchrun_gloo_timeout_s"] = args.gloo_timeout
            else:
                times, job = keepstep_lane(home / lane, args.fault, args.trials, warm=lane == "warm")
                found[f"keepstep_{lane}_s"] = spread(times)
                if lane == "warm":
                    found["detect_ms"] = round(statistics.median(job.detect_ms), 1)
                    found["detect_ms_min"] = round(min(job.detect_ms), 1)
                    found["detect_ms_max"] = round(max(job.detect_ms), 1)
                    found["steps_lost"] = job.steps_lost
                    found["survivors_kept"] = round(job.kept / job.possible, 4)
            medians[lane] = statistics.median(times)
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(home, ignore_errors=True)
    if {"warm", "torchrun"} <= medians.keys():
        found["ratio_torchrun_over_warm"] = round(medians["torchrun"] / medians["warm"], 1)
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
