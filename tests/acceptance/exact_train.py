"""A job that uses every kind of data in each step and writes down which samples, before the step is committed.

A step that is done again is written again; the last line of a step is the one that was committed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep

SAMPLES = 310
BATCH = 3
SHARDS = 12


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def kinds(batch: int, place: dict[str, Any]) -> dict[str, Any]:
    size = SAMPLES // SHARDS
    return {
        "map": keepstep.StepData(range(SAMPLES), batch, collate=torch.tensor, **place),
        "loader": keepstep.StepLoader(range(SAMPLES), batch, num_workers=1, **place),
        "kept": keepstep.StepLoader(range(SAMPLES), batch, num_workers=1, persistent_workers=True, **place),
        "stream": keepstep.StepStream(range(SAMPLES), batch, collate=torch.tensor, **place),
        "shards": keepstep.StepShards(
            range(SHARDS), lambda shard: range(shard * size, (shard + 1) * size), batch,
            lengths=[size] * SHARDS, collate=torch.tensor, **place,
        ),
    }  # fmt: skip


def stateful(rank: int, world_size: int) -> Any:
    sampler = DistributedSampler(range(SAMPLES - SAMPLES % world_size), world_size, rank)  # type: ignore[arg-type]
    return StatefulDataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler, num_workers=1, drop_last=True)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--pace", type=float, default=0.0)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--batch", type=int, default=BATCH)
    ask.add_argument("--dir", default="", help="durable checkpoints, for a run without an agent")
    args = ask.parse_args()

    ks = keepstep.init(checkpoint=keepstep.Checkpoint(dir=args.dir, every=10, linger_s=0.1) if args.dir else None)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    place: dict[str, Any] = {"rank": ks.rank, "world_size": ks.world_size}
    data = kinds(args.batch, place)
    batches: Iterator[Any] | None = None
    if not args.dir:
        bare = stateful(ks.rank, ks.world_size)
        batches = endless(bare)
        ks.register(bare=bare)
    ks.register(model=model, optimizer=optimizer, **data)
    for step in ks.steps(args.steps):
        with step:
            taken = {name: next(one) for name, one in data.items()}
            if batches is not None:
                taken["bare"] = next(batches)
            with (args.out / f"rank_{ks.rank}").open("a") as file:
                for name, ids in taken.items():
                    file.write(f"{name} {step.index} {' '.join(map(str, ids.tolist()))}\n")
            loss = model(taken["map"].float().unsqueeze(1)).mean() * 1e-3
            optimizer.zero_grad()
            loss.backward()
            time.sleep(args.pace)
            optimizer.step()
            step.commit(loss=loss)


if __name__ == "__main__":
    main()
