"""Does the guard find a flipped bit, name the rank and undo the harm, and what does it cost while all is well?

    python -m benchmarks.guard --json

Each trial is a job of its own under ``keepstep run``: four ranks of the example's language model over gloo, one bit
flipped at a random place of a random rank. ``found``: told at the first look behind the fault (``within`` steps at
most). ``named``: with the right rank. ``judged``: put down to that rank as a passing fault once the steps were done
again. ``identical``: every loss of every rank is bit for bit that of the undisturbed run. A gradient that is spoilt
before the all-reduce spoils all replicas alike: it is found by its norm, and nobody can be named unless it comes back,
so there ``named`` and ``judged`` count the reports that name nobody wrongly. ``pair`` is a weight of one of two ranks:
no majority names anybody at first, doing it again does.

Costs are told in three ways. ``overhead_ratio``: two jobs without and with the guard take turns, mean step times of
blocks of equal length, one ratio per round; on a machine with other work it tells that work. ``guard_share``: the time
inside the guard's own calls as a share of the training time, in one job, per block of 500 steps, so that each block has
all that comes round. What ranks wait for one another there (``guard_wait_share``) they would wait at the next reduction
of gradients, and is told apart. ``guard_cpu_share``: the share of the training thread's processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.progress import spread
from benchmarks.turns import Lane, ratios, scratch, take_turns
from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster, end_on_sigterm
from keepstep.model import env

WORKER = Path(__file__).with_name("guard_worker_torch.py")
LIMIT_S = 240.0
STEPS = 32
TRIAL = {"mode": "on", "norms": 1, "every": 2, "window": 16, "compare_every": 8, "keep_every": 8}
KINDS = ("weight", "moment", "gradient", "pair")
JUDGED = re.compile(r"keepstep: guard: step (\d+)(?:, rank ([\d, ]+?))?(?:, [^:]*)?: judged (\w+): ")
SHARE_STEPS = 500
"""Steps per block of the guard's share: every period of its settings comes once."""
SHARE_WORDS = ("--width", "128", "--batch", "32", "--block", str(SHARE_STEPS))
TOLD = re.compile(r"keepstep: guard: step (\d+)(?:, rank ([\d, ]+?))?(?:, [^:]*)?: (replicas|nonfinite|spike): ")
FIRST = 8
"""Steps before the first fault: the guard has to have seen some that are well."""


class MeanLane(Lane):
    """A turn is told by its mean step: what comes every hundred steps does not show in a median."""

    def turn(self) -> float:
        first, last = self.blocks * self.block, (self.blocks + 1) * self.block - 1
        super().turn()
        done = self.progress.done()
        return (done[last] - done[first]) / 1e6 / (last - first)


def losses(run_dir: Path) -> dict[str, dict[int, str]]:
    """The last loss of each step, by rank."""
    found: dict[str, dict[int, str]] = {}
    for path in sorted((run_dir / env.LOSS_DIR).glob("rank*.jsonl")):
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        found[path.stem] = {row["step"]: row["loss"] for row in rows}
    return found


def train(
    home: Path, ranks: int, words: list[str], *, limit_s: float = LIMIT_S
) -> tuple[dict[str, dict[int, str]], str]:
    """One job to its end: its losses, and what was said at the terminal."""
    cluster = Cluster(
        home, job="guard", script=WORKER, args=words, nodes=1, nproc=ranks, flags=("--standbys", "0"),
        environ=clean_environment(),
    )  # fmt: skip
    cluster.start()
    try:
        codes = cluster.wait(limit_s)
        said = cluster.tail(200)
        if any(codes.values()):
            raise SystemExit(f"the job ended with {codes}\n{said}")
        return losses(cluster.run_dir), said
    finally:
        cluster.close()


def trial(home: Path, ranks: int, kind: str, draw: random.Random, calm: dict[str, dict[int, str]]) -> dict[str, Any]:
    """One fault, and what became of it."""
    rank, step, seed = draw.randrange(ranks), draw.randrange(FIRST, STEPS - 8), draw.randrange(10**6)
    what = "weight" if kind == "pair" else kind
    words = ["--steps", str(STEPS), "--guard", json.dumps(TRIAL), "--fault", f"{what}:{rank}:{step}:{seed}"]
    after, said = train(home, ranks, words)
    told = [(int(m[1]), [int(r) for r in (m[2] or "").split(",") if r.strip()]) for m in TOLD.finditer(said)]
    at, ranks_named = told[0] if told else (-1, [])
    within = TRIAL["every"] if kind == "gradient" else TRIAL["compare_every"]
    assert isinstance(within, int)
    found = step <= at < step + within
    verdicts = [(m[3], [int(r) for r in (m[2] or "").split(",") if r.strip()]) for m in JUDGED.finditer(said)]
    judged = bool(verdicts) and verdicts[0][0] == "transient"
    if kind == "gradient":
        named = ranks_named in ([], [rank])
        judged = judged and verdicts[0][1] in ([], [rank])
    else:
        named = ranks_named == ([] if kind == "pair" else [rank])
        judged = judged and verdicts[0][1] == [rank]
    row = {
        "kind": kind,
        "rank": rank,
        "step": step,
        "found": found,
        "named": found and named,
        "judged": judged,
        "at": at,
    }
    print(f"{row} identical {after == calm}", file=sys.stderr)
    return {**row, "identical": after == calm}


def cost(home: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the guard costs with its own settings."""
    order = random.Random(args.seed)
    lanes: dict[str, Lane] = {}
    try:
        for name, flags in (("off", ()), ("on", ("--guard", "on"))):
            lanes[name] = MeanLane(
                home / name, name, ranks=2, block=args.block, words=["--batch", str(args.batch)], flags=flags
            )
            lanes[name].open()
            lanes[name].turn()
        times = take_turns(lanes, ["off", "on"], args.repeats, order)
    finally:
        for lane in lanes.values():
            lane.close()
    found = ratios(times, "on", "off")
    return {
        "rounds": args.repeats,
        "steps_per_block": args.block,
        "off_ms": spread(times["off"]),
        "on_ms": spread(times["on"]),
        "overhead_ratio": round(statistics.median(found), 4),
        "overhead_ratio_spread": spread(found, 4),
    }


def share(home: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What share of a job the guard's own calls are, with its own settings."""
    took = home / "took.json"
    warm = 20
    words = ["--steps", str(warm + args.shares * SHARE_STEPS), "--warm", str(warm), *SHARE_WORDS, "--time", str(took)]
    train(home / "share", 2, [*words, "--guard", '{"mode": "on"}'], limit_s=60 + args.shares * 900.0)
    told = json.loads(took.read_text())
    of_time = [(block["guard_s"] - block["wait_s"]) / block["seconds"] for block in told["blocks"]]
    of_wait = [block["wait_s"] / block["seconds"] for block in told["blocks"]]
    of_cpu = [block["guard_cpu_s"] / block["cpu_s"] for block in told["blocks"]]
    return {
        "guard_share": round(statistics.median(of_time), 5),
        "guard_share_spread": spread(of_time, 5),
        "guard_wait_share": round(statistics.median(of_wait), 5),
        "guard_wait_share_spread": spread(of_wait, 5),
        "guard_cpu_share": round(statistics.median(of_cpu), 5),
        "guard_cpu_share_spread": spread(of_cpu, 5),
        "guard_share_blocks": len(of_time),
        "guard_share_step_ms": spread([block["seconds"] / SHARE_STEPS * 1e3 for block in told["blocks"]]),
        "guard_share_parameter_mb": round(told["bytes"] / 1e6, 1),
    }


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--trials", type=int, default=5, help="faults of each kind")
    ask.add_argument("--ranks", type=int, default=4)
    ask.add_argument("--repeats", type=int, default=20, help="rounds of turns; 0 leaves the costs out")
    ask.add_argument("--block", type=int, default=100, help="steps per turn")
    ask.add_argument("--shares", type=int, default=3, help="blocks of 500 steps for the guard's share; 0 leaves it out")
    ask.add_argument("--batch", type=int, default=8)
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    end_on_sigterm()
    print(f"seed {args.seed}", file=sys.stderr)

    draw = random.Random(args.seed)
    found: dict[str, Any] = {"benchmark": "guard", "ranks": args.ranks, "trials": args.trials, "seed": args.seed}
    with scratch() as home:
        if args.trials:
            calm, _ = train(home / "calm", args.ranks, ["--steps", str(STEPS)])
            pair_calm, _ = train(home / "calm2", 2, ["--steps", str(STEPS)])
        for kind in KINDS if args.trials else ():
            ranks = 2 if kind == "pair" else args.ranks
            undisturbed = pair_calm if kind == "pair" else calm
            rows = [trial(home / f"{kind}{n}", ranks, kind, draw, undisturbed) for n in range(args.trials)]
            for what in ("found", "named", "judged", "identical"):
                found[f"{kind}_{what}"] = sum(row[what] for row in rows)
            found[f"{kind}_steps_to_find"] = spread([float(row["at"] - row["step"]) for row in rows])
        if args.shares:
            found.update(share(home / "share", args))
        if args.repeats:
            found.update(cost(home / "cost", args))
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
