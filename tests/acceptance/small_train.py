"""A tiny DDP job for tests that need many steps: dropout and batch norm, so that a wrong rollback shows in the loss.

``--pace`` slows a run down without changing a single number of it, so that a slow run under faults can be compared
with a fast undisturbed one.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--pace", type=float, default=0.0, help="seconds of sleep in each step")
    args = ask.parse_args()

    ks = keepstep.init()
    torch.manual_seed(11)
    body = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    model = DistributedDataParallel(body.to(ks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(100 + ks.rank)
    ks.register(model=model, optimizer=optimizer)
    for step in ks.steps(args.steps):
        with step:
            draw = torch.Generator().manual_seed(step.index * 64 + ks.rank)
            x = torch.randn(16, 12, generator=draw)
            loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :1]) * x[:, 1:2])
            optimizer.zero_grad()
            loss.backward()
            time.sleep(args.pace)
            optimizer.step()
            step.commit(loss=loss)


if __name__ == "__main__":
    main()
