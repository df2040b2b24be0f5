"""The user's script of these tests: a tiny model, four ways to be parallel, dropout, BatchNorm, scheduler, data."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import keepstep
from keepstep.trainer.data import StepData

KIND = os.environ.get("KIND", "ddp")
TOTAL = int(os.environ.get("TOTAL", "8"))
PAUSE = float(os.environ.get("PAUSE", "0"))
DIE = os.environ.get("DIE", "")  # "<rank>:<step>:<where>" — the process ends itself there, once
ONCE = Path(os.environ.get("ONCE", "/nonexistent"))


def build(ks: keepstep.Keepstep) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )
    if KIND == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    if KIND == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ks.world_size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def die(ks: keepstep.Keepstep, step: int, where: str) -> None:
    if f"{ks.rank}:{step}:{where}" != DIE:
        return
    try:
        ONCE.mkdir()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    ks = keepstep.init(timeout=60)
    model = build(ks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    inputs = torch.randn(640, 16, generator=torch.Generator().manual_seed(1))
    data = StepData(inputs, 8, seed=3, rank=ks.rank, world_size=ks.world_size, collate=torch.stack)
    ks.register(model=model, optimizer=optimizer, scheduler=schedule, data=data)
    if width := int(os.environ.get("WIDTH", "0")):
        ghost = nn.Module()
        ghost.register_buffer("ghost", torch.empty(1).expand(width))  # as large as you like, and takes no memory
        ks.register(ghost=ghost)
    torch.manual_seed(100 + ks.rank)
    if os.environ.get("FAIL_SETUP"):
        raise RuntimeError("set-up went wrong")
    for step in ks.steps(TOTAL):
        with step:
            if os.environ.get("RAISE") == f"{ks.rank}:{step.index}":
                raise ValueError("bad sample 17")
            x = next(data)
            die(ks, step.index, "fwd")
            loss = (model(x) - x[:, :4]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            if KIND == "plain" and ks.world_size > 1:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
            die(ks, step.index, "opt")
            optimizer.step()
            schedule.step()
            die(ks, step.index, "commit")
            step.commit(loss=loss)
            die(ks, step.index, "after")
        if PAUSE:
            time.sleep(PAUSE)
    with ks.phase("checkpoint"):
        time.sleep(float(os.environ.get("EPILOGUE", "0")))
        print(f"done {ks.rank} {TOTAL} pid {os.getpid()}", flush=True)
    die(ks, TOTAL, "done")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
