"""Kept: a copy of the registered state in this process's memory, to go back to when what came after it is wrong.

Snapshots are for lost processes: there are two, a step apart, and both may hold what a fault has spoilt. This copy is
older, and it was taken only where losses and gradients were in order and the replicas agreed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepstep.checkpoint.slot import TensorEntry
from keepstep.trainer.exceptions import GuardStopped
from keepstep.trainer.fingerprint_torch import Hasher
from keepstep.trainer.pieces_torch import Live
from keepstep.trainer.state_torch import State


class Kept:
    """One copy; a new one is written over the old, which costs no new memory.

    Args:
        hasher: of this process.
    """

    def __init__(self, hasher: Hasher) -> None:
        self._hasher = hasher
        self._entries: tuple[TensorEntry, ...] = ()
        self._held: dict[str, Tensor] = {}
        self._prints: list[int] = []
        self._plain = b""
        self.step: int | None = None
        """Steps committed in the state that is kept; ``None`` for none."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def take(self, state: State, step: int) -> None:
        """Keep the state as it is now, as ``step`` committed steps have left it."""
        self.step = None  # whatever ends this half-way leaves nothing to go back to
        lives = [*state.shards(), *state.buffers()]
        before, self._held = self._held, {}
        for one in lives:
            old = before.get(one.name)
            same = old is not None and old.shape == one.tensor.shape and old.dtype == one.tensor.dtype
            self._held[one.name] = old if same and old is not None else _room(one.tensor)
        torch._foreach_copy_([self._held[one.name] for one in lives], [one.tensor for one in lives])
        self._entries = tuple(_entry(one) for one in lives)
        self._plain = state.plain()
        self._prints = self._hasher.each([self._held[one.name] for one in lives])
        self.step = step

    def put_back(self, state: State) -> int:
        """Make the live state equal to the copy; returns its step.

        Raises:
            AssertionError: nothing is kept.
            GuardStopped: the copy is not what was kept: this host's memory has changed it.
        """
        assert self.step is not None
        if self._hasher.each([self._held[entry.name] for entry in self._entries]) != self._prints:
            raise GuardStopped(
                f"the copy of step {self.step} in this process's memory has changed since it was taken; nothing was "
                f"put back, start the job again from a durable checkpoint"
            )
        state.put_back(self._entries, lambda entry: self._held[entry.name], self._plain, shards=True)
        return self.step

    def forget(self) -> None:
        """It is of another epoch; the memory stays for the next one."""
        self.step = None


def _room(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


def _entry(one: Live) -> TensorEntry:
    tensor = one.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(one.name, dtype, tuple(tensor.shape), 0, tensor.nbytes, one.like, tensor.device.type)
