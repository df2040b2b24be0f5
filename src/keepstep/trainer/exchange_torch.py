"""Exchange: runs of bytes between the ranks of the default group. Never pickle."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name before and after torch 2.13."""
_kept: deque[Tensor] = deque(maxlen=4)
"""What was exchanged last, but for bulk.

gloo's own thread lets go of a tensor a moment after the call has returned. Were it the last to hold it, it would need
the interpreter's lock for that, and in the interpreter's last moments that ends the process with ``terminate called
without an active exception``.
"""


def _keep(tensor: Tensor) -> Tensor:
    """Hold a small tensor for a while that is about to be exchanged."""
    _kept.append(tensor)
    return tensor


def everybody(good: bool) -> bool:
    """Whether it is so on all ranks; nobody goes on before all have come."""
    if not dist.is_initialized():
        return good
    count = _keep(torch.tensor([0 if good else 1], dtype=torch.int64))
    dist.all_reduce(count)
    return int(count) == 0


def gather(value: Any) -> list[Any]:
    """Each rank's value (what msgpack can hold) on every rank, by rank."""
    data = msgspec.msgpack.encode(value)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [msgspec.msgpack.decode(data)]
    sizes = _keep(torch.zeros(dist.get_world_size(), dtype=torch.int64))
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)
    room = int(sizes.max())
    mine = _keep(torch.frombuffer(bytearray(data).ljust(room, b"\0"), dtype=torch.uint8))
    every = bytearray(room * len(sizes))
    _gather(_keep(torch.frombuffer(every, dtype=torch.uint8)), mine)
    return [
        msgspec.msgpack.decode(memoryview(every)[number * room : number * room + size])
        for number, size in enumerate(sizes.tolist())
    ]


def hand_out(piece: memoryview, root: int) -> None:
    """The root's bytes into everybody's writable memory of the same size."""
    if dist.is_initialized() and len(piece):
        dist.broadcast(torch.frombuffer(piece, dtype=torch.uint8), src=root)
