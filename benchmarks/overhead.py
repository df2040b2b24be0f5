"""What keepstep costs while nothing is wrong: the same script bare, with the SDK, and with a snapshot per step.

    python -m benchmarks.overhead --json

Three jobs take turns (``benchmarks.turns``). ``sdk_ratio`` 1.01 means one percent slower than the bare script.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys

from benchmarks.progress import spread
from benchmarks.turns import Lane, ratios, scratch, take_turns
from keepstep.cli.demo_cluster import end_on_sigterm

LANES: dict[str, tuple[str, ...] | None] = {
    "bare": None,
    "sdk": ("--snapshot-every", "0"),
    "snapshots": ("--snapshot-every", "1"),
}


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
    names = list(LANES)
    lanes: dict[str, Lane] = {}
    with scratch() as home:
        try:
            for name, flags in LANES.items():  # one after the other, so that starts do not starve one another
                lanes[name] = Lane(
                    home / name, name, ranks=args.ranks, block=args.block, words=["--batch", str(args.batch)],
                    flags=flags,
                )  # fmt: skip
                lanes[name].open()
                lanes[name].turn()
            times = take_turns(lanes, names, args.repeats, order)
        finally:
            for lane in lanes.values():
                lane.close()

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
