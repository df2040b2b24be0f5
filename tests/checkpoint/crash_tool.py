"""A fork server that lets writers work on one directory and kills them with SIGKILL at random instants.

A process of its own, without threads and without torch, so that forking is cheap and sound. After every kill it reads
the tier as a restoring process would and compares it with what the killed writers had been promised.

    python -m tests.checkpoint.crash_tool --dir D --kills 500 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

from keepstep.checkpoint import archive, catalog, collect, delta_zstd  # noqa: F401  so that no writer has to load it
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.exceptions import GenerationIncomplete
from keepstep.checkpoint.generation import folder
from keepstep.checkpoint.slot import Description, TensorEntry, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.files import Files
from keepstep.model.settings import CheckpointPolicy
from keepstep.ports.tier import Tier

RANKS = 2
KEEP = 2
SIZES = (6_000, 20_000, 12)
FIRST_S = 0.02
GENERATIONS = 2.5
"""A writer that is killed by the clock lives up to so many times as long as a generation has taken lately."""
OPERATIONS = 75
"""A writer that is killed by count dies at one of its first so many operations on files: about two generations."""
PATIENCE = 30
"""How often a writer looks for the other one's part before it goes on to the next step."""
POLICY = CheckpointPolicy(dir="x", keep=KEEP, full_every=3)


def state(version: Version, rank: int) -> Source:
    """A state that follows from version and rank; most of it stays the same from step to step."""
    data = bytearray()
    entries = []
    for number, size in enumerate(SIZES):
        entries.append(TensorEntry(f"t{number}", "uint8", (size,), len(data), size))
        piece = bytes([rank + 1, number]) * (size // 2)
        data += piece[:-4] + version.step.to_bytes(4, "big")
    plain = f"{version.step} {rank}".encode()
    description = Description(tensors=tuple(entries), plain=plain, key="e1/c", world_size=RANKS)
    return Source.of_view(version, description, memoryview(data))


def generation(
    tier: Tier, version: Version, ranks: range, bases: dict[int, Basis], full_every: int = POLICY.full_every
) -> None:
    """What archivers do for one version."""
    for rank in ranks:
        basis = bases.setdefault(rank, Basis())
        source = state(version, rank)
        rests = basis if basis.serves(source, full_every) else None
        if rests is not None and not catalog.look(tier, rests.version).complete:
            rests = None
        part = archive.write_part(tier, source, job="job", rank=rank, world_size=RANKS, basis=rests)
        basis.take(source, part)


class Mortal(Files):
    """Kills its process before, or in the middle of, the n-th operation."""

    def __init__(self, left: int) -> None:
        self._left = left

    def _step(self) -> bool:
        self._left -= 1
        return self._left == 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        if self._step():
            self._die()
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        if self._step():
            super().write(fd, data[: len(data) // 2])
            self._die()
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        if self._step():
            self._die()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        if self._step():
            self._die()
        super().rename(old, new)

    def fsync_directory(self, path: Path) -> None:
        if self._step():
            self._die()
        super().fsync_directory(path)

    def unlink(self, path: Path) -> None:
        if self._step():
            self._die()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        if self._step():
            self._die()
        super().rmdir(path)


def completed(tier: Tier, version: Version) -> bool:
    """Complete a generation, or wait a moment for the other writer's part."""
    try:
        archive.complete(tier, version, RANKS)
    except GenerationIncomplete:
        time.sleep(0.001)
        return False
    return True


def work(root: Path, told: int, ranks: range, start: int, operations: int) -> None:
    """Write generation after generation, say which are complete, and tidy up, until killed."""
    tier = DirectoryTier(root, create=True, files=Mortal(operations))
    bases: dict[int, Basis] = {}
    later_ns = 7200 * 10**9 if os.getpid() % 2 else 0  # some live later: to them unfinished ones are leftovers
    for step in range(start, start + 1000):
        version = Version(step, 1)
        generation(tier, version, ranks, bases)
        if not any(completed(tier, version) for _ in range(PATIENCE)):
            continue
        os.write(told, step.to_bytes(4, "big"))
        collect.collect(tier, POLICY, writing=[version], now=lambda: time.time_ns() + later_ns)


def check(root: Path, promised: set[int], *, seed: int) -> int:
    """Raises ``AssertionError`` when a promise is broken; returns the newest step that is complete."""
    tier = DirectoryTier(root, create=True)
    found = [g for g in catalog.read(tier) if g.complete]
    for one in found:
        archive.verify(tier, one.version, write=False)
        for rank in range(RANKS):
            part = catalog.part(tier, one.version, rank)
            want = state(one.version, rank)
            assert part.plain == want.description.plain, f"{folder(one.version)}: another step's plain part"
            if part.kind == "full":
                data = tier.get(f"{folder(one.version)}/{part.file}", part.header)
                assert data == b"".join(bytes(piece) for piece in want.pieces()), f"{folder(one.version)}: other bytes"
    there = {one.version.step for one in found}
    lost = set(sorted(promised | there)[-KEEP:]) - there  # retention keeps so many, also of those it was not told
    assert not lost, f"seed {seed}: complete generations {sorted(lost)} are lost; there are {sorted(there)}"
    return max(there, default=0)


class Tally:
    """What happened, for the report."""

    def __init__(self) -> None:
        self.killed = self.ended_early = self.unfinished = 0


def start_writers(root: Path, told: int, newest: int, luck: random.Random, *, by_count: bool) -> list[int]:
    """One writer for all ranks, or one each; process numbers."""
    halves = [range(RANKS)] if luck.random() < 0.6 else [range(1), range(1, RANKS)]
    children = []
    for ranks in halves:
        operations = luck.randint(1, OPERATIONS) if by_count else 0
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(root, told, ranks, newest + 1, operations)
                status = 0
            except BaseException as error:
                print(f"a writer failed: {type(error).__name__}: {error}", flush=True)
            finally:
                os._exit(status)
        children.append(child)
    return children


def reap(children: list[int], luck: random.Random, lives_s: float, tally: Tally, *, by_count: bool) -> None:
    """Kill by the clock; or wait for those that die by count, and end those that need no more operations."""
    until = time.monotonic() + (10 * lives_s if by_count else luck.uniform(0, lives_s))
    left = list(children)
    while left:
        left = [child for child in left if not _ended(child, tally)]
        if left and time.monotonic() >= until:
            luck.shuffle(left)
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.0005)


def _ended(child: int, tally: Tally) -> bool:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        tally.killed += os.WIFSIGNALED(status)
        tally.ended_early += not os.WIFSIGNALED(status)
    return bool(pid)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    luck, tally = random.Random(args.seed), Tally()
    receive, told = os.pipe()
    os.set_blocking(receive, False)
    promised: set[int] = set()
    newest, took_s = 0, FIRST_S
    while tally.killed < args.kills:
        by_count = luck.random() < 0.5
        before, began = len(promised), time.monotonic()
        children = start_writers(args.dir, told, newest, luck, by_count=by_count)
        reap(children, luck, GENERATIONS * took_s, tally, by_count=by_count)
        spent = time.monotonic() - began
        with contextlib.suppress(BlockingIOError):
            while data := os.read(receive, 4096):
                promised |= {int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)}
        made = len(promised) - before
        took_s = 0.8 * took_s + 0.2 * (spent / made if made else 2 * took_s)
        took_s = min(took_s, 0.25)
        newest = check(args.dir, promised, seed=args.seed)
        tally.unfinished += any(not g.complete for g in catalog.read(DirectoryTier(args.dir, create=True)))
    print(json.dumps({**vars(tally), "promised": len(promised), "newest": newest}))


if __name__ == "__main__":
    main()
