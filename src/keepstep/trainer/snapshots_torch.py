"""Snapshots: writes the registered state into this rank's slots at each commit, and reads a slot back.

Tensors are copied straight into mapped memory. The destination views are kept from step to step, so that a step in
which nothing was replaced costs one grouped copy.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import SlotInvalid
from keepstep.checkpoint.slot import Description, Slot, TensorEntry, Version, lay_out
from keepstep.trainer.state_torch import Live, State

PRIVATE = "p"


def view(slot: Slot, entry: TensorEntry) -> Tensor:
    """The tensor's bytes in the mapping, as a tensor; valid until the slot is mapped anew."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.offset + entry.nbytes > slot.size:
        raise SlotInvalid(f"{slot.path}: tensor {entry.name} lies outside the file")
    raw = torch.frombuffer(slot.memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return raw.view(dtype).reshape(entry.shape)


class _Writer:
    """One slot with its prepared destinations."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._for: list[Live] | None = None
        self._signature: list[tuple[str, torch.dtype, torch.Size]] = []
        self._memory: object = None
        self._entries: tuple[TensorEntry, ...] = ()
        self._targets: list[Tensor] = []
        self._end = 0

    def write(
        self, version: Version, shards: list[Live], buffers: list[Live], plain: bytes, key: str, full: bool
    ) -> None:
        self.slot.begin()
        lives = shards + buffers
        self._prepare(shards, lives)
        with torch.no_grad():
            if lives:
                torch._foreach_copy_(self._targets, [live.tensor for live in lives])
        description = Description(tensors=self._entries, plain=plain, key=key, full=full)
        self.slot.complete(version, self._end, description)

    def _prepare(self, shards: list[Live], lives: list[Live]) -> None:
        buffers = [(b.name, b.tensor.dtype, b.tensor.shape) for b in lives[len(shards) :]]
        if shards is self._for and buffers == self._signature and self.slot.memory is self._memory:
            return
        offsets, self._end = lay_out([live.tensor.nbytes for live in lives])
        self._entries = tuple(
            TensorEntry(
                live.name,
                str(live.tensor.dtype).removeprefix("torch."),
                tuple(live.tensor.shape),
                offset,
                live.tensor.nbytes,
                live.like,
                live.tensor.device.type,
            )
            for live, offset in zip(lives, offsets, strict=True)
        )
        self.slot.grow(self._end)
        self._targets = [view(self.slot, entry) for entry in self._entries]
        self._for, self._signature, self._memory = shards, buffers, self.slot.memory


class Snapshots:
    """This rank's versions on this node.

    Args:
        keeper: the keeper's datagram socket; it is told of each new full version.
    """

    def __init__(self, directory: Path, rank: int, keeper: Path) -> None:
        self._directory, self._rank, self._keeper = directory, rank, keeper
        self._full = pair.Pair(directory, rank)
        self._private: pair.Pair | None = None
        self._writers: dict[Path, _Writer] = {}
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.setblocking(False)
        self._newest: tuple[Slot, int] | None = None

    def save(self, state: State, version: Version, *, key: str, full: bool, ring: bool) -> None:
        """Write one version. Without ``full`` only the private part: buffers, random states, data position."""
        target = self._full if full else self._private_pair()
        slot = target.slots[target.target(version.step)]
        writer = self._writers.setdefault(slot.path, _Writer(slot))
        writer.write(version, state.shards() if full else [], state.buffers(), state.plain(), key, full)
        if full:
            self._newest = (slot, version.step)
            if ring:
                self._ring(version.step)

    def replicated(self) -> bool:
        """Whether another node holds a verified copy of the newest full version; reads memory, asks nobody."""
        if self._newest is None:
            return True
        slot, step = self._newest
        held = slot.version
        return held is None or held.step != step or slot.acked == step  # a rolled-back version needs no copy

    def full(self) -> tuple[Version, ...]:
        return self._full.versions()

    def private(self) -> frozenset[Version]:
        """Versions of which at least the private part is here."""
        found = self._private.versions() if self._private else tuple(v for v, _ in self._look_private())
        return frozenset(self._full.versions() + found)

    def load(self, state: State, version: Version, *, shards: bool) -> None:
        """Put a version back into the live objects. Raises ``SlotInvalid`` when it is not (or no longer) sound."""
        slot = self._find(version, shards)
        try:
            self._check(slot, version)
            description = slot.describe()
            if shards and not description.full:
                raise SlotInvalid(f"{slot.path}: holds only the private part of step {version.step}")
            serial = slot.serial
            state.put_back(description.tensors, lambda entry: view(slot, entry), description.plain, shards=shards)
            if slot.serial != serial:
                raise SlotInvalid(f"{slot.path}: was overwritten while it was read")
        finally:
            if slot not in (*self._full.slots, *(self._private.slots if self._private else ())):
                slot.close()

    def describe(self, version: Version) -> Description:
        """The description of a full version."""
        slot = self._full.find(version)
        if slot is None:
            raise SlotInvalid(f"rank {self._rank}: step {version.step} is not here")
        return slot.describe()

    def forget_after(self, version: Version) -> None:
        """Versions of a future that has been rolled back must never be resumed from."""
        for kept in (self._full, self._private):
            if kept is not None:
                kept.forget_after(version)

    def forget_all(self) -> None:
        self._full.forget_all()
        if self._private is not None or self._look_private():
            self._private_pair().forget_all()

    def _private_pair(self) -> pair.Pair:
        if self._private is None:
            self._private = pair.Pair(self._directory, self._rank, PRIVATE)
        return self._private

    def _look_private(self) -> Sequence[tuple[Version, Path]]:
        return pair.look(self._directory, self._rank, PRIVATE)

    def _find(self, version: Version, shards: bool) -> Slot:
        if (slot := self._full.find(version)) is not None:
            return slot
        if not shards:
            if self._private is not None and (slot := self._private.find(version)) is not None:
                return slot
            for found, path in self._look_private():
                if found == version:
                    return Slot(path)
        raise SlotInvalid(f"rank {self._rank}: step {version.step} is not in {self._directory}")

    def _check(self, slot: Slot, version: Version) -> None:
        slot.refresh()
        if slot.version != version:
            raise SlotInvalid(f"{slot.path}: holds {slot.version}, not {version}")

    def _ring(self, step: int) -> None:
        # The keeper may be on its way back; it looks by itself when it starts.
        with contextlib.suppress(OSError):
            self._bell.sendto(f"{self._rank} {step}".encode(), str(self._keeper))
