"""Exchange: runs of bytes between the ranks of the default group. Never pickle."""

from __future__ import annotations

import atexit
import time
from collections import deque
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name before and after torch 2.13."""
LET_GO_S = 2.0
"""How long the interpreter's end waits for gloo's threads."""
_kept: deque[Tensor] = deque(maxlen=8)
"""What was exchanged last, but for bulk."""


def keep(tensor: Tensor) -> Tensor:
    """Remember a small tensor that is about to be exchanged, for ``let_go``."""
    _kept.append(tensor)
    return tensor


@atexit.register
def let_go(limit_s: float = LET_GO_S) -> bool:
    """Before the interpreter ends: wait until gloo's threads hold nothing any more of what was exchanged last.

    They let go of a tensor a moment after the call has returned, and need the interpreter's lock for it. An interpreter
    that is ending gives that lock to nobody: such a thread is ended instead, amid C++ that cannot be left that way, and
    takes the process with it (``terminate called without an active exception``) though its work was done.

    Returns:
        Whether they have.
    """
    end = time.monotonic() + limit_s
    while any(_held(tensor) > 1 for tensor in _kept):
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)  # without the lock, so that they can have it
    return True


def _held(tensor: Tensor) -> int:
    """By how many, ourselves included."""
    return int(cast(Any, tensor)._use_count())


def everybody(good: bool) -> bool:
    """Whether it is so on all ranks; nobody goes on before all have come."""
    if not dist.is_initialized():
        return good
    count = keep(torch.tensor([0 if good else 1], dtype=torch.int64))
    dist.all_reduce(count)
    return int(count) == 0


def gather(value: Any) -> list[Any]:
    """Each rank's value (what msgpack can hold) on every rank, by rank."""
    data = msgspec.msgpack.encode(value)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [msgspec.msgpack.decode(data)]
    sizes = keep(torch.zeros(dist.get_world_size(), dtype=torch.int64))
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)
    room = int(sizes.max())
    mine = keep(torch.frombuffer(bytearray(data).ljust(room, b"\0"), dtype=torch.uint8))
    every = bytearray(room * len(sizes))
    _gather(keep(torch.frombuffer(every, dtype=torch.uint8)), mine)
    return [
        msgspec.msgpack.decode(memoryview(every)[number * room : number * room + size])
        for number, size in enumerate(sizes.tolist())
    ]


def hand_out(piece: memoryview, root: int) -> None:
    """The root's bytes into everybody's writable memory of the same size."""
    if dist.is_initialized() and len(piece):
        dist.broadcast(torch.frombuffer(piece, dtype=torch.uint8), src=root)
