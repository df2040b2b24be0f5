"""What a healthy job writes: the haystack around a labelled log, and a log as large as one likes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

RANKS = 64
PER_NODE = 8
MEGA = 10**6
FAULT_AT = 0.6
"""Share of a large log that lies before the fault."""
BEFORE = 40
"""Lines of healthy work before a labelled log."""
NEUTRAL = (
    "login-1 sshd[8841]: Accepted publickey for svc-mon from 10.0.0.9 port 50112 ssh2\n",
    "login-1 systemd[1]: Started Session 4411 of User svc-mon.\n",
    "FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated. Please use `torch.amp.GradScaler('cuda', "
    "args...)` instead.\n",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling "
    "parallelism to avoid deadlocks...\n",
    "wandb: WARNING Step only supports monotonically increasing values, use define_metric to set a custom x axis.\n",
    "DeprecationWarning: pkg_resources is deprecated as an API.\n",
    "WARNING:root:failed to import apex fused rmsnorm, falling back to torch implementation\n",
    "INFO metrics: flushed 128 points in 0.02 s\n",
    "\n",
)
WATCHDOG = (
    "[rank{r}]:[E ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum=18342, OpType=ALLREDUCE, NumelIn=4194304, NumelOut=4194304, Timeout(ms)=600000) ran for 600018 "
    "milliseconds before timing out.\n"
)
FAULT = (
    "node-003 kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n",
    "node-003 kernel: NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.\n",
)
FAULT_NODE = "node-003"


def noise(luck: random.Random, *, hosts: bool = True) -> Iterator[str]:
    """Progress, losses, warnings, NCCL's setup and systemd, from many ranks, for ever.

    Without times of day: those of another day would be a hint that no real neighbour gives.
    """
    step = luck.randrange(1000, 90000)
    while True:
        step += 1
        rank = luck.randrange(RANKS)
        node = f"node-{rank // PER_NODE:03d}" if hosts else "login-1"
        share = luck.random()
        loss = 2 + share / 7
        data = "" if step % 10 else f" | data wait {share / 90:.4f} s"
        yield (
            f"[rank{rank}]: step {step} | loss {loss:.4f} | gnorm {share:.3f} | tok/s {300000 + step % 4999} | "
            f"mfu {38 + 4 * share:.1f}%{data}\n"
        )
        if share < 0.3:
            yield (
                f"{node} trainer INFO {{'loss': {loss:.4f}, 'norm': {share:.4f}, 'lr': {share / 9000:.3e}, "
                f"'epoch': {step / 9000:.2f}}}\n"
            )
        elif share < 0.5:
            bar = "█" * int(10 * share)
            yield (
                f"Training: {step % 100:3d}%|{bar:<10}| {step}/100000 [{step % 24:02d}:{step % 60:02d}<"
                f"{step % 24:02d}:{step % 60:02d}, {1 + share:.2f}s/it, loss={loss:.3f}]\n"
            )
        elif share < 0.7 and hosts:
            yield (
                f"{node}:{4000 + rank}:{4400 + rank} [{rank % PER_NODE}] NCCL INFO Channel {step % 16:02d}/0 : "
                f"{rank}[{rank % PER_NODE}] -> {(rank + 1) % RANKS}[{(rank + 1) % PER_NODE}] via P2P/CUMEM/read\n"
            )
        elif share < 0.78:
            yield (
                "/opt/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:85: UserWarning: None of the inputs "
                "have requires_grad=True. Gradients will be None\n"
            )
        elif share < 0.84:
            yield f"{node} systemd[1]: Started Session {step} of User svc.\n"


def crowded(lines: Iterable[bytes], luck: random.Random) -> Iterator[bytes]:
    """The same log after a time of healthy work, and between lines that mean nothing.

    No progress between its lines: training that goes on after a fault would be another story. No host of the job
    either, which would tell where a rank is.
    """
    healthy = noise(luck, hosts=False)
    for _ in range(BEFORE):
        yield next(healthy).encode()
    for line in lines:
        for _ in range(luck.randrange(3)):
            yield luck.choice(NEUTRAL).encode()
        yield line if line.endswith((b"\n", b"\r")) else line + b"\n"


def large(size_mb: int, luck: random.Random) -> Iterator[bytes]:
    """A log of about that size with a lost GPU in it, after which all other ranks time out."""
    before, other = int(size_mb * MEGA * FAULT_AT), noise(luck)
    yield from until(before, other)
    yield "".join(FAULT).encode()
    yield from until(size_mb * MEGA - before, other)
    yield "".join(WATCHDOG.format(r=rank) for rank in range(RANKS) if rank // PER_NODE != 3).encode()


def until(size: int, lines: Iterator[str]) -> Iterator[bytes]:
    """Pieces of some thousand lines that make up that many bytes or a few more."""
    while size > 0:
        piece = "".join(next(lines) for _ in range(4000)).encode()
        size -= len(piece)
        yield piece
