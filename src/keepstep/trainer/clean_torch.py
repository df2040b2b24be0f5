"""Clean: after a change of ranks amid a fault, everybody goes back to the copy that survivors kept from before it.

What was in memory when a machine was taken out for corrupting may hold its corruption, and so may what its successor
was given. The copies that survivors keep in their own memory are older: one of them hands its own to those who have
none. The random state of a rank that was replaced is not among them; it goes on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from keepstep.checkpoint.slot import TensorEntry
from keepstep.trainer.exchange_torch import gather, hand_out
from keepstep.trainer.kept_torch import Kept
from keepstep.trainer.state_torch import State


def holders(step: int | None) -> tuple[int, ...]:
    """Ranks that hold a clean copy of the one same step; none where there is no such step. Collective.

    Args:
        step: of this rank's clean copy; ``None`` where it has none, or needs none.
    """
    rows: Sequence[int | None] = gather(step)
    held = {row for row in rows if row is not None}
    return tuple(rank for rank, row in enumerate(rows) if row is not None) if len(held) == 1 else ()


def come_back(kept: Kept, state: State, ranks: Sequence[int], rank: int) -> int:
    """Make the state of all ranks the holders' copy; returns its step. Collective; state is the same on all ranks."""
    if rank in ranks:
        kept.put_back(state)
    root = ranks[0]
    told: list[object] = gather([kept.step, len(state.plain(with_random=False))] if rank == root else [0, 0])[root]
    step, size = (int(str(one)) for one in told)
    plain = bytearray(state.plain(with_random=False) if rank == root else bytes(size))
    hand_out(memoryview(plain), root)
    lives = [*state.shards(), *state.buffers()]
    arrived: dict[str, torch.Tensor] = {}
    for one in lives:
        tensor = one.tensor.detach().clone() if rank == root else torch.empty_like(one.tensor)
        if tensor.numel():
            dist.broadcast(tensor, src=root)
        arrived[one.name] = tensor
    if rank not in ranks:
        entries = tuple(
            TensorEntry(
                one.name, str(one.tensor.dtype).removeprefix("torch."), tuple(one.tensor.shape), 0, one.tensor.nbytes,
                one.like, one.tensor.device.type,
            )
            for one in lives
        )  # fmt: skip
        state.put_back(entries, lambda entry: arrived[entry.name], bytes(plain), shards=True)
    return step
