"""What keepstep costs while nothing is wrong: the same script bare, with the SDK, and with a snapshot per step.

    python -m benchmarks.overhead --json

Three jobs take turns (``benchmarks.turns``). ``sdk_ratio`` 1.01 means one percent slower than the bare script.
"""

from __future__ import annotations

import json
import statistics
import sys

from benchmarks.progress import spread
from benchmarks.turns import arguments, compare, ratios
from keepstep.cli.demo_cluster import end_on_sigterm

LANES: dict[str, tuple[str, ...] | None] = {
    "bare": None,
    "sdk": ("--snapshot-every", "0"),
    "snapshots": ("--snapshot-every", "1"),
}


def main() -> int:
    args = arguments(__doc__).parse_args()
    end_on_sigterm()
    common = {"ranks": args.ranks, "block": args.block, "words": ["--batch", str(args.batch)]}
    jobs = {name: {**common, "flags": flags} for name, flags in LANES.items()}
    times = compare(jobs, rounds=args.repeats, seed=args.seed)

    sdk, snapshot = ratios(times, "sdk", "bare"), ratios(times, "snapshots", "bare")
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
