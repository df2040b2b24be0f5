"""Kill one rank at a random instant, hundreds of times: is anybody stuck, and are the losses the same?

``python -m benchmarks.abort --kills 300 --json``. Each job trains a tiny model (plain all-reduce, DDP, FSDP2, HSDP) on
real processes over gloo; again and again one of them is killed, or frozen and then killed, at a random instant of
its step (``double``: a second one while the others recover). Survivors are told of a new epoch, a parked process
takes the rank, training goes on, and every loss is compared bit by bit with an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

STUCK_S = 10.0
"""A survivor whose main thread is not free this long after the abort counts as stuck."""
STACKS_S = 2.0
"""How long a stuck process gets to write down where it is."""
PHASE_LIMIT_S = 60.0
STEPS_PER_KILL = 3
KILLS_PER_JOB = 25
TAIL_LINES = 60


class Child:
    """A forked training process and what it has said."""

    def __init__(self, pid: int, sock: socket.socket, log: Path) -> None:
        self.pid, self.sock, self.log = pid, sock, log
        self.rank: int | None = None
        self.rest = b""
        self.alive = True

    def fileno(self) -> int:
        return self.sock.fileno()

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it died meanwhile; its end is seen elsewhere
            self.sock.sendall((json.dumps(message) + "\n").encode())

    def read(self) -> list[dict[str, Any]]:
        try:
            data = self.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.alive = False
            return []
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # ours and not yet waited for, so the pid cannot mean anybody else
        os.waitpid(self.pid, 0)
        self.alive = False
        self.sock.close()


class Failed(Exception):
    """A job did not get through a phase."""


class Stuck(Failed):
    """A survivor's main thread did not get free in time."""


class Job:
    """One training job with its faults."""

    def __init__(self, mode: str, world: int, steps: int, stores: socket.socket, scratch: Path) -> None:
        self.mode, self.world, self.steps = mode, world, steps
        self.stores = stores.makefile("rw")
        self.dir = Path(tempfile.mkdtemp(prefix=f"{mode}{world}-", dir=scratch))
        self.children: dict[int, Child] = {}
        self.parked: list[Child] = []
        self.epoch = 1
        self.losses: dict[int, set[str]] = defaultdict(set)
        self.newest = 0
        self.step_at: dict[int, float] = {}
        self.free_ms: list[float] = []
        self.resumed_ms: list[float] = []
        self.footprints: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.phases: dict[str, list[float]] = defaultdict(list)
        self.finished: set[int] = set()
        self.free: set[int] = set()
        self.resumed: set[int] = set()
        self.failed: str | None = None
        self.forks = 0

    # ------------------------------------------------------------------ processes

    def fork(self) -> Child:
        from benchmarks import abort_worker_torch as worker

        ours, theirs = socket.socketpair()
        self.forks += 1
        log = self.dir / f"log{self.forks}"
        pid = os.fork()
        if pid == 0:
            ours.close()
            for child in [*self.children.values(), *self.parked]:
                child.sock.close()
            out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            worker.main(theirs, self.dir, self.mode, self.world, self.steps)
        theirs.close()
        return Child(pid, ours, log)

    def new_store(self) -> int:
        self.stores.write("\n")
        self.stores.flush()
        return int(self.stores.readline())

    def start(self) -> None:
        port = self.new_store()
        for rank in range(self.world):
            child = self.fork()
            child.rank = rank
            self.children[rank] = child
        for rank, child in self.children.items():
            child.tell(rank=rank, epoch=self.epoch, port=port, newcomer=False)

    def park(self) -> None:
        while len(self.parked) < 2:
            self.parked.append(self.fork())

    def close(self) -> None:
        for child in [*self.children.values(), *self.parked]:
            child.end()
        shutil.rmtree(self.dir, ignore_errors=True)

    # ------------------------------------------------------------------ listening

    def pump(self, timeout: float) -> None:
        everybody = [c for c in [*self.children.values(), *self.parked] if c.alive]
        for child in select.select(everybody, [], [], timeout)[0]:
            for message in child.read():
                self.heard(child, message)

    def heard(self, child: Child, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "step":
            self.losses[message["step"]].add(message["loss"])
            if message["step"] > self.newest:
                self.newest = message["step"]
                self.step_at[self.newest] = time.monotonic()
        elif kind == "free":
            self.free.add(child.pid)
            self.free_ms.append(message["ms"])
        elif kind == "resumed":
            if message["epoch"] == self.epoch:
                self.resumed.add(child.pid)
                self.resumed_ms.append(message["ms"])
                self.footprints[child.pid].append(message)
                for phase, ms in message["phases"].items():
                    self.phases[phase if not phase.isdigit() else "group"].append(ms)
        elif kind == "done":
            self.finished.add(child.pid)
        elif kind == "failed":
            self.failed = f"rank {message['rank']}: {message['why']}"

    def until(self, what: str, done: Any, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not done():
            if self.failed:
                raise Failed(f"{what}: {self.failed}")
            if time.monotonic() > end:
                raise Failed(f"{what} not within {limit_s:g} s")
            self.pump(min(0.05, max(0.0, end - time.monotonic())))

    def linger(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.pump(left)

    # ------------------------------------------------------------------ faults

    def open_epoch(self, victims: list[int], told: list[int]) -> None:
        """Announce the next epoch to survivors, then seat replacements."""
        self.epoch += 1
        self.free, self.resumed = set(), set()
        port = self.new_store()
        for rank in told:
            self.children[rank].tell(epoch=self.epoch, port=port)
        for rank in victims:
            child = self.parked.pop(0)
            child.rank = rank
            self.children[rank].end()
            self.children[rank] = child
            child.tell(rank=rank, epoch=self.epoch, port=port, newcomer=True)

    def strike(self, fault: str, victim: int, luck: random.Random) -> int:
        """One fault and the recovery from it; returns how many processes were killed."""
        self.park()
        killed = 1
        survivors = [r for r in self.children if r != victim]
        hit = self.children[victim]
        if fault == "freeze":
            os.kill(hit.pid, signal.SIGSTOP)
            self.linger(luck.uniform(0.0, 0.1))
        else:
            os.kill(hit.pid, signal.SIGKILL)
            self.linger(luck.uniform(0.0, 0.01))
        self.open_epoch([victim], survivors)
        waiting = {self.children[r].pid for r in survivors}
        if fault == "double":
            self.linger(luck.uniform(0.0, 0.15))
            second = luck.choice(list(self.children))
            other = self.children[second]
            os.kill(other.pid, signal.SIGKILL)
            waiting.discard(other.pid)
            told = [r for r in self.children if r != second]
            freed = set(self.free)
            self.open_epoch([second], told)
            self.free = freed
            killed = 2
        try:
            self.until("survivors free", lambda: waiting <= self.free | self.resumed | self.finished, STUCK_S)
        except Failed as error:
            ended = self.free | self.resumed | self.finished
            raise Stuck(f"{error}; {self.stacks(waiting - ended)}") from error
        everybody = {c.pid for c in self.children.values()}
        self.until("all resumed", lambda: everybody <= self.resumed, PHASE_LIMIT_S)
        return killed

    def stacks(self, pids: set[int]) -> str:
        """Have the processes that are stuck write all their stacks into their logs; says which ranks they are."""
        said = []
        for rank, child in sorted(self.children.items()):
            if child.pid in pids:
                status = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
                said.append(f"rank {rank} pid {child.pid} state {status}")
                os.kill(child.pid, signal.SIGUSR1)
        self.linger(STACKS_S)
        return ", ".join(said)

    def finish(self) -> None:
        everybody = {c.pid for c in self.children.values()}
        self.until("job done", lambda: everybody <= self.finished, PHASE_LIMIT_S)

    def tails(self) -> str:
        parts = []
        for rank, child in sorted(self.children.items()):
            if child.log.exists():
                lines = [x for x in child.log.read_text(errors="replace").splitlines() if x.strip()]
                parts += [f"  rank {rank} pid {child.pid}: {line}" for line in lines[-TAIL_LINES:]]
        return "\n".join(parts)


class Tally:
    """What all jobs together have shown."""

    def __init__(self) -> None:
        self.kills = self.recovered = self.stuck = 0
        self.free_ms: list[float] = []
        self.resumed_ms: list[float] = []
        self.phases: dict[str, list[float]] = defaultdict(list)
        self.kills_of: Counter[str] = Counter()
        self.equal_of: Counter[str] = Counter()
        self.by_fault: Counter[str] = Counter()
        self.growth: dict[str, list[float]] = defaultdict(list)
        self.left: Counter[str] = Counter()
        self.problems: list[str] = []

    def grow(self, job: Job) -> None:
        for seen in job.footprints.values():
            if len(seen) >= 4:
                for name in ("threads", "fds", "rss_mib"):
                    self.growth[name].append((seen[-1][name] - seen[1][name]) / (len(seen) - 2))
                for name, count in seen[-1]["left"].items():
                    self.left[name] = max(self.left[name], count)

    def report(self, seed: int, seconds: float) -> dict[str, Any]:
        def of(values: list[float]) -> dict[str, float]:
            if not values:
                return {}
            ordered = sorted(values)
            return {
                "median": round(statistics.median(ordered), 3),
                "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
                "max": round(ordered[-1], 3),
            }

        return {
            "benchmark": "abort",
            "seed": seed,
            "seconds": round(seconds, 1),
            "kills": self.kills,
            "recovered": self.recovered,
            "stuck": self.stuck,
            "faults": dict(self.by_fault),
            "main_thread_free_ms": of(self.free_ms),
            "recovery_ms": of(self.resumed_ms),
            "rebuild_phases_ms": {k: of(v) for k, v in self.phases.items()},
            "bitwise_equal": {k: {"kills": n, "equal": self.equal_of[k]} for k, n in sorted(self.kills_of.items())},
            "growth_per_recovery": {k: of(v) for k, v in self.growth.items()},
            "left_behind_max": dict(self.left),
            "problems": self.problems,
        }


def reference(mode: str, world: int, steps: int, stores: socket.socket, scratch: Path) -> tuple[dict[int, str], float]:
    """Losses of an undisturbed run, and its median step time."""
    job = Job(mode, world, steps, stores, scratch)
    try:
        job.start()
        job.until("undisturbed run", lambda: len(job.finished) == world, PHASE_LIMIT_S * 2)
        times = [job.step_at[s] - job.step_at[s - 1] for s in range(3, steps + 1)]
        return {s: next(iter(v)) for s, v in job.losses.items() if len(v) == 1}, statistics.median(times)
    except Failed as error:
        raise SystemExit(f"the undisturbed {mode} run on {world} ranks failed: {error}\n{job.tails()}") from error
    finally:
        job.close()


def disturbed(
    mode: str, world: int, kills: int, faults: list[str], known: dict[int, str], step_s: float, tally: Tally, job: Job,
    luck: random.Random,
) -> None:  # fmt: skip
    """One job with ``kills`` faults at random instants."""
    name = f"{mode}-{world}"
    job.start()
    job.park()
    marks = []
    try:
        for i in range(kills):
            at = 1 + i * STEPS_PER_KILL + luck.randrange(STEPS_PER_KILL)
            job.until(f"step {at}", lambda at=at: job.newest >= at, PHASE_LIMIT_S)
            job.linger(luck.uniform(0.0, 1.2) * step_s)
            fault, victim = luck.choice(faults), luck.randrange(world)
            if job.finished:
                break
            marks.append(job.newest)
            tally.by_fault[fault] += 1
            before = len(job.free_ms)
            tally.kills += 1
            tally.kills_of[name] += 1
            try:
                job.strike(fault, victim, luck)
            except Failed as error:
                tally.stuck += isinstance(error, Stuck)
                raise Failed(f"{name}: {fault} of rank {victim} after step {marks[-1]}: {error}") from error
            tally.recovered += 1
            tally.free_ms += job.free_ms[before:]
        job.finish()
    finally:
        for mark in marks:
            # Up to the next fault that some step lies before; two faults can strike within one step.
            last = min((m for m in marks if m > mark), default=job.newest)
            wrong = [s for s in range(mark + 1, last + 1) if job.losses[s] != {known[s]}]
            if wrong:
                tally.problems.append(f"{name}: losses of steps {wrong} after the fault at step {mark} differ")
            elif last > mark:
                tally.equal_of[name] += 1
        tally.resumed_ms += job.resumed_ms
        for phase, values in job.phases.items():
            tally.phases[phase] += values
        tally.grow(job)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abort", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="faults in all (a double fault counts once)")
    parser.add_argument("--world", default="4,8", help="world sizes")
    parser.add_argument("--modes", default="ar,ddp,fsdp2,hsdp")
    parser.add_argument("--faults", default="kill,freeze,double")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    print(f"benchmarks.abort: seed {seed}", file=sys.stderr, flush=True)
    tally, began = Tally(), time.monotonic()
    run_all(options, seed, tally)
    result = tally.report(seed, time.monotonic() - began)
    print(json.dumps(result, indent=None if options.json else 2))
    return 0 if tally.recovered == tally.kills == sum(tally.equal_of.values()) else 1


def run_all(options: argparse.Namespace, seed: int, tally: Tally) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from benchmarks import abort_worker_torch as worker

    worker.warm()
    luck = random.Random(seed)
    plans = [(m, int(w)) for w in options.world.split(",") for m in options.modes.split(",")]
    shares = [options.kills // len(plans) + (1 if i < options.kills % len(plans) else 0) for i in range(len(plans))]
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        worker.serve_stores(theirs)
    theirs.close()
    scratch = Path(tempfile.mkdtemp(prefix="ksabort", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        for (mode, world), share in zip(plans, shares, strict=True):
            run_plan(mode, world, share, options.faults.split(","), ours, scratch, luck, tally)
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(scratch, ignore_errors=True)


def run_plan(
    mode: str, world: int, kills: int, faults: list[str], stores: socket.socket, scratch: Path, luck: random.Random,
    tally: Tally,
) -> None:  # fmt: skip
    known: dict[int, str] = {}
    while kills > 0:
        now = min(kills, KILLS_PER_JOB)
        kills -= now
        steps = now * STEPS_PER_KILL + 4
        if len(known) < steps:
            known, step_s = reference(mode, world, steps, stores, scratch)
        job = Job(mode, world, steps, stores, scratch)
        began = time.monotonic()
        try:
            disturbed(mode, world, now, faults, known, step_s, tally, job, luck)
        except Failed as error:
            tally.problems.append(str(error))
            print(f"{error}\n{job.tails()}", file=sys.stderr, flush=True)
        finally:
            job.close()
        print(
            f"{mode} world {world}: {now} faults in {time.monotonic() - began:.1f} s; so far {tally.kills} kills, "
            f"{tally.recovered} recovered, {tally.stuck} stuck, {sum(tally.equal_of.values())} bitwise equal",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
