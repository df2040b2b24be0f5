"""Draft: a decision in the making. Each record is folded into a copy of the job, so the next can build on it."""

from __future__ import annotations

from keepstep.core.fold import fold
from keepstep.core.state import Incident, Job
from keepstep.model.actions import AnyAction
from keepstep.model.facts import AnyFact
from keepstep.model.ids import Nanos, NodeId, SlotId
from keepstep.model.records import (
    AnyRecord,
    DeadlineSet,
    IncidentMoved,
    IncidentState,
    JobMoved,
    JobState,
    NodeMoved,
    NodeState,
    Noted,
    Observed,
    Ordered,
    StandbyMoved,
    StandbyState,
)
from keepstep.model.settings import Policy

SECOND = 1_000_000_000


def nanos(seconds: float) -> int:
    return int(seconds * SECOND)


class Draft:
    """The records decided so far and the job as it will be once they are folded.

    Args:
        job: left untouched; the draft thinks on a copy.
        now: the controller's clock, stamped on every record.
    """

    def __init__(self, job: Job, now: Nanos, policy: Policy) -> None:
        self.job = job.fork()
        self.now = now
        self.policy = policy
        self.records: list[AnyRecord] = []

    def emit(self, record: AnyRecord) -> None:
        fold(self.job, record)
        self.records.append(record)

    def observe(self, fact: AnyFact) -> None:
        self.emit(Observed(job=fact.job, at=self.now, fact=fact))

    def move_job(self, to: JobState, why: str, code: int | None = None) -> None:
        """No record when the job is there already."""
        if self.job.state != to:
            self.emit(JobMoved(job=self.job.id, at=self.now, to=to, why=why, exit_code=code))

    def move_node(self, node: NodeId, to: NodeState, why: str) -> None:
        if node in self.job.nodes and self.job.nodes[node].health != to:
            self.emit(NodeMoved(job=self.job.id, at=self.now, node=node, to=to, why=why))

    def move_standby(self, node: NodeId, slot: SlotId, to: StandbyState, why: str) -> None:
        self.emit(StandbyMoved(job=self.job.id, at=self.now, node=node, slot=slot, to=to, why=why))

    def move_incident(self, to: IncidentState, why: str) -> None:
        incident = self.job.incident
        if incident is not None and incident.state != to:
            self.emit(IncidentMoved(job=self.job.id, at=self.now, incident=incident.id, to=to, why=why))

    def order(self, action: AnyAction) -> None:
        self.emit(Ordered(job=self.job.id, at=self.now, action=action))

    def note(self, text: str) -> None:
        self.emit(Noted(job=self.job.id, at=self.now, text=text))

    def wake(self, name: str, seconds: float) -> None:
        """Set a deadline, from now."""
        self.emit(DeadlineSet(job=self.job.id, at=self.now, name=name, due=Nanos(self.now + nanos(seconds))))

    def wake_once(self, name: str, seconds: float) -> None:
        """Set a deadline unless it is running already."""
        if name not in self.job.deadlines:
            self.wake(name, seconds)

    def clear(self, *names: str) -> None:
        for name in names:
            if name in self.job.deadlines:
                self.emit(DeadlineSet(job=self.job.id, at=self.now, name=name, due=Nanos(0)))

    @property
    def incident(self) -> Incident:
        incident = self.job.incident
        assert incident is not None, "asked for the open incident of a job that has none"
        return incident
