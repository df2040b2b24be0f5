"""The script that ``benchmarks.localise`` trains, and that goes wrong on order.

One step: a batch (from loader processes, or read from a file, where the case wants that), a reduction in the rank's
own half of the world (as tensor parallelism does), a backward pass of DDP over the world, a sum of metrics over the
world, a gathering in the half. Ranks of one half therefore also wait for one another, and most of the faults show
first in a group that the other half has no part in.

An order is a file ``rank<n>`` in ``--orders``: JSON with ``fault``, ``number`` and what the fault needs. The rank
takes it away, so that the process that replaces it does not obey it again, and leaves ``struck-<number>-<rank>`` with
the nanosecond in which it went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import keepstep

WIDTH = 32
BATCH = 4
BATCH_BYTES = 4 * BATCH * WIDTH
METRICS = 16


class Orders:
    """What this rank has been told to do wrong."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.path = folder / f"rank{rank}"
        self.now: dict[str, Any] = {}
        self.slow_s = 0.0
        self.how: Callable[[float], object] = burn

    def look(self) -> None:
        """At the begin of a step."""
        if not self.path.exists():
            return
        self.now = json.loads(self.path.read_text())
        self.path.unlink()
        if self.now["fault"] == "slow":
            self.slow_s = self.now["seconds"]
            self.how = burn if self.now["how"] == "burn" else time.sleep
            self.strike()

    def due(self, fault: str) -> bool:
        return self.now.get("fault") == fault

    def strike(self) -> None:
        mark(self.folder, self.now["number"], self.rank)
        self.now = {}


def mark(folder: Path, number: int, rank: int) -> None:
    half = folder / f".struck-{number}-{rank}"
    half.write_text(str(time.time_ns()))
    half.rename(folder / f"struck-{number}-{rank}")


# -------------------------------------------------------------------- what goes wrong


def loop_for_ever() -> None:
    turns = 0
    while True:
        turns += 1


def wait_for_a_key_that_nobody_returns() -> None:
    threading.Event().wait()


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Samples:
    """A data set whose workers can be made to wait for themselves."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        order = self.folder / f"loader{self.rank}"
        if order.exists():
            number = int(order.read_text())
            order.unlink(missing_ok=True)
            mark(self.folder, number, self.rank)
            deadlock()
        return torch.full((WIDTH,), (index % 7) / 7.0)


# -------------------------------------------------------------------- one step


class Trainer:
    def __init__(self, ks: Any, args: argparse.Namespace, orders: Orders) -> None:
        self.ks, self.args, self.orders = ks, args, orders
        half = ks.world_size // 2
        halves = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
        self.half = halves[ks.rank // half]
        torch.manual_seed(1)
        self.model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.loader: Any = None
        if args.loaders:
            self.loader = keepstep.StepLoader(
                Samples(args.orders, ks.rank),
                BATCH,
                rank=ks.rank,
                world_size=ks.world_size,
                num_workers=args.loaders,
                prefetch_factor=2,
            )
            state["data"] = self.loader
        ks.register(**state)

    def batch(self, index: int) -> Tensor:
        if self.loader is not None:
            return next(self.loader)  # type: ignore[no-any-return]
        if self.args.storage is not None:
            return read_batch(self.args.storage / f"rank{self.ks.rank}", index)
        return torch.full((BATCH, WIDTH), (index % 7) / 7.0)

    def step(self, index: int) -> Tensor:
        time.sleep(self.args.pace)
        orders = self.orders
        if orders.slow_s:
            orders.how(orders.slow_s)
        if orders.due("loop") and orders.now["early"]:
            orders.strike()
            loop_for_ever()
        inputs = self.batch(index)
        if orders.due("blocked"):
            orders.strike()
            wait_for_a_key_that_nobody_returns()
        scale = inputs.sum().reshape(1).clone()
        dist.all_reduce(scale, group=self.half)
        loss = F.mse_loss(self.model(inputs), inputs) + 0 * scale
        self.optimizer.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if orders.due("loop"):
            orders.strike()
            loop_for_ever()
        self.report(loss)
        return loss

    def report(self, loss: Tensor) -> None:
        """Metrics over the world; here a rank can leave a collective out, or bring another shape."""
        orders = self.orders
        metrics = torch.zeros(METRICS)
        metrics[0] = loss.detach().sum()
        if orders.due("shape"):
            metrics = torch.zeros(orders.now["elements"])
            orders.strike()
        if orders.due("skip"):
            orders.strike()
        else:
            dist.all_reduce(metrics)
        rows = [torch.zeros(2) for _ in range(dist.get_world_size(self.half))]
        dist.all_gather(rows, metrics[:2], group=self.half)


def read_batch(path: Path, index: int) -> Tensor:
    fd = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(fd, BATCH_BYTES, index * BATCH_BYTES)
    finally:
        os.close(fd)
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(BATCH, WIDTH)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--orders", type=Path, required=True)
    ask.add_argument("--pace", type=float, default=0.03, help="seconds of each step in which nothing is done")
    ask.add_argument("--loaders", type=int, default=0, help="loader processes per rank")
    ask.add_argument("--storage", type=Path, help="folder from which each step reads its batch")
    args = ask.parse_args()

    ks = keepstep.init()
    orders = Orders(args.orders, ks.rank)
    trainer = Trainer(ks, args, orders)
    for step in ks.steps(1_000_000):
        with step:
            orders.look()
            step.commit(loss=trainer.step(step.index))


if __name__ == "__main__":
    main()
