"""What the demo knows about a job it does not control: the event log and heartbeat memory, read and never written.

The log says who trains where, what went wrong and what it cost; heartbeat memory says how far each rank is and which
process it is. Both go on working while the controller is dead, which is when a demo of faults needs them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from keepstep.model import env
from keepstep.model.beat import LAYOUT, SIZE, WORDS, Word
from keepstep.model.facts import (
    AgentJoined,
    RankAdvanced,
    RankJoined,
    RankResumed,
    RecoveredLocally,
    StandbyGone,
    StandbyReady,
)
from keepstep.model.ids import Nanos, NodeId, SlotId
from keepstep.model.records import (
    EpochOpened,
    IncidentMeasured,
    IncidentMoved,
    IncidentOpened,
    JobMoved,
    NodeMoved,
    Observed,
    PlanMade,
    StandbyMoved,
    SuspectNamed,
)
from keepstep.model.topology import Roster
from keepstep.ports import Entry
from keepstep.store.exceptions import StoreError
from keepstep.store.sqlite import SqliteLog, open_log

_BEAT = struct.Struct(f"={WORDS}q")


class Incident(msgspec.Struct, kw_only=True):
    """One incident as far as the log tells it."""

    id: str
    opened: Nanos
    title: str
    state: str = "OPEN"
    suspect: str = ""
    category: str = ""
    plan: str = ""
    rungs: list[str] = []
    decided: Nanos = Nanos(0)
    closed: Nanos = Nanos(0)
    deputy: bool = False
    measured: IncidentMeasured | None = None

    @property
    def over(self) -> bool:
        return self.state in ("RESOLVED", "ESCALATED")


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a rank's heartbeat memory."""

    pid: int
    epoch: int
    step: int
    phase: int


class Watch:
    """Follows one job through its log file; ``poll`` takes in what is new."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.roster: Roster | None = None
        self.state = "PENDING"
        self.why = ""
        self.exit_code: int | None = None
        self.incidents: dict[str, Incident] = {}
        self.joined: set[NodeId] = set()
        self.quarantined: set[NodeId] = set()
        """Nodes that get no rank of this job any more."""
        self.parked: set[tuple[NodeId, SlotId]] = set()
        """Warm processes that wait for a rank, by node and slot (slots are named per node)."""
        self.joins: dict[int, set[int]] = {}
        self.resumed: dict[int, set[int]] = {}
        self.advanced: dict[int, set[int]] = {}
        self.entries = 0
        self._log: SqliteLog | None = None
        self._local: set[int] = set()

    def poll(self) -> list[Entry]:
        """Fold what was appended since the last call; an unreadable log (not there yet) is simply nothing new."""
        path = self.run_dir / "log.sqlite"
        try:
            if self._log is None:
                if not path.exists():
                    return []
                self._log = open_log(path, readonly=True)
            new = list(self._log.read(after=self.entries))
        except StoreError:
            self.close()
            return []
        for entry in new:
            self._fold(entry)
        return new

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def settled(self) -> bool:
        """Every rank of the newest roster has done a new step, and no incident is open."""
        if self.roster is None or self.state != "RUNNING":
            return False
        done = self.advanced.get(self.roster.epoch, set())
        return len(done) == self.roster.world_size and all(i.over for i in self.incidents.values())

    def standbys_on(self, node: str) -> int:
        return sum(1 for where, _ in self.parked if where == node)

    def _fold(self, entry: Entry) -> None:
        self.entries = entry.seq
        record = entry.record
        match record:
            case EpochOpened():
                self.roster = record.roster
                self._local.discard(record.roster.epoch)
                for member in record.roster.members:
                    self.parked.discard((member.node, member.slot))
            case JobMoved():
                self.state, self.why, self.exit_code = record.to, record.why, record.exit_code
            case NodeMoved():
                if record.to == "QUARANTINED":
                    self.quarantined.add(record.node)
            case StandbyMoved():
                if record.to == "SLEEPING":
                    self.parked.add((record.node, record.slot))
                else:
                    self.parked.discard((record.node, record.slot))
            case Observed():
                self._observe(record)
            case IncidentOpened() | IncidentMoved() | SuspectNamed() | PlanMade() | IncidentMeasured():
                self._incident(record)
            case _:
                pass

    def _observe(self, record: Observed) -> None:
        match fact := record.fact:
            case AgentJoined():
                self.joined.add(fact.node)
            case StandbyReady():
                self.parked.add((fact.node, fact.slot))
            case StandbyGone():
                self.parked.discard((fact.node, fact.slot))
            case RankJoined():
                self.joins.setdefault(fact.epoch, set()).add(fact.rank)
            case RankResumed():
                self.resumed.setdefault(fact.epoch, set()).add(fact.rank)
            case RankAdvanced():
                self.advanced.setdefault(fact.epoch, set()).add(fact.rank)
            case RecoveredLocally():
                self._local.add(fact.roster.epoch)
            case _:
                pass

    def _incident(self, record: IncidentOpened | IncidentMoved | SuspectNamed | PlanMade | IncidentMeasured) -> None:
        if isinstance(record, IncidentOpened):
            self.incidents[record.incident] = Incident(
                id=record.incident, opened=record.at, title=record.title, deputy=bool(self._local)
            )
            return
        known = self.incidents.get(record.incident)
        if known is None:
            return
        match record:
            case IncidentMoved():
                known.state = record.to
                if known.over:
                    known.closed = record.at
            case SuspectNamed():
                known.suspect, known.category = record.reason, record.category
            case PlanMade():
                known.plan = record.reason
                known.rungs.append(record.rung)
                known.decided = record.at
            case IncidentMeasured():
                known.measured = record


def read_beat(node_dir: Path, slot: str) -> Beat | None:
    """The rank's heartbeat memory; ``None`` where there is none (yet, or any more)."""
    try:
        with (node_dir / env.BEAT_DIR / slot).open("rb") as file:
            words = _BEAT.unpack(file.read(SIZE))
    except (OSError, struct.error):
        return None
    if words[Word.LAYOUT] != LAYOUT:
        return None
    return Beat(pid=words[Word.PID], epoch=words[Word.EPOCH], step=words[Word.STEP], phase=words[Word.PHASE])


def read_losses(run_dir: Path) -> dict[tuple[int, int], set[str]]:
    """(rank, step) to every loss that was written for it, as exact hexadecimal floats.

    A step that was undone and done again has two lines; both have to be the same number.
    """
    losses: dict[tuple[int, int], set[str]] = {}
    for path in sorted((run_dir / env.LOSS_DIR).glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        for line in path.read_text().splitlines():
            try:
                found = json.loads(line)
                losses.setdefault((rank, found["step"]), set()).add(found["loss"])
            except (ValueError, KeyError, TypeError):
                continue  # the half line of a writer that was killed: its step was done again, or is missed below
    return losses


def differences(run_dir: Path, reference: Path, *, world_size: int, steps: Iterable[int]) -> list[str]:
    """Where the losses of two runs differ, in words; empty when every step of every rank is the same bit for bit."""
    ours, theirs = read_losses(run_dir), read_losses(reference)
    found = []
    for step in steps:
        for rank in range(world_size):
            left, right = ours.get((rank, step), set()), theirs.get((rank, step), set())
            if len(left) != 1 or left != right:
                found.append(f"step {step} rank {rank}: {_shown(left)} here, {_shown(right)} undisturbed")
    return found


def _shown(values: set[str]) -> str:
    return " and ".join(sorted(values)) or "nothing"
