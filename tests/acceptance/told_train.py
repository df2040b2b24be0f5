"""A tiny job that meets three faults, each once: a GPU that only the log tells of, a bug, a corrupt sample.

Which of them have been met is kept in files of ``--met``, so that the process that takes the seat over does not meet
them again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

LOST = """\
NVRM: Xid (PCI:0000:9d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[rank{rank}]: torch.AcceleratorError: CUDA error: unspecified launch failure
"""


def read(step: int) -> torch.Tensor:
    if step == 120:
        raise ValueError("corrupt record in /data/shard-00017.tar: CRC mismatch at sample 4711")
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(step))


def once(met: Path, what: str) -> bool:
    try:
        (met / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--met", type=Path, required=True)
    args = ask.parse_args()
    args.met.mkdir(parents=True, exist_ok=True)

    ks = keepstep.init()
    torch.manual_seed(11)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)).to(ks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ks.register(model=model, optimizer=optimizer)
    for step in ks.steps(args.steps):
        with step:
            if ks.rank == 1 and step.index == 40 and once(args.met, "lost"):
                print(LOST.format(rank=ks.rank), file=sys.stderr, flush=True)
                os._exit(1)
            if ks.rank == 0 and step.index == 80 and once(args.met, "bug"):
                raise KeyError("lerning_rate")
            x = read(120) if ks.rank == 1 and step.index == 120 and once(args.met, "data") else read(step.index % 100)
            loss = nn.functional.mse_loss(model(x), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)


if __name__ == "__main__":
    main()
