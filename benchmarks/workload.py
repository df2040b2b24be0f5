"""The script that the benchmarks train: the example's language model, with each way to survive a fault.

    --lane sdk    keepstep's SDK; the state is in memory
    --lane own    no SDK; a checkpoint of its own every few steps, as scripts under torchrun have
    --lane bare   no SDK, no checkpoint

Each rank appends "<step> <monotonic ns>" to a file of its own after every step, the same way in every lane. With
``--gate DIR`` it trains in blocks and waits before each one for a byte in its pipe, so that lanes can take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "lm"))

from train import Bytes, batch, corpus


class Trainer:
    """Model, optimizer and one step of training."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.args = rank, args
        self.text = corpus()
        torch.manual_seed(1)
        self.model = DistributedDataParallel(Bytes(width=args.width, dropout=0.1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        torch.manual_seed(2 + rank)
        self.progress = (args.progress / f"rank{rank}").open("ab", buffering=0)

    def step(self, index: int) -> torch.Tensor:
        inputs, targets = batch(self.text, seed=1, step=index, rank=self.rank, size=self.args.batch, context=64)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def done(self, index: int) -> None:
        self.progress.write(b"%d %d\n" % (index, time.monotonic_ns()))


class Gate:
    """Lets a block of steps through for each byte that arrives in this rank's pipe."""

    def __init__(self, directory: Path | None, rank: int, block: int) -> None:
        self.block = block
        self.pipe = None if directory is None else (directory / f"rank{rank}").open("rb", buffering=0)

    def pass_at(self, index: int) -> None:
        if self.pipe is not None and index % self.block == 0 and not self.pipe.read(1):
            sys.exit(0)


def train_with_sdk(args: argparse.Namespace) -> None:
    import keepstep

    ks = keepstep.init()
    trainer = Trainer(ks.rank, args)
    ks.register(model=trainer.model, optimizer=trainer.optimizer)
    gate = Gate(args.gate, ks.rank, args.block)
    for step in ks.steps(args.steps):
        if args.gate is not None and step.index % args.block == 0:
            with ks.phase("other"):
                gate.pass_at(step.index)
        with step:
            step.commit(loss=trainer.step(step.index))
        trainer.done(step.index)


def train_alone(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    trainer = Trainer(rank, args)
    gate = Gate(args.gate, rank, args.block)
    for index in first_steps(trainer, args):
        gate.pass_at(index)
        trainer.step(index)
        trainer.done(index)
        if args.lane == "own" and (index + 1) % args.every == 0:
            save(trainer, args.checkpoint, index + 1)
    dist.barrier()


def first_steps(trainer: Trainer, args: argparse.Namespace) -> Iterator[int]:
    first = 0
    if args.lane == "own" and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        trainer.model.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    yield from range(first, args.steps)


def save(trainer: Trainer, path: Path, step: int) -> None:
    if trainer.rank == 0:
        state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "step": step}
        torch.save(state, path.with_suffix(".half"))
        os.replace(path.with_suffix(".half"), path)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--lane", choices=["sdk", "own", "bare"], required=True)
    ask.add_argument("--progress", type=Path, required=True)
    ask.add_argument("--steps", type=int, default=1_000_000)
    ask.add_argument("--batch", type=int, default=4)
    ask.add_argument("--width", type=int, default=128)
    ask.add_argument("--checkpoint", type=Path)
    ask.add_argument("--every", type=int, default=10)
    ask.add_argument("--timeout", type=float, default=1800.0, help="of the process group, seconds")
    ask.add_argument("--gate", type=Path)
    ask.add_argument("--block", type=int, default=40)
    args = ask.parse_args()
    if args.lane == "sdk":
        train_with_sdk(args)
    else:
        train_alone(args)


if __name__ == "__main__":
    main()
