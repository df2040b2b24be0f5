"""The writer: what is durable before what becomes visible, and what happens when the log cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from control_fakes import JOB, FakeMind, GatedLog, exited, poison, ready

from keepstep.controlplane import writer as writer_module
from keepstep.controlplane.batch import Submission
from keepstep.controlplane.clock import AnchoredClock
from keepstep.controlplane.exceptions import LostLog
from keepstep.controlplane.writer import Writer
from keepstep.model.facts import AnyFact, StandbyReady, TimePassed
from keepstep.model.ids import Nanos
from keepstep.model.records import DeadlineSet, Observed, Ordered
from keepstep.ports import Entry
from keepstep.store.exceptions import LogCorrupt, LogFull, LogUnavailable, SequenceConflict


class Rig:
    """A writer over a gated log, with a diary of what became visible in which order."""

    def __init__(self, log: GatedLog | None = None) -> None:
        self.log = log or GatedLog()
        self.diary: list[str] = []
        self.published: list[Entry] = []
        self.writer: Writer[FakeMind] = Writer(
            event_log=self.log,
            durable=FakeMind([entry.record for entry in self.log.read()]),
            seq=self.log.last(),
            load=FakeMind.load,
            clock=AnchoredClock(),
            publish=self._publish,
            wake=lambda: self.diary.append("wake"),
        )
        self._acks: dict[int, asyncio.Event] = {}

    def _publish(self, entries: Sequence[Entry]) -> None:
        assert [e.seq for e in self.log.read(after=self.log.last() - 1)] >= [entries[-1].seq], (
            "published before durable"
        )
        self.published += entries
        self.diary.append("publish")

    def submit(self, *facts: AnyFact) -> asyncio.Event:
        done = asyncio.Event()

        def durable() -> None:
            self.diary.append("ack")
            done.set()

        assert self.writer.submit(Submission(facts, durable=durable))
        return done

    async def entered(self) -> None:
        """Wait until a commit has begun (and hangs at the gate)."""
        assert await asyncio.to_thread(self.log.entered.wait, 10)

    def facts(self) -> list[AnyFact]:
        return [e.record.fact for e in self.log.read() if isinstance(e.record, Observed)]


def scenario(test: Callable[[Rig], Any]) -> Callable[[], None]:
    """Run an async test with a running writer; the writer must end well."""

    @contextlib.asynccontextmanager
    async def running(rig: Rig) -> AsyncIterator[None]:
        task = asyncio.create_task(rig.writer.run())
        try:
            yield
        finally:
            rig.log.gate.set()
            rig.writer.close()
            await task

    async def main() -> None:
        rig = Rig()
        async with running(rig), asyncio.timeout(20):
            await test(rig)

    def wrapper() -> None:
        asyncio.run(main())

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


@scenario
async def test_durable_then_orders_then_acks_then_readers(rig: Rig) -> None:
    """Nothing is visible while the commit is under way; afterwards effects come in the documented order."""
    rig.log.gate.clear()
    done = rig.submit(exited(1))
    await rig.entered()
    assert rig.diary == []
    assert rig.writer.durable.records == []
    assert rig.writer.seq == 0
    rig.log.gate.set()
    await done.wait()
    assert rig.diary == ["publish", "ack", "wake"]
    assert [type(e.record) for e in rig.published] == [Observed, Ordered]
    assert [entry.seq for entry in rig.published] == [1, 2]
    assert rig.writer.seq == 2


@scenario
async def test_facts_that_come_during_a_commit_share_the_next_one(rig: Rig) -> None:
    """Group commit: 300 facts that arrive while one commit is under way cost one more commit, not 300."""
    rig.log.gate.clear()
    first = rig.submit(ready(1))
    await rig.entered()
    rest = [rig.submit(ready(seq)) for seq in range(2, 302)]
    rig.log.gate.set()
    for done in (first, *rest):
        await done.wait()
    assert rig.log.batches == [1, 300]
    assert [fact.seq for fact in rig.facts()] == list(range(1, 302))


@scenario
async def test_a_batch_is_bounded(rig: Rig) -> None:
    """A storm is cut into commits of at most ``BATCH_LIMIT`` facts."""
    limit = writer_module.BATCH_LIMIT
    rig.log.gate.clear()
    rig.submit(ready(1))
    await rig.entered()
    done = [rig.submit(ready(seq)) for seq in range(2, 2 * limit + 2)]
    rig.log.gate.set()
    await done[-1].wait()
    assert rig.log.batches == [1, limit, limit]


@scenario
async def test_repetitions_are_acknowledged_without_a_commit(rig: Rig) -> None:
    """Facts sent again after a lost acknowledgement are acknowledged and leave no trace in the log."""
    await rig.submit(ready(1), ready(2)).wait()
    await rig.submit(ready(1), ready(2)).wait()
    assert rig.log.batches == [2]
    assert len(rig.facts()) == 2


@scenario
async def test_a_repetition_within_one_batch_is_folded_once(rig: Rig) -> None:
    """The staged mind already knows what stands earlier in the same batch."""
    rig.log.gate.clear()
    rig.submit(ready(1))
    await rig.entered()
    rig.submit(ready(2))
    done = rig.submit(ready(2))
    rig.log.gate.set()
    await done.wait()
    assert [fact.seq for fact in rig.facts()] == [1, 2]


@scenario
async def test_a_full_log_dispatches_nothing_and_catches_up_by_itself(rig: Rig) -> None:
    """While the log is full nothing leaves; once there is room the same facts are decided afresh, once."""
    await rig.submit(ready(1)).wait()
    rig.diary.clear()
    rig.log.failures = [LogFull("no space, 0 bytes left on the file system of /x"), LogFull("still")]
    rig.log.gate.clear()
    done = rig.submit(exited(2))
    later = rig.submit(ready(3))
    await rig.entered()
    rig.log.gate.set()
    while rig.writer.refusing is None:
        await asyncio.sleep(0.001)
    assert "0 bytes left" in rig.writer.refusing
    assert "agents go on by themselves" in rig.writer.refusing
    assert "publish" not in rig.diary
    assert "ack" not in rig.diary
    with pytest.raises(LogFull, match="decides nothing"):
        await rig.writer.ask(ready(9), wait_s=1)
    await later.wait()
    assert done.is_set()
    assert rig.writer.refusing is None
    assert [type(entry.record).__name__ for entry in rig.log.read()] == ["Observed", "Observed", "Ordered", "Observed"]
    assert rig.writer.durable.records == [entry.record for entry in rig.log.read()]


@scenario
async def test_a_commit_that_failed_but_was_written_is_taken_from_the_log(rig: Rig) -> None:
    """An I/O error can strike after the write. The log decides: its entries are published, nothing is doubled."""
    rig.log.write_then_fail = True
    rig.log.failures = [LogUnavailable("disk I/O error")]
    await rig.submit(exited(1)).wait()
    assert [type(entry.record) for entry in rig.log.read()] == [Observed, Ordered]
    assert [entry.seq for entry in rig.published] == [1, 2]
    assert rig.writer.durable.records == [entry.record for entry in rig.log.read()]


@scenario
async def test_an_indigestible_fact_is_put_aside(rig: Rig) -> None:
    """A bug of the mind on one fact stops neither its neighbours in the batch nor the controller."""
    rig.log.gate.clear()
    rig.submit(ready(1))
    await rig.entered()
    rig.submit(ready(2))
    bad = rig.submit(poison(3))
    good = rig.submit(exited(4))
    rig.log.gate.set()
    await bad.wait()
    await good.wait()
    assert rig.writer.failed_facts == 1
    assert [fact.seq for fact in rig.facts()] == [1, 2, 4]
    assert rig.writer.durable.records == [entry.record for entry in rig.log.read()]


@scenario
async def test_a_person_gets_the_entries_of_the_request(rig: Rig) -> None:
    """``ask`` answers after the commit with exactly the entries that its fact led to."""
    rig.submit(ready(1))
    entries = await rig.writer.ask(exited(2), wait_s=5)
    assert [(entry.seq, type(entry.record)) for entry in entries] == [(2, Observed), (3, Ordered)]
    assert rig.writer.seq >= 3


@scenario
async def test_the_mind_is_woken_at_its_deadline(rig: Rig) -> None:
    """A deadline in the past is handled at once, and not again once it is cleared."""
    due = DeadlineSet(job=JOB, at=Nanos(1), name="d", due=Nanos(1))
    rig.writer._staged.evolve(due)
    await rig.submit(ready(1)).wait()
    while not any(isinstance(fact, TimePassed) for fact in rig.facts()):
        await asyncio.sleep(0.001)
    await rig.submit(ready(2)).wait()
    await rig.submit(ready(3)).wait()
    assert sum(isinstance(fact, TimePassed) for fact in rig.facts()) == 1


def test_a_deadline_that_stays_due_does_not_spin() -> None:
    """A mind that does not clear a deadline is asked again once per ``SAME_DEADLINE_S``, not in a tight loop."""

    class Stubborn(FakeMind):
        def next_deadline(self) -> Nanos:
            return Nanos(1)

        @classmethod
        def load(cls, state: bytes) -> Stubborn:
            return cls(FakeMind.load(state).records)

    async def main() -> int:
        log = GatedLog()
        writer = Writer(
            event_log=log, durable=Stubborn(), seq=0, load=Stubborn.load, clock=AnchoredClock(), publish=lambda _: None
        )
        task = asyncio.create_task(writer.run())
        while log.last() == 0:
            await asyncio.sleep(0.001)
        for seq in range(1, 20):
            await writer.ask(ready(seq), wait_s=5)
        writer.close()
        await task
        return sum(isinstance(e.record, Observed) and isinstance(e.record.fact, TimePassed) for e in log.read())

    assert asyncio.run(main()) == 1


def test_a_full_queue_says_so_and_says_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit facts are not taken; ``room`` returns once half the queue is free; own facts have some more."""
    monkeypatch.setattr(writer_module, "QUEUE_LIMIT", 10)
    monkeypatch.setattr(writer_module, "QUEUE_HARD_LIMIT", 12)

    @scenario
    async def inner(rig: Rig) -> None:
        rig.log.gate.clear()
        rig.submit(ready(1))
        await rig.entered()
        for seq in range(2, 12):
            rig.submit(ready(seq))
        assert not rig.writer.submit(Submission((ready(12),)))
        assert rig.writer.submit(Submission((ready(0),)), own=True)
        assert rig.writer.submit(Submission((ready(0),)), own=True)
        assert not rig.writer.submit(Submission((ready(0),)), own=True)
        room = asyncio.create_task(rig.writer.room())
        await asyncio.sleep(0)
        assert not room.done()
        rig.log.gate.set()
        await room
        await rig.submit(ready(12)).wait()
        assert [f.seq for f in rig.facts() if isinstance(f, StandbyReady) and f.seq] == list(range(1, 13))

    inner()


def test_closing_writes_what_waits_and_a_snapshot() -> None:
    """``close`` loses nothing that was taken in, and leaves a snapshot of all of it."""

    async def main() -> None:
        rig = Rig()
        task = asyncio.create_task(rig.writer.run())
        done = [rig.submit(ready(seq)) for seq in range(1, 50)]
        rig.writer.close()
        await task
        assert all(event.is_set() for event in done)
        assert not rig.writer.submit(Submission((ready(50),)))
        snapshot = rig.log.load_snapshot()
        assert snapshot is not None
        assert snapshot[0] == 49
        assert FakeMind.load(snapshot[1]).records == [entry.record for entry in rig.log.read()]

    asyncio.run(main())


def test_closing_does_not_wait_for_a_full_log_forever() -> None:
    """A controller that is told to leave while its log is full leaves; unwritten facts were never acknowledged."""

    async def main() -> None:
        rig = Rig()
        rig.log.failures = [LogFull("full")] * 1000
        task = asyncio.create_task(rig.writer.run())
        done = rig.submit(ready(1))
        while rig.writer.refusing is None:
            await asyncio.sleep(0.001)
        rig.writer.close()
        async with asyncio.timeout(5):
            await task
        assert not done.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("error", [SequenceConflict("a second writer"), LogCorrupt("entry 3")])
def test_a_log_that_is_not_ours_any_more_ends_the_controller(error: Exception) -> None:
    """Two histories are worse than none: a conflict or damage is not retried."""

    async def main() -> None:
        rig = Rig()
        rig.log.failures = [error]
        done = rig.submit(ready(1))
        with pytest.raises(LostLog, match=str(error)):
            await rig.writer.run()
        assert not done.is_set()
        assert rig.published == []

    asyncio.run(main())


def test_snapshots_are_taken_by_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``SNAPSHOT_EVERY`` entries a snapshot equals the fold of the log up to its entry."""
    monkeypatch.setattr(writer_module, "SNAPSHOT_EVERY", 10)

    @scenario
    async def inner(rig: Rig) -> None:
        for seq in range(1, 26):
            await rig.submit(ready(seq)).wait()
        await rig.writer.ask(ready(26), wait_s=5)
        found = rig.log.load_snapshot()
        assert found is not None
        assert found[0] == 20
        assert FakeMind.load(found[1]).records == [entry.record for entry in rig.log.read(limit=20)]

    inner()
