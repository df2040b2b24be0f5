"""A tiny job for torchrun with checkpoints of its own: dropout and momentum show a wrong rollback in the loss.

Each rank appends ``step world loss-in-hex`` to ``<out>/rank<r>.txt`` before the commit. ``--sharded`` uses FSDP2, whose
state differs from rank to rank; batches depend on the step alone there, so that other worlds see the same numbers.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--steps", type=int, required=True)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--dir", default="")
    ask.add_argument("--every", type=int, default=5)
    ask.add_argument("--linger", type=float, default=60.0)
    ask.add_argument("--sharded", action="store_true")
    ask.add_argument("--kill-at", type=int, default=-1, help="rank 1 of the first attempt kills itself in this step")
    ask.add_argument("--pace", type=float, default=0.0)
    args = ask.parse_args()

    ks = keepstep.init(checkpoint=keepstep.Checkpoint(dir=args.dir or None, every=args.every, linger_s=args.linger))
    assert ks.level == 1
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(11)
    body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.0 if args.sharded else 0.2), nn.Linear(32, 1))
    model: nn.Module
    if args.sharded:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(body)
    else:
        model = DistributedDataParallel(body)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(100 + ks.rank)
    ks.register(model=model, optimizer=optimizer)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"rank{ks.rank}.txt").open("a", buffering=1) as lines:
        print(f"start {attempt} {os.getpid()}", file=lines)
        for step in ks.steps(args.steps):
            with step:
                draw = torch.Generator().manual_seed(step.index * 64 + (0 if args.sharded else ks.rank))
                x = torch.randn(16, 12, generator=draw)
                loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :1]) * x[:, 1:2])
                optimizer.zero_grad()
                loss.backward()
                if step.index == args.kill_at and attempt == 0 and ks.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                time.sleep(args.pace)
                print(f"{step.index} {ks.world_size} {loss.item().hex()}", file=lines)
                step.commit(loss=loss)
        print("end", file=lines)


if __name__ == "__main__":
    main()
