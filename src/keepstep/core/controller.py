"""The mind: one object that shells and the simulator hold. ``decide`` reads, ``evolve`` changes, nobody else does.

The shell's loop: ``decide`` a fact, append the records and commit, ``evolve`` each of them, then dispatch the orders
among them; outcomes come back as facts. A restart folds the log again and decides nothing anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from keepstep.core.draft import Draft
from keepstep.core.exceptions import UnreadableState
from keepstep.core.fold import fold
from keepstep.core.respond import respond, time_passed
from keepstep.core.state import Incident, Job, Node
from keepstep.model.actions import AnyAction
from keepstep.model.facts import AnyFact, JobSubmitted, TimePassed
from keepstep.model.ids import JobId, Nanos, NodeId
from keepstep.model.records import SCHEMA, AnyRecord, Observed
from keepstep.model.settings import Policy

STATE_SCHEMA = 1
"""Version of ``dump``: a snapshot of another version is refused, and the log folded from its start instead."""


class _Snapshot(Struct, frozen=True, kw_only=True):
    state_schema: int
    record_schema: int
    jobs: dict[JobId, Job]


class Controller:
    """Many jobs, each with its own state.

    Args:
        policy: limits of all decisions from now on; past ones are in the log and stay as they are.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._jobs: dict[JobId, Job] = {}

    # ------------------------------------------------------------ the contract with the shells

    def decide(self, fact: AnyFact, now: Nanos) -> list[AnyRecord]:
        """What follows from ``fact``. Reads state and changes nothing.

        The first record is ``Observed(fact)``. The list is empty for a report that was folded already, for a fact
        about a job that was never submitted, and when no deadline is due.
        """
        if isinstance(fact, TimePassed):
            return self._time_passed(fact, now)
        job = self._jobs.get(fact.job)
        if isinstance(fact, JobSubmitted):
            if job is not None:
                return []
            job = Job(spec=fact.spec, submitted=now)
        if job is None or (fact.seq and fact.seq <= job.seqs.get(fact.node, 0)):
            return []
        draft = Draft(job, now, self.policy)
        draft.observe(fact)
        respond(draft, fact)
        return draft.records

    def evolve(self, record: AnyRecord) -> None:
        """Fold one record, in the order of the log: the only mutator."""
        if isinstance(record, Observed) and isinstance(record.fact, JobSubmitted) and record.job not in self._jobs:
            self._jobs[record.job] = Job(spec=record.fact.spec, submitted=record.at)
        job = self._jobs.get(record.job)
        if job is not None:
            fold(job, record)

    def next_deadline(self) -> Nanos | None:
        """When the shell has to send ``TimePassed``; ``None`` while nothing waits for time."""
        return min((due for job in self._jobs.values() for due in job.deadlines.values()), default=None)

    def dump(self) -> bytes:
        """The whole state, for a snapshot beside the log."""
        snapshot = _Snapshot(state_schema=STATE_SCHEMA, record_schema=SCHEMA, jobs=self._jobs)
        return msgspec.msgpack.encode(snapshot)

    @classmethod
    def load(cls, data: bytes, policy: Policy | None = None) -> Controller:
        """The inverse of ``dump``.

        Raises:
            UnreadableState: ``data`` is damaged or of another version; fold the log from its start.
        """
        try:
            snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as error:
            raise UnreadableState(f"snapshot is not readable ({error}); fold the log from its first record") from error
        if (snapshot.state_schema, snapshot.record_schema) != (STATE_SCHEMA, SCHEMA):
            raise UnreadableState(
                f"snapshot is of state schema {snapshot.state_schema} and record schema {snapshot.record_schema}, this "
                f"version reads {STATE_SCHEMA} and {SCHEMA}; fold the log from its first record"
            )
        mind = cls(policy)
        mind._jobs = snapshot.jobs
        return mind

    # ------------------------------------------------------------ what shells and people may ask

    def jobs(self) -> list[Job]:
        """All jobs in the order of their submission. Read only."""
        return list(self._jobs.values())

    def job(self, job: JobId) -> Job | None:
        """One job's state. Read only."""
        return self._jobs.get(job)

    def incidents(self, job: JobId) -> list[Incident]:
        """The job's incidents, oldest first."""
        known = self._jobs.get(job)
        return list(known.incidents.values()) if known else []

    def nodes(self, job: JobId) -> Mapping[NodeId, Node]:
        """The job's node table. Read only."""
        known = self._jobs.get(job)
        return MappingProxyType(known.nodes if known else {})

    def acked(self, job: JobId, node: NodeId) -> int:
        """The newest report of ``node`` that was folded."""
        known = self._jobs.get(job)
        return known.seqs.get(node, 0) if known else 0

    def pending_orders(self, node: NodeId, job: JobId | None = None) -> list[AnyAction]:
        """Orders for ``node`` without an answer, oldest first; those of past epochs are void and not among them."""
        return [
            action
            for state in self._jobs.values()
            if job is None or state.id == job
            for action in state.orders.values()
            if action.node == node
        ]

    # ------------------------------------------------------------ inside

    def _time_passed(self, fact: TimePassed, now: Nanos) -> list[AnyRecord]:
        """Handle what is due in *all* jobs: deadlines belong to jobs, but there is only one clock."""
        due = [job for job in self._jobs.values() if any(at <= now for at in job.deadlines.values())]
        if not due:
            return []
        records: list[AnyRecord] = [Observed(job=fact.job, at=now, fact=fact)]
        for job in due:
            draft = Draft(job, now, self.policy)
            time_passed(draft)
            records += draft.records
        return records
