"""Writer: one slot with everything prepared to copy the registered state into it, and a version on its way there.

Destinations and chunks are kept from step to step, so that a step in which nothing was replaced costs the copy alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from keepstep.checkpoint.exceptions import SlotInvalid
from keepstep.checkpoint.slot import Description, Slot, TensorEntry, Version, lay_out
from keepstep.trainer.copier_torch import Chunk, Copier, Job, plan, runs
from keepstep.trainer.device_torch import Device, DeviceJob
from keepstep.trainer.state_torch import Live, State

Owners = frozenset[int]
"""``id`` of each optimizer that changes a tensor; empty where none of the registered ones does."""


def view(slot: Slot, entry: TensorEntry) -> Tensor:
    """The tensor's bytes in the mapping, as a tensor; valid until the slot is mapped anew."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.offset + entry.nbytes > slot.size:
        raise SlotInvalid(f"{slot.path}: tensor {entry.name} lies outside the file")
    raw = torch.frombuffer(slot.memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return raw.view(dtype).reshape(entry.shape)


def owners_of(state: State) -> Callable[[Live], Owners]:
    """Who changes each of the state's tensors between two commits."""
    parameters: dict[int, set[int]] = {}
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameters.setdefault(id(parameter), set()).add(id(optimizer))
    named = {name: frozenset(parameters.get(id(parameter), ())) for name, parameter in state.bound()}
    optimizers = {name: frozenset({id(optimizer)}) for name, optimizer in state.optimizers.items()}

    def owners(live: Live) -> Owners:
        if live.name.startswith("o/"):
            return optimizers.get(live.name.split("/", 2)[1], frozenset())
        return named.get(live.name, frozenset())

    return owners


def changes(tensors: Sequence[Tensor]) -> int:
    """Grows whenever torch changes one of these in place."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)


class _Part:
    """Tensors of the same owners."""

    def __init__(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        device = [(t, s) for t, s in zip(targets, sources, strict=True) if s.device.type != "cpu"]
        host = [(t, s) for t, s in zip(targets, sources, strict=True) if s.device.type == "cpu"]
        found, odd = runs([t for t, _ in host], [s for _, s in host])
        self.chunks: list[Chunk] = plan(found, odd)
        self.sources, self.device = sources, device


class Writer:
    """One slot with its prepared copy.

    Args:
        device: for tensors that are not in host memory.
    """

    def __init__(self, slot: Slot, copier: Copier, device: Device) -> None:
        self.slot = slot
        self._copier, self._device = copier, device
        self._for: list[Live] | None = None
        self._signature: list[tuple[str, torch.dtype, torch.Size]] = []
        self._pointers: list[int] = []
        self._memory: object = None
        self._pinned = 0
        self._entries: tuple[TensorEntry, ...] = ()
        self._parts: dict[Owners, _Part] = {}
        self._buffers: _Part = _Part([], [])
        self._buffer_targets: list[Tensor] = []
        self._end = 0
        self._bytes = 0
        self._body = b""

    def prepare(
        self, shards: list[Live], buffers: list[Live], owners: Callable[[Live], Owners], description: Description
    ) -> None:
        """Take the slot's version away and make ready for this one.

        Args:
            description: of the version, but for the tensors, which are found here.
        """
        self.slot.begin()
        signature = [(live.name, live.tensor.dtype, live.tensor.shape) for live in buffers]
        pointers = [live.tensor.data_ptr() for live in shards]
        known = shards is self._for and signature == self._signature and pointers == self._pointers
        if not known:
            self._arrange([*shards, *buffers])
        whole = msgspec.structs.replace(description, tensors=self._entries)
        self._body = self.slot.make_room(self._end, whole)
        if not known or self.slot.memory is not self._memory:
            self._aim(shards, owners)
            self._for, self._signature, self._pointers = shards, signature, pointers
        self._buffers = _Part(self._buffer_targets, [live.tensor for live in buffers])

    def _arrange(self, lives: list[Live]) -> None:
        self._for = None
        offsets, self._end = lay_out([live.tensor.nbytes for live in lives])
        self._entries = tuple(_entry(live, offset) for live, offset in zip(lives, offsets, strict=True))
        self._bytes = sum(live.tensor.nbytes for live in lives)

    def _aim(self, shards: list[Live], owners: Callable[[Live], Owners]) -> None:
        """Find every tensor's place in the mapping and cut the copy into chunks."""
        self._pin_if(any(entry.device != "cpu" for entry in self._entries))
        targets = [view(self.slot, entry) for entry in self._entries]
        groups: dict[Owners, tuple[list[Tensor], list[Tensor]]] = {}
        for live, target in zip(shards, targets, strict=False):
            to, start = groups.setdefault(owners(live), ([], []))
            to.append(target)
            start.append(live.tensor)
        self._parts = {who: _Part(*pair) for who, pair in groups.items()}
        self._buffer_targets = targets[len(shards) :]
        self._memory = self.slot.memory

    def _pin_if(self, needed: bool) -> None:
        if not needed:
            return
        if self._pinned:
            self._device.unpin(self._pinned)
        address = torch.frombuffer(self.slot.memory, dtype=torch.uint8, count=1).data_ptr()
        self._pinned = address if self._device.pin(address, self.slot.size) else 0

    # ---------------------------------------------------------------- copying

    def copy(self, *, owned: bool = True) -> None:
        """Copy now: everything, or only what no optimizer owns."""
        parts = [part for who, part in self._parts.items() if owned or not who]
        parts.append(self._buffers)
        device = [pair for part in parts for pair in part.device]
        job = self._device.start(device) if device else None
        self._copier.run([chunk for part in parts for chunk in part.chunks], self._bytes)
        if job is not None:
            job.wait()

    def depart(self) -> list[tuple[Owners, Job | DeviceJob]]:
        """Begin to copy what optimizers own; the jobs end when somebody helps them, or by the device."""
        jobs: list[tuple[Owners, Job | DeviceJob]] = []
        for who, part in self._parts.items():
            if who and part.device:
                jobs.append((who, self._device.start(part.device)))
            if who and part.chunks:
                jobs.append((who, Job(part.chunks, _unchanged(part.sources))))
        return jobs

    def complete(self, version: Version) -> None:
        self.slot.complete(version, self._end, self._body)


def _unchanged(sources: list[Tensor]) -> Callable[[], bool]:
    before = changes(sources)
    return lambda: changes(sources) == before


def _entry(live: Live, offset: int) -> TensorEntry:
    tensor = live.tensor
    return TensorEntry(
        live.name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        offset,
        tensor.nbytes,
        live.like,
        tensor.device.type,
        live.global_shape,
        live.corner,
        live.primary,
    )


class Flight:
    """A version whose copy goes on beside training.

    Args:
        arrive: makes the version count; called once, on whatever thread copies last.
        cancel: called instead when a tensor was changed under the copy.
    """

    def __init__(
        self,
        version: Version,
        jobs: Iterable[tuple[Owners, Job | DeviceJob]],
        arrive: Callable[[], None],
        cancel: Callable[[], None],
    ) -> None:
        self.version = version
        self.error: Exception | None = None
        self.intact = True
        self._jobs = tuple(jobs)
        self._arrive, self._cancel = arrive, cancel
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def run(self) -> None:
        """Copy to the end; for the helper thread."""
        try:
            for _, job in self._jobs:
                job.wait()
            self.intact = all(job.intact for _, job in self._jobs)
            (self._arrive if self.intact else self._cancel)()
        except Exception as error:
            self.error = error
        finally:
            self._over.set()

    def before(self, optimizer: int) -> bool:
        """Wait until this optimizer's tensors are copied, taking part in that; true if there was anything to do."""
        waited = False
        for owners, job in self._jobs:
            if optimizer not in owners or job.done:
                continue
            if isinstance(job, DeviceJob):
                job.hold()
            else:
                waited = True
                job.settle()
        return waited

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the version counts (or has failed), taking part in the copy."""
        for _, job in self._jobs:
            if isinstance(job, Job):
                job.help()
        return self._over.wait(timeout_s)
