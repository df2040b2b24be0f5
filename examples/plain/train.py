"""No keepstep in here at all (level 0): torchrun's environment and a checkpoint of the script's own.

    torchrun --nproc-per-node 2 examples/plain/train.py --checkpoint /tmp/plain.pt
    keepstep run --nproc-per-node 2 examples/plain/train.py --checkpoint /tmp/plain.pt

keepstep notices a dead or frozen rank, says which one it was, and starts all ranks again; they go on from the newest
checkpoint. Steps since then are done twice, and every process is a new one. That is what the SDK saves.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def sample(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a function to learn, the same whenever this step is tried."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step * 1009 + rank))
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def save(path: Path, state: dict[str, object]) -> None:
    """All or nothing: a reader sees the old file or the new one, never half of it."""
    half = path.with_suffix(".half")
    torch.save(state, half)
    os.replace(half, path)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=300)
    ask.add_argument("--checkpoint", type=Path, required=True)
    ask.add_argument("--every", type=int, default=25, help="steps between checkpoints")
    args = ask.parse_args()

    alone = "RANK" not in os.environ
    if alone:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        if rank == 0:
            print(f"going on from step {first}", flush=True)

    for step in range(first, args.steps):
        x, y = sample(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.5f}", flush=True)
        if rank == 0 and (step + 1) % args.every == 0:
            save(args.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
