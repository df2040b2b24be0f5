"""The training process of ``benchmarks.abort``: a tiny model over ``Groups`` and the framework helpers, nothing else.

A parent that has imported this module forks the processes; each is told over its socket which rank it is. The
control thread aborts at once when an epoch is announced; the main thread leaves its step by an exception, connects
the new epoch, agrees with the others on the newest common step, takes that step's state and trains on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from keepstep.trainer.exceptions import GroupsAborted
from keepstep.trainer.frameworks_torch import (
    DdpLayout,
    adopt_ddp_layout,
    arrange_ddp_buckets,
    ddp_layout,
    reset_after_abort,
)
from keepstep.trainer.groups_torch import GROUPS
from keepstep.trainer.store_torch import dial

MODES = ("ar", "ddp", "fsdp2", "hsdp")
WIDTH, LAYERS, BATCH = 96, 4, 8
REBUILD_LIMIT_S = 30.0
ORDER_LIMIT_S = 30.0


def warm() -> None:
    """Import and touch everything that a forked process would otherwise pay for: no threads, no groups."""
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for mode in MODES:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        net = build(mode, 4)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if mode != "ddp":  # its reducer wants results that the fake group does not give
            net(torch.ones(1, 32)).sum().backward()
        dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, WIDTH)
        self.hidden = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.hidden:
            x = torch.relu(layer(x)) + x
        return self.last(x)  # type: ignore[no-any-return]


def build(mode: str, world: int) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if mode == "ddp":
        return DDP(net, bucket_cap_mb=0.05)
    if mode in ("fsdp2", "hsdp"):
        shape, names = ((world,), ("shard",)) if mode == "fsdp2" else ((2, world // 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in net.hidden:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 32, generator=generator), torch.randn(BATCH, 8, generator=generator)


class Worker:
    """One rank; lives until its job is over or it is killed."""

    def __init__(self, sock: socket.socket, directory: Path, mode: str, world: int, steps: int) -> None:
        self.sock, self.directory, self.mode, self.world, self.steps = sock, directory, mode, world, steps
        self.lines = sock.makefile("r")
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.order: dict[str, Any] | None = None
        self.announced = 0.0
        self.rank, self.epoch = -1, 0
        self.step: int | None = None  # a newcomer has none until it has met the others
        self.layout: DdpLayout = ()
        self.saved: dict[int, tuple[list[Tensor], DdpLayout]] = {}

    def say(self, kind: str, **values: Any) -> None:
        with self.lock:
            self.sock.sendall((json.dumps({"kind": kind, "rank": self.rank, **values}) + "\n").encode())

    # ------------------------------------------------------------------ life

    def run(self) -> None:
        self.say("parked")
        seat = json.loads(self.lines.readline())
        self.rank = seat["rank"]
        self.order = seat
        self.announced = time.monotonic()
        threading.Thread(target=self.listen, daemon=True).start()
        newcomer = bool(seat["newcomer"])
        store = None if newcomer else client(seat["port"])
        try:
            GROUPS.start(
                rank=self.rank,
                world_size=self.world,
                store=store,
                key=f"e{seat['epoch']}",
                stand_in=newcomer,
                timeout=timedelta(minutes=5),
            )
            self.net = build(self.mode, self.world)
        except GroupsAborted:
            self.say("failed", why="aborted in set-up")
            return
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, foreach=False)
        self.make_optimizer_state()
        if newcomer:
            self.recover()
        else:
            self.epoch, self.step = seat["epoch"], 0
            if isinstance(self.net, DDP):
                self.layout = ddp_layout(self.net)
            self.save()
        self.train()
        self.say("done")

    def listen(self) -> None:
        for line in self.lines:
            self.announced = time.monotonic()
            GROUPS.abort("epoch over")
            with self.changed:
                self.order = json.loads(line)
                self.changed.notify_all()
        os._exit(1)  # the parent is gone

    def train(self) -> None:
        while self.now() < self.steps:
            try:
                loss = self.one_step()
            except (RuntimeError, GroupsAborted) as error:
                if GROUPS.broken is None and not GROUPS.aborted:
                    raise
                self.await_order(error)
                self.say("free", epoch=self.wanted(), ms=(time.monotonic() - self.announced) * 1e3)
                self.recover()
                continue
            self.save()
            self.say("step", step=self.step, epoch=self.epoch, loss=loss.hex())

    def one_step(self) -> float:
        x, y = batch(self.now(), self.rank)
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.mode == "ar":
            for parameter in self.net.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
        total = loss.detach().double().reshape(1)
        dist.all_reduce(total)  # the vote: nobody steps before all have their gradients
        self.optimizer.step()
        if isinstance(self.net, DDP) and arrange_ddp_buckets(self.net):
            self.layout = ddp_layout(self.net)
        self.step = self.now() + 1
        return float(total)

    # ------------------------------------------------------------------ recovery

    def wanted(self) -> int:
        return int(self.order["epoch"]) if self.order is not None else 0

    def await_order(self, error: BaseException) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.wanted() > self.epoch, ORDER_LIMIT_S):
                raise TimeoutError(f"no epoch after {self.epoch} within {ORDER_LIMIT_S} s") from error

    def recover(self) -> None:
        while True:
            aborts, order = GROUPS.aborts, self.order
            assert order is not None
            began = time.monotonic()
            try:
                reset_after_abort([self.net], [self.optimizer])
                phases = GROUPS.rebuild(
                    store_host="127.0.0.1",
                    store_port=order["port"],
                    key=f"e{order['epoch']}",
                    rank=self.rank,
                    world_size=self.world,
                    limit_s=REBUILD_LIMIT_S,
                    aborts=aborts,
                )
                self.epoch = order["epoch"]
                self.meet()
            except (RuntimeError, TimeoutError) as error:
                self.epoch = max(self.epoch, order["epoch"])
                self.await_order(error)
                continue
            self.say(
                "resumed",
                epoch=self.epoch,
                step=self.step,
                ms=(time.monotonic() - began) * 1e3,
                phases=phases,
                **footprint(),
            )
            return

    def meet(self) -> None:
        """The newest step that everybody has; then that step's state."""
        newest = max(self.stored(), default=-1) if self.step is None else self.step
        mine = torch.tensor([newest])
        everyones = [torch.zeros_like(mine) for _ in range(self.world)]
        dist.all_gather(everyones, mine)
        step = min(int(theirs) for theirs in everyones)
        tensors, self.layout = self.load(step)
        if isinstance(self.net, DDP):
            adopt_ddp_layout(self.net, self.layout)
        with torch.no_grad():
            for live, saved in zip(self.tensors(), tensors, strict=True):
                live.copy_(saved)
        self.step = step
        dist.barrier()

    # ------------------------------------------------------------------ state

    def now(self) -> int:
        assert self.step is not None
        return self.step

    def make_optimizer_state(self) -> None:
        keep = [t.clone() for t in self.tensors(optimizer=False)]
        for parameter in self.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for live, kept in zip(self.tensors(optimizer=False), keep, strict=True):
                live.copy_(kept)
            for state in self.optimizer.state.values():
                for value in state.values():
                    local(value).zero_()

    def tensors(self, *, optimizer: bool = True) -> list[Tensor]:
        found = [local(p.detach()) for p in self.net.parameters()]
        if optimizer:
            for parameter in self.net.parameters():
                state = self.optimizer.state[parameter]
                found += [local(state[name]) for name in sorted(state)]
        return found

    def save(self) -> None:
        """Keep two versions in memory for a roll-back, and in files for whoever replaces this process."""
        step = self.now()
        self.saved[step] = [t.clone() for t in self.tensors()], self.layout
        self.saved = {s: t for s, t in self.saved.items() if s in (step - 1, step)}
        path = self.directory / f"r{self.rank}s{step}"
        torch.save(self.saved[step], path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        (self.directory / f"r{self.rank}s{step - 3}").unlink(missing_ok=True)

    def stored(self) -> Iterator[int]:
        prefix = f"r{self.rank}s"
        for path in self.directory.glob(f"{prefix}*[0-9]"):
            yield int(path.name[len(prefix) :])

    def load(self, step: int) -> tuple[list[Tensor], DdpLayout]:
        if step not in self.saved:
            loaded = torch.load(self.directory / f"r{self.rank}s{step}", weights_only=True)
            self.saved = {step: loaded}
        self.saved = {s: t for s, t in self.saved.items() if s <= step}
        for later in [s for s in self.stored() if s > step]:
            (self.directory / f"r{self.rank}s{later}").unlink(missing_ok=True)
        return self.saved[step]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def client(port: int) -> TCPStore:
    return dial("127.0.0.1", port, limit_s=30.0)


def footprint() -> dict[str, Any]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(os.listdir("/proc/self/fd")),
        "rss_mib": pages * os.sysconf("SC_PAGESIZE") / 2**20,
        "left": GROUPS.leftovers(),
    }


def main(sock: socket.socket, directory: Path, mode: str, world: int, steps: int) -> None:
    """Body of a forked process; never returns."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    worker = Worker(sock, directory, mode, world, steps)
    code = 0
    try:
        worker.run()
    except BaseException:
        traceback.print_exc()
        code = 1
        with contextlib.suppress(OSError):
            worker.say("failed", why=traceback.format_exc()[-1500:])
    finally:
        os._exit(code)


def serve_stores(sock: socket.socket) -> None:
    """Body of the forked store process: one fresh TCPStore per request line, the last few are kept."""
    # Torch's server looks up the name of each client, for its log, and serves nobody meanwhile.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    kept: list[TCPStore] = []
    for _ in sock.makefile("r"):
        kept.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        kept = kept[-4:]
        sock.sendall(f"{kept[-1].port}\n".encode())
    os._exit(0)
