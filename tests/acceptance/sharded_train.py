"""A tiny FSDP2 job whose gathered state is told at every step, so that worlds of different size can be compared.

Every rank draws the same batch; ``<out>/<step>.<world>`` holds a digest of all parameters and moments, gathered.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import keepstep


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    told = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        for key, value in [("", parameter), *sorted(optimizer.state[parameter].items())]:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            told.update(f"{name}/{key}{tuple(full.shape)}".encode())
            told.update(full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--out", type=Path, required=True)
    args = ask.parse_args()
    ks = keepstep.init()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ks.register(model=model, optimizer=optimizer)
    args.out.mkdir(parents=True, exist_ok=True)
    for step in ks.steps(args.steps):
        with step:
            if optimizer.state:
                (args.out / f"{step.index}.{ks.world_size}.{ks.rank}").write_text(digest(model, optimizer))
            x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step.index))
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
    (args.out / f"{args.steps}.{ks.world_size}.{ks.rank}").write_text(digest(model, optimizer))


if __name__ == "__main__":
    main()
