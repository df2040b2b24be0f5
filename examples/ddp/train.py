"""Six lines make a DDP script recoverable: those marked with ``# <-``. Everything else is plain PyTorch.

    torchrun --nproc-per-node 2 examples/ddp/train.py
    keepstep run --nproc-per-node 2 examples/ddp/train.py

While the second one runs, kill one of its two workers: the other keeps its process, and the loss goes on falling.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep  # <-


def sample(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a function to learn, the same whenever this step is tried."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step * 1009 + rank))
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=300)
    args = ask.parse_args()

    ks = keepstep.init()  # <- instead of torch.distributed.init_process_group()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(ks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    ks.register(model=model, optimizer=optimizer, scheduler=schedule)  # <-

    for step in ks.steps(args.steps):  # <- instead of range(args.steps)
        with step:  # <-
            x, y = sample(step.index, ks.rank)
            loss = nn.functional.mse_loss(model(x.to(ks.device)), y.to(ks.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step.commit(loss=loss)  # <-
            if ks.rank == 0 and step.index % 50 == 0:
                print(f"step {step.index:4d}  loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
