"""What keepstep costs while nothing is wrong: the same script bare, with the SDK, and with a snapshot per step.

    python -m benchmarks.overhead --json

Three jobs live side by side and take turns: a block of steps of one, then of the next, in an order drawn anew for each
round, and nobody else trains meanwhile. Each ratio is of two blocks of the same round, so a slow minute of the
machine touches both sides. ``sdk_ratio`` 1.01 means one percent slower than the bare script.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.progress import Progress, spread, until
from benchmarks.torchrun_lane import Torchrun
from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster, end_on_sigterm

WORKLOAD = Path(__file__).with_name("workload.py")
START_LIMIT_S = 120.0
BLOCK_LIMIT_S = 120.0
SKIPPED = 3
"""First steps of each block, while caches are cold from the others' turns."""


class Lane:
    """One of the three jobs: its pipes, and the times of its newest block."""

    def __init__(self, home: Path, name: str, args: argparse.Namespace) -> None:
        self.name, self.ranks, self.block = name, args.ranks, args.block
        self.gate = home / "gate"
        self.gate.mkdir(parents=True)
        for rank in range(self.ranks):
            os.mkfifo(self.gate / f"rank{rank}")
        words = ["--batch", str(args.batch), "--gate", str(self.gate), "--block", str(args.block)]
        self.progress = Progress(home / "progress", self.ranks)
        self.pipes: list[int] = []
        self.job: Torchrun | Cluster
        if name == "bare":
            self.job = Torchrun(home, WORKLOAD, ["--lane", "bare", *words], ranks=self.ranks, nodes=1, restarts=0)
        else:
            self.job = Cluster(
                home,
                job=name,
                script=WORKLOAD,
                args=("--lane", "sdk", "--progress", str(home / "progress"), *words),
                nodes=1,
                nproc=self.ranks,
                flags=("--standbys", "0", "--snapshot-every", "1" if name == "snapshots" else "0"),
                environ=clean_environment(),
            )
        self.job.start()
        self.blocks = 0

    def open(self) -> None:
        """Open the pipes: succeeds only once every rank waits at its gate."""
        for rank in range(self.ranks):
            path = self.gate / f"rank{rank}"

            def there(path: Path = path) -> bool:
                try:
                    self.pipes.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                except OSError:  # ENXIO: nobody reads yet
                    return False
                return True

            until(there, START_LIMIT_S, f"rank {rank} of lane {self.name}", self.job.tail)

    def turn(self) -> float:
        """Train one block; the median duration of its steps in milliseconds."""
        last = (self.blocks + 1) * self.block - 1
        for pipe in self.pipes:
            os.write(pipe, b"g")
        until(lambda: self.progress.newest() >= last, BLOCK_LIMIT_S, f"a block of lane {self.name}", self.job.tail)
        done = self.progress.done()
        ends = [done[step] for step in range(last - self.block + 1, last + 1)]
        self.blocks += 1
        return statistics.median((b - a) / 1e6 for a, b in zip(ends[SKIPPED:], ends[SKIPPED + 1 :], strict=False))

    def close(self) -> None:
        for pipe in self.pipes:
            os.close(pipe)
        self.job.close()


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--repeats", type=int, default=20, help="rounds")
    ask.add_argument("--block", type=int, default=40, help="steps per turn")
    ask.add_argument("--ranks", type=int, default=2)
    ask.add_argument("--batch", type=int, default=8)
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    end_on_sigterm()
    print(f"seed {args.seed}", file=sys.stderr)

    order = random.Random(args.seed)
    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    names = ["bare", "sdk", "snapshots"]
    times: dict[str, list[float]] = {name: [] for name in names}
    lanes: dict[str, Lane] = {}
    try:
        for name in names:  # one after the other, so that starts do not starve one another
            lanes[name] = Lane(home / name, name, args)
            lanes[name].open()
            lanes[name].turn()
        for round_ in range(args.repeats):
            for name in order.sample(names, len(names)):
                times[name].append(lanes[name].turn())
            print(f"round {round_}: " + "  ".join(f"{n} {times[n][-1]:.2f} ms" for n in names), file=sys.stderr)
    finally:
        for lane in lanes.values():
            lane.close()
        shutil.rmtree(home, ignore_errors=True)

    sdk = [b / a for a, b in zip(times["bare"], times["sdk"], strict=True)]
    snapshot = [b / a for a, b in zip(times["bare"], times["snapshots"], strict=True)]
    found = {
        "benchmark": "overhead",
        "ranks": args.ranks,
        "rounds": args.repeats,
        "steps_per_block": args.block,
        "seed": args.seed,
        "bare_ms": spread(times["bare"]),
        "sdk_ms": spread(times["sdk"]),
        "snapshots_ms": spread(times["snapshots"]),
        "sdk_ratio": round(statistics.median(sdk), 4),
        "sdk_ratio_spread": spread(sdk, 4),
        "snapshot_ratio": round(statistics.median(snapshot), 4),
        "snapshot_ratio_spread": spread(snapshot, 4),
    }
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
