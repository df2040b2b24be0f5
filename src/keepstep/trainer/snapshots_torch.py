"""Snapshots: writes the registered state into this rank's slots at each commit, and reads a slot back.

A copy is either done before the commit returns (*blocking*), or goes on in a helper thread while the next step
computes (*overlapped*): an optimizer then waits, before it changes anything, until its own tensors are copied. Either
way a version counts only once every byte of it is there.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch.optim import Optimizer

from keepstep.checkpoint import config as settings
from keepstep.checkpoint import pair
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import SlotDamaged, SlotInvalid
from keepstep.checkpoint.notes import Note, Teller
from keepstep.checkpoint.slot import Description, Slot, Version
from keepstep.model.env import ARCHIVER_SOCKET
from keepstep.trainer.checked_torch import Checked
from keepstep.trainer.copier_torch import Copier
from keepstep.trainer.device_torch import Device
from keepstep.trainer.pins import Pins
from keepstep.trainer.state_torch import Live, State
from keepstep.trainer.writer_torch import Flight, Owners, Writer, owners_of, view

PRIVATE = "p"
EXIT_WAIT_S = 60.0
"""How long the end of the process waits for a copy under way."""
OVERLAP_FROM = 8 * 1024 * 1024
"""Bytes below which a copy is always blocking: there is nothing to gain beside the next step."""
DESCRIPTION_SHARE = 0.01
"""Room for a version's description, as a share of its tensors, when files are made before the first step."""


class Snapshots:
    """This rank's versions on this node.

    Args:
        keeper: the keeper's datagram socket, in the node's directory; it is told of each new full version.
        config: the engine's settings; those of the node's directory where left out.
    """

    def __init__(self, directory: Path, rank: int, keeper: Path, config: CheckpointConfig | None = None) -> None:
        self._directory, self._rank, self._keeper = directory, rank, keeper
        self.config = config or settings.read(keeper.parent)
        self.archiver = keeper.parent / ARCHIVER_SOCKET
        self.notes = Teller(keeper.parent)
        self._full = pair.Pair(directory, rank, files=pair.PINNABLE if self.config.durable else pair.FILES)
        self.pins = Pins(self._full, rank, self.config, self.notes, functools.partial(self.ring, self.archiver))
        self._private: pair.Pair | None = None
        self._writers: dict[Path, Writer] = {}
        self._copier, self._device = Copier(), Device()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._bell.setblocking(False)
        self._newest: tuple[Slot, int] | None = None
        self._flight: Flight | None = None
        self._problem: Exception | None = None
        self._trusted = True
        self.whole = True
        """The newest full version that was due is here, or on its way here."""
        self.keeper_away = False
        """Nobody heard the last ring for this node's keeper."""
        self._owners: Callable[[Live], Owners] | None = None
        self._replicated: bool | None = None
        self.overlap_from = OVERLAP_FROM
        self.waited_s = 0.0
        """What this process has waited for snapshots so far."""
        self.copied_s: float | None = None
        """How long the last blocking copy of a full version took; ``None`` when it was not one."""
        atexit.register(_settle_at_exit, weakref.ref(self), os.getpid())

    # ---------------------------------------------------------------- before the first step

    def watch(self, state: State) -> None:
        """Let each registered optimizer wait for its own tensors; once, when everything is bound."""
        self._owners, self._replicated = owners_of(state), state.replicated
        for optimizer in state.optimizers.values():
            optimizer.register_step_pre_hook(self._before_step)

    def reserve(self, version_bytes: int, *, later: bool = False) -> None:
        """Make this rank's files as large as a version will be and touch every page of them.

        Args:
            later: do it beside what comes next, for a process that others wait for.
        """
        size = int(version_bytes * (1 + DESCRIPTION_SHARE))
        missing = [slot for slot in self._full.slots if slot.version is None]

        def touch() -> None:
            self._copier.run([functools.partial(slot.reserve, size) for slot in missing], size)

        if not later:
            touch()
            return
        self.settle()
        self._flight = Flight(Version(-1, -1), (), touch, _nothing)
        self._copier.give(self._flight.run)

    # ---------------------------------------------------------------- writing

    def save(
        self,
        state: State,
        version: Version,
        *,
        key: str,
        full: bool,
        ring: bool,
        world_size: int = 1,
        overlap: bool = False,
        pin: bool = False,
    ) -> None:
        """Write one version. Without ``full`` only the private part: buffers, random states, data position.

        Args:
            ring: tell the keeper, which adds checksums and copies it to another node.
            overlap: come back at once and copy beside the next step, where that is safe.
            pin: hold the version for the durable tiers.
        """
        began = time.perf_counter()
        self.settle()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        self.whole = self.whole and not full  # until it is: a failure below leaves this rank without the version
        shards, buffers = (state.shards() if full else []), state.buffers()
        replicated = state.replicated if self._replicated is None else self._replicated  # asking walks all modules
        description = Description(plain=state.plain(), key=key, full=full, world_size=world_size, replicated=replicated)
        overlap = overlap and full and self._may_overlap(state, shards)
        if overlap and replicated:
            # A rank that is killed in mid-copy has its own numbers at least; the rest it finds at any live rank.
            self._write(self._private_pair(), version, [], buffers, msgspec.structs.replace(description, full=False))
        target = self._full if full else self._private_pair()
        if not overlap:
            slot = self._write(target, version, shards, buffers, description)
            if full:
                self._newest = slot, version.step
                self._arrived(slot, version, ring=ring, pin=pin)
        else:
            self._depart(version, shards, buffers, description, ring=ring, pin=pin)
        self.whole = self.whole or full
        self.waited_s += time.perf_counter() - began

    def _write(
        self, target: pair.Pair, version: Version, shards: list[Live], buffers: list[Live], description: Description
    ) -> Slot:
        writer = self._writer(target.slots[target.target(version.step)])
        writer.prepare(shards, buffers, self._owners or _nobody, description)
        began = time.perf_counter()
        writer.copy()
        if shards:
            self.copied_s = time.perf_counter() - began
        writer.complete(version)
        return writer.slot

    def _depart(
        self,
        version: Version,
        shards: list[Live],
        buffers: list[Live],
        description: Description,
        *,
        ring: bool,
        pin: bool,
    ) -> None:
        slot = self._full.slots[self._full.target(version.step)]
        writer = self._writer(slot)
        writer.prepare(shards, buffers, self._owners or _nobody, description)

        def arrive() -> None:
            writer.complete(version)
            self._arrived(slot, version, ring=ring, pin=pin)

        writer.copy(owned=False)  # before the others: a device would have to copy those first
        jobs = writer.depart()
        self.copied_s = None
        self._newest = slot, version.step
        self._flight = Flight(version, jobs, arrive, slot.invalidate)
        self._copier.give(self._flight.run)

    def _may_overlap(self, state: State, shards: Sequence[Live]) -> bool:
        if not (self._trusted and state.provable and self._owners is not None):
            return False
        return sum(live.tensor.nbytes for live in shards) >= self.overlap_from

    def _writer(self, slot: Slot) -> Writer:
        if slot.path not in self._writers:
            self._writers[slot.path] = Writer(slot, self._copier, self._device)
        return self._writers[slot.path]

    def _arrived(self, slot: Slot, version: Version, *, ring: bool, pin: bool) -> None:
        """A full version counts from now on; on whatever thread that is."""
        if pin:
            self.pins.pin(slot, version)
        if ring:
            self.ring(self._keeper, version.step)

    # ---------------------------------------------------------------- a copy beside the next step

    def settle(self, timeout_s: float | None = None) -> None:
        """Finish the copy that is under way, if there is one; never raises. What went wrong is for ``save`` to say."""
        flight = self._flight
        if flight is None or not flight.wait(timeout_s):
            return
        self._flight = None
        self._problem = flight.error or self._problem
        self.whole = self.whole and flight.intact and flight.error is None
        if not flight.intact and self._trusted:
            self._trusted = False
            print(
                f"keepstep: rank {self._rank}: parameters were changed after the commit of step {flight.version.step} "
                f"and before an optimizer's step; that snapshot is dropped, and later ones are taken before the commit "
                f"returns. Change parameters before step.commit() to have them copied beside the next step",
                file=sys.stderr,
                flush=True,
            )

    def await_copy(self) -> None:
        """As ``settle``, counted as waiting."""
        if self._flight is not None:
            began = time.perf_counter()
            self.settle()
            self.waited_s += time.perf_counter() - began

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        flight = self._flight
        if flight is None or flight.over:
            return
        began = time.perf_counter()
        if flight.before(id(optimizer)):
            self.waited_s += time.perf_counter() - began

    # ---------------------------------------------------------------- other holders

    def replicated(self) -> bool:
        """Whether another node holds a verified copy of the newest full version; reads memory, asks nobody."""
        if self._newest is None:
            return True
        flight = self._flight
        if flight is not None and not flight.over:
            return False
        slot, step = self._newest
        held = slot.version
        return held is None or held.step != step or slot.acked == step  # a rolled-back version needs no copy

    def lag(self) -> tuple[int, int]:
        """Step of the newest full version, and of the newest that another node holds; -1 for none."""
        newest = self._newest[1] if self._newest is not None else -1
        return newest, max((slot.acked for slot in self._full.slots if slot.version is not None), default=-1)

    # ---------------------------------------------------------------- reading

    def full(self) -> tuple[Version, ...]:
        self.settle()
        return self._full.versions()

    def private(self) -> frozenset[Version]:
        """Versions of which at least the private part is here."""
        found = self._private.versions() if self._private else tuple(v for v, _ in self._look_private())
        return frozenset(self.full() + found)

    def load(self, state: State, version: Version, *, shards: bool) -> None:
        """Put a version back into the live objects.

        Raises:
            SlotInvalid: it is not (or no longer) sound. A damaged one is not offered again.
        """
        self.settle()
        slot = self._find(version, shards)
        try:
            self._load(slot, state, version, shards)
        except SlotDamaged as error:
            self.notes.tell(Note(what="damaged", tier="memory", step=version.step, rank=self._rank, why=str(error)))
            slot.invalidate()
            raise
        else:
            if shards and slot in self._full.slots:
                # The next step waits for the copy of this one like for any other; it may be missing still.
                self._newest = slot, version.step
                self.ring(self._keeper, version.step)
        finally:
            if slot not in (*self._full.slots, *(self._private.slots if self._private else ())):
                slot.close()

    def _load(self, slot: Slot, state: State, version: Version, shards: bool) -> None:
        self._check(slot, version)
        description = slot.describe()
        if shards and not description.full:
            raise SlotInvalid(f"{slot.path}: holds only the private part of step {version.step}")
        serial = slot.serial
        checked = Checked(slot, slot.table() if slot.sealed else None, self._copier)
        checked.check([entry for entry in description.tensors if entry.name[0] == "b"])
        state.put_back(
            description.tensors,
            lambda entry: view(slot, entry),
            description.plain,
            shards=shards,
            copy=checked.copy,
        )
        if slot.serial != serial:
            raise SlotInvalid(f"{slot.path}: was overwritten while it was read")

    def describe(self, version: Version) -> Description:
        """The description of a full version."""
        self.settle()
        slot = self._full.find(version)
        if slot is None:
            raise SlotInvalid(f"rank {self._rank}: step {version.step} is not here")
        return slot.describe()

    def forget_after(self, version: Version) -> None:
        """Versions of a future that has been rolled back must never be resumed from. All ranks have ``version``."""
        self.settle()
        self.whole = True
        for kept in (self._full, self._private):
            if kept is not None:
                kept.forget_after(version)
        self.ring(self._keeper, version.step)  # it may have taken what is gone now for the newest, and be content

    def forget_newest(self) -> None:
        """Some rank lacks the newest version, so no world goes on from it: where it is, the next one shall take its
        place, and not that of the version before, from which all still can."""
        held = self.full()
        if self.whole and len(held) > 1:
            self._full.forget_after(held[1])
            self._newest = None
            self.ring(self._keeper, held[1].step)

    def forget_all(self) -> None:
        self.settle()
        self.whole = True
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

    def ring(self, to: Path, step: int) -> None:
        """Say to a helper of this node that there is something of this step for it."""
        # Whoever listens there may be on its way back; it looks by itself when it starts.
        away = False
        try:
            self._bell.sendto(f"{self._rank} {step}".encode(), str(to))
        except OSError as error:
            away = not isinstance(error, BlockingIOError)  # its queue is full, so it has one
        if to == self._keeper:
            self.keeper_away = away


def _nobody(_: Live) -> Owners:
    return frozenset()


def _nothing() -> None:
    pass


def _settle_at_exit(snapshots: weakref.ReferenceType[Snapshots], pid: int) -> None:
    """Not in a child that the script has forked: it has the copy's books, but neither its thread nor its right."""
    if os.getpid() == pid and (found := snapshots()) is not None:
        found.settle(EXIT_WAIT_S)
