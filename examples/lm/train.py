"""Train a small byte-level language model on the source text of Python's own standard library.

The text is on every machine that has Python, so nothing is downloaded. Batches are a pure function of (seed, step,
rank) and dropout draws from torch's generator: a run that lost a rank and recovered can be compared with one that did
not, loss by loss. The same file runs under all three:

    python examples/lm/train.py --steps 50
    torchrun --nproc-per-node 4 examples/lm/train.py --steps 50
    keepstep run --nproc-per-node 4 examples/lm/train.py --steps 50
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

CORPUS_BYTES = 4_000_000


def corpus(limit: int = CORPUS_BYTES) -> Tensor:
    """The first ``limit`` bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(text: Tensor, *, seed: int, step: int, rank: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step of one rank. No state: step 7 is step 7, however often it is tried."""
    draw = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4_099 + rank)
    starts = torch.randint(len(text) - context - 1, (size, 1), generator=draw)
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(rows, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, time, width))
        return x + self.mlp(self.norm_2(x))


class Bytes(nn.Module):
    """A GPT over bytes: 256 words, learned positions."""

    def __init__(self, *, width: int = 128, layers: int = 2, heads: int = 4, context: int = 64, dropout: float = 0.1):
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=200)
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--batch", type=int, default=8, help="sequences per rank")
    ask.add_argument("--context", type=int, default=64, help="bytes per sequence")
    ask.add_argument("--dropout", type=float, default=0.1)
    ask.add_argument("--log-every", type=int, default=20)
    ask.add_argument(
        "--fail-at", type=int, default=-1, help="raise an exception on rank 0 at this step, to see what happens"
    )
    ask.add_argument("--pace", type=float, default=0.0, help="seconds of sleep per step, for people who want to watch")
    args = ask.parse_args()

    ks = keepstep.init()
    text = corpus()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Bytes(context=args.context, dropout=args.dropout).to(ks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(args.seed + 1 + ks.rank)  # every rank its own dropout
    ks.register(model=model, optimizer=optimizer)

    for step in ks.steps(args.steps):
        with step:
            if step.index == args.fail_at and ks.rank == 0:
                raise ValueError(f"the bug that --fail-at {args.fail_at} asked for")
            inputs, targets = batch(
                text, seed=args.seed, step=step.index, rank=ks.rank, size=args.batch, context=args.context
            )
            logits = model(inputs.to(ks.device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(ks.device))
            optimizer.zero_grad()
            loss.backward()
            time.sleep(args.pace)
            optimizer.step()
            step.commit(loss=loss)
            if ks.rank == 0 and (step.index % args.log_every == 0 or step.index == args.steps - 1):
                print(f"step {step.index:5d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
