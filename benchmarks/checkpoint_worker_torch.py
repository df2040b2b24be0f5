"""The process in which ``benchmarks.checkpoint`` measures: a model in training, and every lane in turns.

Prints one JSON object with raw measurements on the last line of stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "lm"))

from train import Bytes, batch, corpus

from benchmarks.checkpoint_lanes_torch import PEERS, Floor, Lane
from benchmarks.progress import until, until_idle
from keepstep.checkpoint import archive, pair, reshard, sums
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.peers import PeerClient
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.slot import Slot, TensorEntry, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.model.env import KEEPER_PORT_FILE, KEEPER_SOCKET, SNAP_DIR
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.ports.tier import Tier
from keepstep.trainer.copier_torch import Copier, copy_threads, plan, runs
from keepstep.trainer.restore_torch import Durable
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State

JOB = JobId("bench")
KEY = "e1/bench"
LAYERS = 12
STATES = 3
"""Tensors of the size of the parameters: weight and two moments."""
START_S = 60.0
PAIRS = 3
"""Measurements per round of what takes a tenth of a second, each between two of the floor."""


class Training:
    """The example's language model, as large as asked for, with AdamW; and real steps of it."""

    def __init__(self, size_mb: int, rows: int) -> None:
        per_layer_width = 12 * LAYERS
        width = max(64, round((size_mb * 2**20 / 4 / STATES / per_layer_width) ** 0.5 / 64) * 64)
        torch.manual_seed(1)
        self.model = Bytes(width=width, layers=LAYERS, heads=max(1, width // 64), dropout=0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.text, self.rows, self.index = corpus(), rows, 0
        self.state = State()
        self.state.register({"model": self.model, "optimizer": self.optimizer}, None)
        self.state.bind()
        self.step()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()

    def gradients(self) -> None:
        self.index += 1
        inputs, targets = batch(self.text, seed=1, step=self.index, rank=0, size=self.rows, context=64)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()

    def tensors(self) -> dict[str, Tensor]:
        return {live.name: live.tensor for live in self.state.shards()}

    def digest(self) -> list[int]:
        return [
            sums.digest(tensor.contiguous().view(-1).view(torch.uint8).numpy()) for tensor in self.tensors().values()
        ]

    def spoil(self) -> None:
        """Make the live state differ, so that a restore which does nothing is found out."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.view(-1)[:1].add_(1)


class Ours:
    """The engine's trainer side, alone: a node directory, and nobody listening."""

    def __init__(self, training: Training, node: Path) -> None:
        self.training, self.node = training, node
        (node / SNAP_DIR).mkdir(parents=True)
        self.keep = Snapshots(node / SNAP_DIR, 0, node / KEEPER_SOCKET, CheckpointConfig(job=JOB))
        self.keep.watch(training.state)
        self.at = 0

    def reserve(self) -> None:
        self.keep.reserve(self.training.state.expected_bytes())

    def save(self, *, overlap: bool = False) -> None:
        self.at += 1
        self.keep.save(self.training.state, Version(self.at, 1), key=KEY, full=True, ring=False, overlap=overlap)

    def newest(self) -> Slot:
        self.keep.settle()
        return Slot(pair.look(self.node / SNAP_DIR, 0)[0][1])


class Bench:
    def __init__(self, args: argparse.Namespace, memory: Path, disk: Path) -> None:
        self.args, self.memory, self.disk = args, memory, disk
        self.found: dict[str, Any] = {"lanes": {}, "absent": {}, "exact": {}, "measured": 0, "disturbed": 0}
        self.training = Training(args.size_mb, args.rows)
        self.floor = Floor(self.training.tensors(), copy_threads())
        self.ours = Ours(self.training, memory / "node")
        self.lanes = list(self._lanes())
        self.landing = bytearray(self.training.state.expected_bytes())

    def _lanes(self) -> Iterator[Lane]:
        homes = {"nvrx_local_stall": self.memory}
        for kind in PEERS:
            if self.args.peers == "none" and kind.hint and kind.name != "safetensors":
                continue
            try:
                yield kind(homes.get(kind.name, self.disk), self.training.tensors())
            except Exception as error:
                self.found["absent"][kind.name] = f"{type(error).__name__}: {error}. To have it: {kind.hint}"

    def note(self, name: str, seconds: float) -> None:
        self.found["lanes"].setdefault(name, []).append(seconds)

    def timed(self, name: str, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        self.note(name, took)
        return took

    # ---------------------------------------------------------------- saving

    def run(self) -> dict[str, Any]:
        order = random.Random(self.args.seed)
        with memory_peak() as peak:
            self.timed("reserve", self.ours.reserve)
            self.timed("first_snapshot", self.ours.save)
            self.ours.save()  # the second file's first one
        self.found["peak_extra_bytes"] = {"keepstep": peak.grown}
        for lane in self.lanes:  # warm: buffers made, libraries loaded
            with memory_peak() as peak:
                self._try(lane, timed=False)
            in_memory = lane.home.parent == self.memory  # files there that are not mapped take memory all the same
            files = sum(path.stat().st_blocks * 512 for path in lane.home.rglob("*")) if in_memory else 0
            self.found["peak_extra_bytes"][lane.name] = peak.grown + files
        works: dict[str, Callable[[], None]] = {"keepstep": self._blocking, "overlapped": self._overlapped}
        works |= {lane.name: lambda lane=lane: self._try(lane, timed=True) for lane in self.lanes}  # type: ignore[misc]
        for number in range(self.args.repeats):
            for name in order.sample(list(works), len(works)):
                for _ in range(PAIRS if name == "keepstep" else 1):
                    self._alone()
                    works[name]()
            self._restores()
            print(f"round {number + 1} of {self.args.repeats}", file=sys.stderr)
        self.found["bytes"] = self.floor.bytes
        for lane in self.lanes:
            lane.close()
        self.floor.close()
        return self.found

    def _blocking(self) -> None:
        self._beside_floor("keepstep_stall", self.ours.save, share=False)

    def _beside_floor(self, name: str, work: Callable[[], object], *, share: bool) -> None:
        """Time ``work`` between two copies of the floor, and note their ratio: how many floors, or what share."""
        before = self.floor.measure()
        took = self.timed(name, work)
        after = self.floor.measure()
        floor = (before + after) / 2
        self.note("memcpy_floor", floor)
        self.note(f"{name}_share_of_memcpy" if share else f"{name}_over_floor", floor / took if share else took / floor)

    def _alone(self) -> None:
        """What the one before has left behind is over, or it is told that it was not."""
        self.found["measured"] += 1
        self.found["disturbed"] += not until_idle()

    def _overlapped(self) -> None:
        """What one step waits for in all: the call at the commit, and before the optimizer's next step."""
        training, keep = self.training, self.ours.keep
        training.step()
        self.timed("plain_step", training.step)
        waited, began = keep.waited_s, time.perf_counter()
        self.ours.save(overlap=True)
        self.note("overlapped_call", time.perf_counter() - began)
        training.step()
        self.note("overlapped_step", time.perf_counter() - began)
        self.note("overlapped_stall", keep.waited_s - waited)
        keep.settle()

    def _try(self, lane: Lane, *, timed: bool) -> None:
        if lane.name in self.found["absent"]:
            return
        try:
            began = time.perf_counter()
            lane.save()
            if timed:
                self.note(lane.name, time.perf_counter() - began)
            lane.finish()
        except Exception as error:
            traceback.print_exc()
            self.found["absent"][lane.name] = f"{type(error).__name__}: {error}"

    # ---------------------------------------------------------------- tiers

    def _restores(self) -> None:
        self.ours.save()
        slot = self.ours.newest()
        version = slot.version
        assert version is not None
        wanted = self.training.digest()
        self.timed("seal", slot.seal)
        for _ in range(PAIRS):
            self._restore("local_memory", wanted, lambda: self._from_memory(version))
        with self._keeper() as port:
            self._restore("peer", wanted, lambda: self._from_peer(version, port))
        disk: Tier = DirectoryTier(self.disk / "durable", "local", create=True)
        self._alone()
        self.timed("time_to_durable", lambda: self._durable(disk, slot))
        drop_cache(self.disk / "durable")
        self._restore("local_disk", wanted, lambda: self._from_disk(version))
        with contextlib.suppress(ImportError):
            from keepstep.checkpoint.tiers.remote_obstore import RemoteTier

            remote: Tier = RemoteTier("memory://bench", "remote")
            self._durable(remote, slot)
            self._restore("remote", wanted, lambda: self._from_tier(remote, version))
        slot.close()
        shutil.rmtree(self.disk / "durable")

    def _restore(self, name: str, wanted: list[int], work: Callable[[], None]) -> None:
        self.training.spoil()
        self._alone()
        self._beside_floor(f"restore_{name}", work, share=True)
        same = self.training.digest() == wanted
        self.found["exact"][name] = same and self.found["exact"].get(name, True)

    def _from_memory(self, version: Version) -> None:
        self.ours.keep.load(self.training.state, version, shards=True)

    def _from_peer(self, version: Version, port: int) -> None:
        """A newcomer's way: fetch into this node's memory, then load."""
        node = self.memory / "newcomer"
        (node / SNAP_DIR).mkdir(parents=True)
        client = PeerClient(host="127.0.0.1", port=port, job=JOB, token="", epoch=1, key=KEY, stop=lambda: False)
        client.fetch(0, version, node / SNAP_DIR)
        keep = Snapshots(node / SNAP_DIR, 0, node / KEEPER_SOCKET, CheckpointConfig(job=JOB))
        self._load_and_leave(keep, version, node)

    @contextlib.contextmanager
    def _keeper(self) -> Iterator[int]:
        node, port = self.ours.node, self.ours.node / KEEPER_PORT_FILE
        port.unlink(missing_ok=True)
        words = ["--node-dir", str(node), "--host", "127.0.0.1", "--job", str(JOB)]
        process = subprocess.Popen([sys.executable, "-m", "keepstep.checkpoint.keeper", *words])
        try:
            until(lambda: port.exists() and bool(port.read_text()), START_S, "the keeper's port")
            yield int(port.read_text())
        finally:
            process.kill()
            process.wait()

    def _durable(self, tier: Tier, slot: Slot) -> None:
        """Part, read back, manifest, verified: from here on a power loss changes nothing."""
        source = Source.of_slot(slot)
        archive.write_part(tier, source, job=JOB, rank=0, world_size=1)
        archive.complete(tier, source.version, 1)

    def _from_disk(self, version: Version) -> None:
        """A new process's way on a node whose memory is empty: into a slot, verified, then into the live tensors."""
        snaps = self.memory / "restarted" / SNAP_DIR
        config = CheckpointConfig(job=JOB, policy=CheckpointPolicy(local_dir=str(self.disk / "durable")))
        durable = Durable(config, self.training.state, snaps)
        if version not in durable.look(0, 1):
            raise RuntimeError(f"step {version.step} is not found in {self.disk}")
        problem = durable.bring(version, 1, mine=True, key=KEY)
        if problem is not None:
            raise RuntimeError(problem)
        keep = Snapshots(snaps, 0, snaps.parent / KEEPER_SOCKET, config)
        self._load_and_leave(keep, version, snaps.parent)

    def _load_and_leave(self, keep: Snapshots, version: Version, node: Path) -> None:
        keep.load(self.training.state, version, shards=True)
        keep._full.close()  # its process would end now; an open file would keep its memory
        shutil.rmtree(node)

    def _from_tier(self, tier: Tier, version: Version) -> None:
        """Every byte verified on its way from the store into memory, and from there into the live tensors."""
        reader = Reader([tier], version)
        part = reader.part(0)
        landing = memoryview(self.landing)[: part.payload]
        blocks = [
            reshard.Block(0, at, at, min(reshard.READ, part.payload - at))
            for at in range(0, part.payload, reshard.READ)
        ]
        reader.fill(reshard.reads(blocks), landing)
        self.training.state.put_shards(part.tensors, lambda e: tensor_at(landing, e), part.plain, copy=_copy)


def tensor_at(memory: memoryview, entry: TensorEntry) -> Tensor:
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    found, odd = runs(targets, sources)
    chunks = plan(found, odd)
    Copier().run(chunks, sum(run.size for run in found))


class Peak:
    """Most memory of this process above what it had before, shared memory included; bytes."""

    grown = 0


@contextlib.contextmanager
def memory_peak() -> Iterator[Peak]:
    peak = Peak()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield peak
    peak.grown = max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def drop_cache(folder: Path) -> None:
    """Forget the pages of these files, as a node that was started anew would have."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--size-mb", type=int, required=True)
    ask.add_argument("--repeats", type=int, required=True)
    ask.add_argument("--rows", type=int, required=True)
    ask.add_argument("--seed", type=int, required=True)
    ask.add_argument("--peers", choices=["auto", "none"], required=True)
    ask.add_argument("--memory", type=Path, required=True)
    ask.add_argument("--disk", type=Path, required=True)
    args = ask.parse_args()
    memory = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=args.memory))
    disk = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=args.disk))
    try:
        found = Bench(args, memory, disk).run()
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # some peers leave threads and processes that would wait for ever


if __name__ == "__main__":
    main()
