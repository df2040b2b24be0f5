"""Jobs that live side by side and take turns: a block of steps of one, then of the next, and nobody else trains.

Each ratio is of two blocks of the same round, so a slow minute of the machine touches both sides.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.progress import Progress, until
from benchmarks.torchrun_lane import Torchrun
from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster

WORKLOAD = Path(__file__).with_name("workload.py")
START_LIMIT_S = 120.0
BLOCK_LIMIT_S = 120.0
SKIPPED = 3
"""First steps of each block, while caches are cold from the others' turns."""


class Lane:
    """One job: its pipes, and how far it has come.

    Args:
        flags: of ``keepstep run``; ``None`` is the bare script under torchrun.
        words: for the script.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        *,
        ranks: int,
        block: int,
        words: Sequence[str],
        flags: Sequence[str] | None,
        nodes: int = 1,
    ) -> None:
        self.name, self.ranks, self.block = name, ranks, block
        self.gate = home / "gate"
        self.gate.mkdir(parents=True)
        for rank in range(ranks):
            os.mkfifo(self.gate / f"rank{rank}")
        words = [*words, "--gate", str(self.gate), "--block", str(block)]
        self.progress = Progress(home / "progress", ranks)
        self.pipes: list[int] = []
        self.job: Torchrun | Cluster
        if flags is None:
            self.job = Torchrun(home, WORKLOAD, ["--lane", "bare", *words], ranks=ranks, nodes=nodes, restarts=0)
        else:
            self.job = Cluster(
                home,
                job=name,
                script=WORKLOAD,
                args=("--lane", "sdk", "--progress", str(home / "progress"), *words),
                nodes=nodes,
                nproc=ranks // nodes,
                flags=("--standbys", "0", *flags),
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


@contextmanager
def scratch() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark of this kind can be told."""
    ask = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--repeats", type=int, default=20, help="rounds")
    ask.add_argument("--block", type=int, default=40, help="steps per turn")
    ask.add_argument("--ranks", type=int, default=2, help="in all")
    ask.add_argument("--batch", type=int, default=8, help="sequences per rank")
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the order of turns")
    ask.add_argument("--json", action="store_true")
    return ask


def compare(jobs: Mapping[str, Mapping[str, Any]], *, rounds: int, seed: int) -> Mapping[str, list[float]]:
    """Start a lane for each job, let them take turns, and end them; each one's step times in milliseconds.

    Args:
        jobs: arguments of ``Lane``, by name.
    """
    print(f"seed {seed}", file=sys.stderr)
    lanes: dict[str, Lane] = {}
    with scratch() as home:
        try:
            for name, options in jobs.items():  # one after the other, so that starts do not starve one another
                lanes[name] = Lane(home / name, name.replace("_", "-"), **options)
                lanes[name].open()
                lanes[name].turn()
            return take_turns(lanes, list(lanes), rounds, random.Random(seed))
        finally:
            for lane in lanes.values():
                lane.close()


def take_turns(
    lanes: dict[str, Lane], names: Sequence[str], rounds: int, order: random.Random
) -> Mapping[str, list[float]]:
    """Let every lane train one block per round, in an order drawn anew each time; its step times in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in order.sample(list(names), len(names)):
            times[name].append(lanes[name].turn())
        print(f"round {number}: " + "  ".join(f"{n} {times[n][-1]:.2f} ms" for n in names), file=sys.stderr)
    return times


def ratios(times: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """One per round."""
    return [a / b for a, b in zip(times[over], times[under], strict=True)]
