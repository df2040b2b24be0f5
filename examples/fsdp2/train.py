"""FSDP2: every rank holds a shard that nobody else has, so its newest copy waits in memory, here and on another node.

    torchrun --nproc-per-node 2 examples/fsdp2/train.py
    keepstep run --nproc-per-node 2 examples/fsdp2/train.py

With several nodes a shard also survives the loss of its whole node: the keeper has sent it to the buddy node.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def sample(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a function to learn, the same whenever this step is tried."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step * 1009 + rank))
    return x, torch.roll(x, 1, dims=1) * x


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=300)
    args = ask.parse_args()

    ks = keepstep.init()
    torch.manual_seed(7)
    mesh = init_device_mesh(ks.device.type, (ks.world_size,))
    model = nn.Sequential(*(Residual(32) for _ in range(4))).to(ks.device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ks.register(model=model, optimizer=optimizer)

    for step in ks.steps(args.steps):
        with step:
            x, y = sample(step.index, ks.rank)
            loss = nn.functional.mse_loss(model(x.to(ks.device)), y.to(ks.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
            if ks.rank == 0 and step.index % 50 == 0:
                print(f"step {step.index:4d}  loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
