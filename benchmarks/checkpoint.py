"""What a snapshot costs training, and how long the way back is: keepstep beside everything else that can be had here.

    python -m benchmarks.checkpoint --size-mb 1024 --json

One process trains a real model of that much state and saves it in turns in every way there is, in an order drawn anew
for each round; what others do beyond the call goes on untimed, and the next one waits until the machine is at rest
(``disturbed`` counts where it did not come to that). ``memcpy_floor_s`` is the C library's copy of the same bytes into
warm memory, one right before and one right after each snapshot and restore of ours: ratios are of neighbours in time.
Peers are measured where they can be imported; what is missing is named with the way to get it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.progress import spread
from keepstep.agent.streaming import streaming

STALL_OVER_FLOOR = 1.5
OVERLAPPED_OVER_FLOOR = 0.1
FIRST_OVER_LATER = 3.0
"""Page faults would make the first snapshot twenty times as slow as the later ones."""
MEMORY_RESTORE_SHARE = 0.6
REPLICATION_RATIO = 4.0
LIMIT_S = 3600.0
PEERS = ("nvrx_local_stall", "dlrover_memory_stall", "dcp_async_stall", "dcp_async_cached_stall")
OTHERS = (*PEERS, "dcp_sync", "torch_save", "safetensors")
RESTORES = ("local_memory", "peer", "local_disk", "remote")
MEGA = 2**20


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--size-mb", type=int, default=1024, help="weights and optimizer state together")
    ask.add_argument("--repeats", type=int, default=5, help="rounds")
    ask.add_argument("--rows", type=int, default=8, help="sequences of 64 bytes per step")
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="memory-backed directory, for slots")
    ask.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where durable things are written")
    ask.add_argument("--peers", choices=["auto", "none"], default="auto")
    ask.add_argument("--no-replication", action="store_true", help="leave out the rate from keeper to keeper")
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    found = report(args, measure(args), None if args.no_replication else replication(args))
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raw measurements, from a process of its own with the environment that trainers get."""
    words = [sys.executable, "-m", "benchmarks.checkpoint_worker_torch"]
    for name in ("size_mb", "repeats", "rows", "seed", "memory", "disk", "peers"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(words, stdout=subprocess.PIPE, env=trainer_environment(), timeout=LIMIT_S, check=True)
    raw: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return raw


def trainer_environment() -> dict[str, str]:
    """What the agent sets for its trainers so that copies go around the caches."""
    return {**os.environ, **streaming(os.environ)}


def replication(args: argparse.Namespace) -> dict[str, Any] | None:
    """The replication benchmark at the same size."""
    words = [sys.executable, "-m", "benchmarks.replication", "--size-mb", str(args.size_mb), "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
    if done.returncode:
        print(f"benchmarks.replication ended with {done.returncode}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(args: argparse.Namespace, raw: dict[str, Any], keepers: dict[str, Any] | None) -> dict[str, Any]:
    lanes: dict[str, list[float]] = raw["lanes"]
    middle = {name: statistics.median(values) for name, values in lanes.items()}
    floor = middle["memcpy_floor"]
    found: dict[str, Any] = {
        "benchmark": "checkpoint",
        "size_mb": args.size_mb,
        "state_mb": round(raw["bytes"] / MEGA, 1),
        "rounds": args.repeats,
        "seed": args.seed,
        "memcpy_gb_s": round(raw["bytes"] / floor / 1e9, 2),
    }
    for name in ("memcpy_floor", "keepstep_stall", "overlapped_stall", "first_snapshot", *OTHERS, "time_to_durable"):
        found[f"{name}_s"] = round(middle[name], 5) if name in middle else None
    found["keepstep_stall_over_floor"] = round(middle["keepstep_stall_over_floor"], 3)
    found["overlapped_stall_over_floor"] = round(middle["overlapped_stall"] / floor, 4)
    found["overlapped_step_ratio"] = round(middle["overlapped_step"] / middle["plain_step"], 4)
    for name in RESTORES:
        took = middle.get(f"restore_{name}")
        found[f"restore_{name}_s"] = None if took is None else round(took, 4)
        share = middle.get(f"restore_{name}_share_of_memcpy")
        found[f"restore_{name}_share_of_memcpy"] = None if share is None else round(share, 3)
    found["exact"] = raw["exact"]
    found["disturbed"] = f"{raw['disturbed']} of {raw['measured']}"
    found["replication"] = keepers
    found["peak_extra_memory_mb"] = {name: round(size / MEGA, 1) for name, size in raw["peak_extra_bytes"].items()}
    found["absent"] = raw["absent"]
    found["within"] = within(found, middle)
    found["spread"] = {name: spread(values, 5) for name, values in sorted(lanes.items())}
    return found


def within(found: dict[str, Any], middle: dict[str, float]) -> dict[str, bool | None]:
    """The bounds that this run has to keep; ``None`` where something needed was not measured."""
    stalls = [middle[name] for name in OTHERS if name in middle]
    ratio = (found["replication"] or {}).get("ratio")
    return {
        "stall_over_floor": found["keepstep_stall_over_floor"] <= STALL_OVER_FLOOR,
        "overlapped_over_floor": found["overlapped_stall_over_floor"] <= OVERLAPPED_OVER_FLOOR,
        "overlapped_below_every_other": middle["overlapped_stall"] < min(stalls),
        "blocking_below_every_other": middle["keepstep_stall"] < min(stalls),
        "first_snapshot_pays_no_faults": middle["first_snapshot"] <= FIRST_OVER_LATER * middle["keepstep_stall"],
        "restore_from_memory": found["restore_local_memory_share_of_memcpy"] >= MEMORY_RESTORE_SHARE,
        "replication_ratio": None if ratio is None else ratio >= REPLICATION_RATIO,
        "exact": all(found["exact"].values()),
    }


if __name__ == "__main__":
    sys.exit(main())
