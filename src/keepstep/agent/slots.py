"""What this node runs, and how a restarted agent finds it again.

One file, ``slots.json`` in the node directory, replaced atomically at each change: the slots with pid and start time,
orders already carried out, the count of standbys. It is written *before* a process is asked for, so that no process
can exist that no agent knows of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from keepstep.agent import proc
from keepstep.agent.exceptions import BadConfig
from keepstep.agent.files import write_atomic
from keepstep.model.facts import SlotState, UserError, WorkerExited
from keepstep.model.ids import ActionId, Epoch, Rank, SlotId

FILE = "slots.json"
KEPT_ACTIONS = 1000
"""Orders remembered as carried out; the controller repeats only those of the newest epoch."""
KEPT_ENDED = 2000
"""Names of slots that ended, remembered so that none is started twice."""

Role = Literal["worker", "standby", "store", "keeper", "archiver"]


class Slot(Struct, kw_only=True):
    """One process. ``pid`` 0: asked for, answer not yet heard."""

    id: SlotId
    role: Role
    out: str
    err: str
    error_file: str = ""
    out_from: int = 0
    """Bytes of ``out`` before this process: one that had the rank before it may have written into the same file."""
    err_from: int = 0
    pid: int = 0
    start: int = 0
    rank: Rank | None = None
    local_rank: int = 0
    epoch: Epoch = Epoch(0)
    attached: bool = False
    parked: bool = False
    resumed: Epoch = Epoch(0)
    """Newest epoch in which the rank said that it holds the agreed state."""
    done: bool = False
    doomed: bool = False
    """The agent itself ended it: its exit is no new fault."""
    why_ended: str = ""
    """Why the agent ended it, where that is a fault of the process."""
    failure: UserError | None = None

    @property
    def is_program(self) -> bool:
        """Runs the user's script."""
        return self.role in ("worker", "standby")

    def alive(self) -> bool:
        return self.pid > 0 and proc.is_alive(self.pid, self.start)

    def state(self) -> SlotState:
        role: Literal["worker", "standby"] = "standby" if self.role == "standby" else "worker"
        return SlotState(slot=self.id, pid=self.pid, role=role, rank=self.rank, epoch=self.epoch, parked=self.parked)


class _Saved(Struct, kw_only=True):
    slots: dict[SlotId, Slot] = {}
    next_number: int = 0
    standbys: int = 0
    actions: dict[ActionId, str] = {}
    ended: dict[SlotId, Epoch] = {}
    peer_port: int = 0
    stores: list[int] = []
    used_store: int = 0
    first_fault: WorkerExited | None = None


class Table:
    """The slots of this node. Every change is on disk when the method returns."""

    def __init__(self, node_dir: Path) -> None:
        self._path = node_dir / FILE
        self._saved = _Saved()

    def load(self) -> bool:
        """Read what an earlier agent left; ``False`` when there was none."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return False
        try:
            self._saved = msgspec.json.decode(data, type=_Saved)
        except msgspec.DecodeError as error:
            raise BadConfig(f"{self._path} is not a slot table of this version: {error}") from error
        return True

    def save(self) -> None:
        write_atomic(self._path, msgspec.json.encode(self._saved))

    # ------------------------------------------------------------ slots

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._saved.slots.values()))

    def __contains__(self, slot: object) -> bool:
        return slot in self._saved.slots

    def get(self, slot: SlotId) -> Slot | None:
        return self._saved.slots.get(slot)

    def add(self, slot: Slot) -> None:
        self._saved.slots[slot.id] = slot
        self.save()

    def remove(self, slot: SlotId) -> None:
        gone = self._saved.slots.pop(slot, None)
        if gone is not None:
            self.mark_ended(slot, gone.epoch)

    def mark_ended(self, slot: SlotId, epoch: Epoch) -> None:
        """Its end is reported as one of this epoch."""
        self._saved.ended[slot] = epoch
        while len(self._saved.ended) > KEPT_ENDED:
            del self._saved.ended[next(iter(self._saved.ended))]
        self.save()

    def end_of(self, slot: SlotId) -> Epoch | None:
        """The epoch in which its end was reported; ``None`` while it has not ended."""
        return self._saved.ended.get(slot)

    def forget(self, slot: SlotId) -> None:
        """Of a slot that was never started: its name may be used."""
        self._saved.slots.pop(slot, None)
        self.save()

    def has_ended(self, slot: SlotId) -> bool:
        return slot in self._saved.ended

    def workers(self) -> list[Slot]:
        return [s for s in self if s.role == "worker"]

    def standbys(self) -> list[Slot]:
        return [s for s in self if s.role == "standby"]

    def new_name(self, prefix: str) -> SlotId:
        """A name that no process of this job on this node has had."""
        name = SlotId(f"{prefix}{self._saved.next_number}")
        self._saved.next_number += 1
        self.save()
        return name

    # ------------------------------------------------------------ orders and settings

    def outcome(self, action: ActionId) -> str | None:
        """``""`` when it was carried out, the reason when it failed, ``None`` when it is new."""
        return self._saved.actions.get(action)

    def remember(self, action: ActionId, outcome: str) -> None:
        self._saved.actions[action] = outcome
        while len(self._saved.actions) > KEPT_ACTIONS:
            del self._saved.actions[next(iter(self._saved.actions))]
        self.save()

    @property
    def wanted_standbys(self) -> int:
        return self._saved.standbys

    @wanted_standbys.setter
    def wanted_standbys(self, count: int) -> None:
        self._saved.standbys = count
        self.save()

    @property
    def first_fault(self) -> WorkerExited | None:
        """The first exit of a worker here that was a fault: the culprit that exit.json names."""
        return self._saved.first_fault

    @first_fault.setter
    def first_fault(self, fact: WorkerExited | None) -> None:
        self._saved.first_fault = fact
        self.save()

    @property
    def peer_port(self) -> int:
        return self._saved.peer_port

    @peer_port.setter
    def peer_port(self, port: int) -> None:
        self._saved.peer_port = port
        self.save()

    @property
    def stores(self) -> list[int]:
        """Ports of stores that were reported and that no epoch has used yet."""
        return self._saved.stores

    @stores.setter
    def stores(self, ports: list[int]) -> None:
        self._saved.stores = ports
        self.save()

    @property
    def used_store(self) -> int:
        """Port of the newest store of this node that an epoch uses; 0 when its process is gone."""
        return self._saved.used_store

    @used_store.setter
    def used_store(self, port: int) -> None:
        self._saved.used_store = port
        self.save()
