"""The script that ``benchmarks.guard`` trains: the example's language model, with one bit to be flipped on purpose.

    --fault weight:2:9:17    behind the update of step 9, a bit of a parameter of rank 2; 17 draws which bit of which
    --fault moment:2:9:17    the same of the optimizer's state
    --fault gradient:2:9:17  the highest bit of the exponent in a gradient of rank 2, before any reduction

A fifth number is how often it strikes when the step is done again.
With ``--time`` it also tells what share of its time the guard took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.model import env
from keepstep.trainer import fingerprint_torch, guard_torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "lm"))

from train import Bytes, batch, corpus


class Stopwatch:
    """Sums up the time that calls take, those inside one another once: of the clock, and of this thread's processor."""

    def __init__(self) -> None:
        self.spent, self.worked, self._depth = 0.0, 0.0, 0

    def now(self, waits: Stopwatch) -> tuple[float, ...]:
        """Clock, processor, of both what was spent in the watched calls, and of the clock's what was waiting."""
        return time.perf_counter(), time.thread_time(), self.spent, self.worked, waits.spent

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began, worked = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.spent += time.perf_counter() - began
                    self.worked += time.thread_time() - worked

        return timed


def flip(tensor: Tensor, draw: random.Random, *, bit: int | None = None) -> None:
    flat = tensor.detach().view(-1).view(torch.int32)
    place = 30 if bit == 30 else draw.randrange(31)
    flat[draw.randrange(len(flat))] ^= 1 << place


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=32)
    ask.add_argument("--batch", type=int, default=4)
    ask.add_argument("--width", type=int, default=64)
    ask.add_argument("--fault", default="none:0:0:0")
    ask.add_argument("--guard", type=json.loads, default={}, help="settings of keepstep.Guard as JSON")
    ask.add_argument("--context", type=int, default=64)
    ask.add_argument("--block", type=int, default=100, help="steps that are told together by --time")
    ask.add_argument("--warm", type=int, default=20, help="steps before the first block")
    ask.add_argument("--time", type=Path, help="where rank 0 writes its seconds, and those of the guard")
    args = ask.parse_args()
    what, rank, at, seed, *times = args.fault.split(":")

    watch, waits = Stopwatch(), Stopwatch()
    if args.time is not None:
        for name in ("begin", "commit", "_before_update"):
            setattr(guard_torch.Guardian, name, watch.around(getattr(guard_torch.Guardian, name)))
        # What ranks exchange: nearly all of it is waiting for the one that comes last.
        for module, name in ((guard_torch, "over_all_ranks"), (fingerprint_torch, "gather")):
            setattr(module, name, waits.around(getattr(module, name)))
    ks = keepstep.init(guard=keepstep.Guard(**args.guard) if args.guard else None)
    text, draw = corpus(), random.Random(int(seed))
    torch.manual_seed(1)
    model = DistributedDataParallel(Bytes(width=args.width, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(2 + ks.rank)
    ks.register(model=model, optimizer=optimizer)
    standby = os.environ.get(env.SLOT, "").startswith("s")  # a process that was parked: another machine, which is sound
    left = int(times[0] if times else 1) if ks.rank == int(rank) and not standby else 0

    def bent(gradient: Tensor) -> Tensor:
        whole = gradient.clone()
        flip(whole, draw, bit=30)
        return whole

    marks: list[tuple[float, ...]] = []
    for step in ks.steps(args.steps):
        if step.index >= args.warm and (step.index - args.warm) % args.block == 0:
            marks.append(watch.now(waits))
        strikes = left > 0 and step.index == int(at)
        with step:
            inputs, targets = batch(text, seed=1, step=step.index, rank=ks.rank, size=args.batch, context=args.context)
            out = model(inputs)
            if strikes and what == "gradient":
                left -= 1
                out.register_hook(bent)
            loss = F.cross_entropy(out.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if strikes and what in ("weight", "moment"):
                left -= 1
                parameter = draw.choice(list(model.parameters()))
                flip(parameter if what == "weight" else optimizer.state[parameter]["exp_avg"], draw)
            step.commit(loss=loss)
    if args.time is not None and ks.rank == 0:
        marks.append(watch.now(waits))
        spans = [[b - a for a, b in zip(one, other, strict=True)] for one, other in itertools.pairwise(marks)]
        names = ("seconds", "cpu_s", "guard_s", "guard_cpu_s", "wait_s")
        state = sum(p.numel() * p.element_size() for p in model.parameters())
        args.time.write_text(json.dumps({"blocks": [dict(zip(names, s, strict=True)) for s in spans], "bytes": state}))


if __name__ == "__main__":
    main()
