"""Simple stand-ins for the mind and the log, and facts to feed them with."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from keepstep.model.actions import AnyAction, KillProcess
from keepstep.model.facts import AnyFact, SdkAttached, StandbyReady, TimePassed, WorkerExited
from keepstep.model.ids import ActionId, Epoch, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.records import AnyRecord, DeadlineSet, Observed, Ordered
from keepstep.store.memory import MemoryLog

JOB = JobId("j")


def ready(seq: int, node: str = "n0", job: str = "j") -> StandbyReady:
    """A fact that leads to nothing but its own record."""
    return StandbyReady(job=JobId(job), at=Nanos(seq), node=NodeId(node), seq=seq, slot=SlotId(f"s{seq}"))


def exited(seq: int, node: str = "n0") -> WorkerExited:
    """A fact that leads to an order for its node."""
    return WorkerExited(
        job=JOB, at=Nanos(seq), node=NodeId(node), seq=seq, slot=SlotId("s"), rank=Rank(0), epoch=Epoch(0), code=1
    )


def poison(seq: int, node: str = "n0") -> SdkAttached:
    """A fact that the fake mind cannot digest."""
    return SdkAttached(job=JOB, at=Nanos(seq), node=NodeId(node), seq=seq, slot=SlotId("s"), version="")


class FakeMind:
    """Remembers every record; obeys the same contract as the real one."""

    def __init__(self, records: Sequence[AnyRecord] = ()) -> None:
        self.records: list[AnyRecord] = []
        self.seqs: dict[NodeId, int] = {}
        self.due: Nanos | None = None
        for record in records:
            self.evolve(record)

    def decide(self, fact: AnyFact, now: Nanos) -> list[AnyRecord]:
        if fact.seq and fact.seq <= self.seqs.get(fact.node, 0):
            return []
        out: list[AnyRecord] = [Observed(job=JOB, at=now, fact=fact)]
        match fact:
            case WorkerExited():
                kill = KillProcess(
                    id=ActionId(f"{fact.node}/{fact.seq}"),
                    job=JOB,
                    epoch=Epoch(0),
                    node=fact.node,
                    slot=fact.slot,
                    why="",
                )
                out.append(Ordered(job=JOB, at=now, action=kill))
            case TimePassed() if self.due is not None and now >= self.due:
                out.append(DeadlineSet(job=JOB, at=now, name="d", due=Nanos(0)))
            case SdkAttached():
                out.append(DeadlineSet(job=JOB, at=now, name="poison", due=Nanos(1)))
            case _:
                pass
        return out

    def evolve(self, record: AnyRecord) -> None:
        self.records.append(record)
        match record:
            case Observed(fact=fact):
                self.seqs[fact.node] = max(fact.seq, self.seqs.get(fact.node, 0))
            case DeadlineSet(name="poison"):
                raise ZeroDivisionError("poisoned")
            case DeadlineSet():
                self.due = record.due or None
            case _:
                pass

    def next_deadline(self) -> Nanos | None:
        return self.due

    def pending_orders(self, node: NodeId) -> list[AnyAction]:
        orders = [record.action for record in self.records if isinstance(record, Ordered)]
        return [action for action in orders if action.node == node]

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self.records)

    @classmethod
    def load(cls, state: bytes) -> FakeMind:
        return cls(msgspec.msgpack.decode(state, type=list[AnyRecord]))


class GatedLog(MemoryLog):
    """A log whose commits wait for ``gate``, and fail with the errors put into ``failures`` first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failures: list[Exception] = []
        self.batches: list[int] = []
        self.write_then_fail = False

    def append(self, records: Sequence[AnyRecord], *, expected: int) -> int:
        self.entered.set()
        assert self.gate.wait(10)
        if self.failures:
            if self.write_then_fail:
                super().append(records, expected=expected)
            raise self.failures.pop(0)
        last = super().append(records, expected=expected)
        self.batches.append(len(records))
        return last
