"""What per-step snapshots cost a training that is not disturbed: the same job with one at every step and with none.

    python -m benchmarks.checkpoint_overhead --json

Four jobs of the example's language model take turns (``benchmarks.turns``): one node without and with snapshots, and
two pretended nodes without and with snapshots that are replicated into the other node's memory at every step. Both
sides of each ratio differ in nothing but that. ``snapshot_ratio`` 1.01 means one percent slower.

The pretended nodes share this machine's cores: what the keepers compute to send, receive and verify is taken from the
trainers, which real nodes' spare cores would do.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

from benchmarks.progress import spread
from benchmarks.turns import arguments, compare, ratios
from keepstep.cli.demo_cluster import end_on_sigterm

SNAPSHOT_BOUND = 1.03
REPLICATED_BOUND = 1.05
LANES = {"none": (1, "0"), "snapshots": (1, "1"), "none_2": (2, "0"), "replicated": (2, "1")}
"""Nodes, and ``--snapshot-every``."""


def main() -> int:
    ask = arguments(__doc__)
    ask.add_argument("--width", type=int, default=128, help="of the model: the state grows with its square")
    ask.add_argument("--overhead", default="", help="--ckpt-overhead of the jobs with snapshots")
    args = ask.parse_args()
    if args.ranks % 2:
        ask.error(f"--ranks {args.ranks} must be even: two nodes share them")
    end_on_sigterm()
    words = ["--batch", str(args.batch), "--width", str(args.width)]
    budget = ("--ckpt-overhead", args.overhead) if args.overhead else ()
    jobs = {
        name: {
            "ranks": args.ranks,
            "nodes": nodes,
            "block": args.block,
            "words": words,
            "flags": ("--snapshot-every", every, *(budget if every != "0" else ())),
        }
        for name, (nodes, every) in LANES.items()
    }
    times = compare(jobs, rounds=args.repeats, seed=args.seed)

    snapshot, replicated = ratios(times, "snapshots", "none"), ratios(times, "replicated", "none_2")
    found = {
        "benchmark": "checkpoint_overhead",
        "ranks": args.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": args.repeats,
        "steps_per_block": args.block,
        "width": args.width,
        "seed": args.seed,
        **{f"{name}_ms": spread(values) for name, values in times.items()},
        "snapshot_ratio": round(statistics.median(snapshot), 4),
        "snapshot_ratio_spread": spread(snapshot, 4),
        "replicated_ratio": round(statistics.median(replicated), 4),
        "replicated_ratio_spread": spread(replicated, 4),
        "within": {
            "snapshot": statistics.median(snapshot) <= SNAPSHOT_BOUND,
            "replicated": statistics.median(replicated) <= REPLICATED_BOUND,
        },
    }
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
