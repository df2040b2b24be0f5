"""A tiny DDP job in which one rank, or one node, takes longer for itself for as long as a file says so.

The file holds ``RANK SECONDS`` or ``NODE SECONDS``, and perhaps ``data`` for a slow data set instead; it is read once
in a while, so that a test can make a rank slow and fast again. No number of training depends on it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Samples:
    """Random rows, and a wait in the first of each batch."""

    slow_s = 0.0

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_s, self.slow_s = self.slow_s, 0.0
        time.sleep(wait_s)
        return torch.randn(12, generator=torch.Generator().manual_seed(index))


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--pace", type=float, default=0.02, help="seconds that every rank takes for itself in each step")
    ask.add_argument("--slow", type=Path, required=True)
    args = ask.parse_args()

    ks = keepstep.init()
    torch.manual_seed(11)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)).to(ks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = Samples()
    data = keepstep.StepData(samples, 16, rank=ks.rank, world_size=ks.world_size, collate=torch.stack)
    ks.register(model=model, optimizer=optimizer, data=data)
    node = Path(os.environ["KEEPSTEP_RUNTIME_DIR"]).name
    extra, how = 0.0, ""
    for step in ks.steps(args.steps):
        with step:
            if step.index % 10 == 0:
                extra = 0.0
                with contextlib.suppress(OSError, ValueError):
                    who, seconds, how = (*args.slow.read_text().split(), "")[:3]
                    extra = float(seconds) if who in (str(ks.rank), node) else 0.0
            samples.slow_s = extra if how == "data" else 0.0
            x = next(data)
            time.sleep(args.pace + (0.0 if how == "data" else extra))
            loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :1]) * x[:, 1:2])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step.commit(loss=loss)


if __name__ == "__main__":
    main()
