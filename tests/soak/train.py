"""The job of the soak: small, with state that a wrong rollback shows, and with the pauses of real training on request.

``--pauses FILE`` names a file that says which ranks pause, how and for how long (``keepstep`` must not take any of
them for a fault): a garbage collection that really takes that long, an extension that keeps the interpreter's lock, an
evaluation. No pause touches a number of the training. A process acts once on each order, and never on one that is
older than itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

PROBE_CYCLES = 100_000
MOST_CYCLES = 4_000_000
"""About 400 MB of garbage; making it takes time, too, which belongs to the pause."""


class Pauses:
    """The orders of the file, each taken once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen = int(self._read().get("number", 0))

    def take(self, rank: int, *kinds: str) -> float:
        """Seconds of a new order of one of ``kinds`` for this rank; 0 where there is none."""
        order = self._read()
        if order.get("number", 0) <= self._seen or rank not in order["ranks"] or order["kind"] not in kinds:
            return 0.0
        self._seen = order["number"]
        return float(order["seconds"])

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self._path.read_bytes()) if self._path else {}  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {}


def make_cycles(count: int) -> None:
    for _ in range(count):
        cycle: list[object] = []
        cycle.append(cycle)


def timed_collection() -> float:
    start = time.monotonic()
    gc.collect()
    return time.monotonic() - start


def collect_garbage(seconds: float) -> None:
    """One collection that takes about ``seconds``: as many unreachable cycles as this machine needs for it."""
    gc.collect()
    gc.disable()
    try:
        base = timed_collection()
        make_cycles(PROBE_CYCLES)
        each = max(1e-8, (timed_collection() - base) / PROBE_CYCLES)
        count = min(MOST_CYCLES, int((seconds - base) / each))
        make_cycles(count)
        took = timed_collection()
    finally:
        gc.enable()
    print(f"collected {count} cycles in {took:.2f} s", file=sys.stderr, flush=True)


def hold_interpreter(seconds: float) -> None:
    """As an extension does that forgets to release the lock: no thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def evaluate(model: nn.Module, seconds: float) -> None:
    """Forward passes over held-out data; running statistics, random state and gradients stay as they are."""
    draw = torch.Generator().manual_seed(5)
    end = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        while time.monotonic() < end:
            model(torch.randn(16, 12, generator=draw))
            time.sleep(0.01)  # two cores are shared by four ranks and their agents
    model.train()


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--pace", type=float, default=0.0, help="seconds of sleep in each step")
    ask.add_argument("--pauses", type=Path, help="file with the newest order to pause")
    args = ask.parse_args()

    ks = keepstep.init()
    torch.manual_seed(11)
    body = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    model = DistributedDataParallel(body.to(ks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(100 + ks.rank)
    ks.register(model=model, optimizer=optimizer)
    pauses = Pauses(args.pauses)
    for step in ks.steps(args.steps):
        if seconds := pauses.take(ks.rank, "evaluation"):
            with ks.phase("evaluation"):
                evaluate(body, seconds)
        with step:
            draw = torch.Generator().manual_seed(step.index * 64 + ks.rank)
            x = torch.randn(16, 12, generator=draw)
            if seconds := pauses.take(ks.rank, "garbage"):
                collect_garbage(seconds)
            if seconds := pauses.take(ks.rank, "interpreter"):
                hold_interpreter(seconds)
            loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :1]) * x[:, 1:2])
            optimizer.zero_grad()
            loss.backward()
            time.sleep(args.pace)
            optimizer.step()
            step.commit(loss=loss)


if __name__ == "__main__":
    main()
