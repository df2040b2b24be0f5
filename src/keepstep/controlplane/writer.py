"""The single writer: facts in, one commit per batch, effects out. See ``batch`` for the order of steps.

While a batch is being committed by the worker thread the next one gathers in the queue; so a lone fact costs one
fsync, and a storm of them costs few. The mind exists twice: *staged* may be one batch ahead of the log, *durable*
never is, and everybody but the writer sees the durable one.

When the log cannot be written (full disk, quota, I/O error) the writer refuses: nothing is decided, dispatched or
acknowledged, the facts wait, and the same batch is tried again with a growing pause. Agents go on by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import structlog

from keepstep.controlplane.batch import Batch, Submission
from keepstep.controlplane.exceptions import LostLog
from keepstep.controlplane.mind import Mind
from keepstep.model.facts import AnyFact, TimePassed
from keepstep.model.ids import JobId, Nanos
from keepstep.ports import Clock, Entry, EventLog
from keepstep.store.exceptions import LogBusy, LogFull, LogUnavailable, StoreError

QUEUE_LIMIT = 20_000
"""Facts that may wait. Beyond it agents are not read from (their outboxes keep what they have to say)."""
QUEUE_HARD_LIMIT = 2 * QUEUE_LIMIT
"""Facts that may wait when the controller's own (lease edges, deadlines) are counted; beyond it those are dropped."""
BATCH_LIMIT = 512
"""Facts per commit: bounds both the transaction and the time for which the event loop decides without a break."""
SNAPSHOT_EVERY = 2_000
"""Entries between snapshots; a start folds at most about as many."""
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
"""Pauses between attempts to commit while the log cannot be written: doubled from the first to the longest."""
SAME_DEADLINE_S = 1.0
"""A deadline that is still due after it has been handled is tried again no sooner than this."""

M = TypeVar("M", bound=Mind)
T = TypeVar("T")
log = structlog.get_logger(__name__)


class Writer(Generic[M]):
    """Owns the log, both minds and the queue.

    Args:
        durable: the fold of the log's entries 1 to ``seq``.
        load: makes a mind from what ``dump`` gave.
        publish: called with the entries of each committed batch, before acknowledgements; dispatches orders.
        wake: called after acknowledgements; wakes readers.
    """

    def __init__(
        self,
        *,
        event_log: EventLog,
        durable: M,
        seq: int,
        load: Callable[[bytes], M],
        clock: Clock,
        publish: Callable[[Sequence[Entry]], None],
        wake: Callable[[], None] = lambda: None,
        snapshot_seq: int = 0,
    ) -> None:
        self.durable = durable
        self.seq = seq
        """The newest durable entry."""
        self.refusing: str | None = None
        """Why nothing is decided at the moment; ``None`` when all is well."""
        self.failed_facts = 0
        """Facts that the mind could not digest: each is a bug, logged with its traceback."""
        self.commits = 0
        self._log = event_log
        self._load = load
        self._clock = clock
        self._publish_entries = publish
        self._wake_readers = wake
        self._staged = load(durable.dump())
        self._snapshot_seq = snapshot_seq
        self._queue: deque[Submission] = deque()
        self._waiting = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-writer")
        self._timer: asyncio.TimerHandle | None = None
        self._last_due: tuple[int, float] = (0, 0.0)

    # ------------------------------------------------------------ the way in

    def submit(self, submission: Submission, *, own: bool = False) -> bool:
        """Queue facts; False when there is no room (then nothing was queued; see ``room``).

        Args:
            own: the controller's own facts, which cannot be sent again by anybody, have some more room.
        """
        limit = QUEUE_HARD_LIMIT if own else QUEUE_LIMIT
        if self._closed.is_set() or (self._waiting and self._waiting + len(submission.facts) > limit):
            self._room.clear()
            if own:
                log.error("fact dropped", facts=[type(f).__name__ for f in submission.facts], waiting=self._waiting)
            return False
        self._queue.append(submission)
        self._waiting += len(submission.facts)
        self._arrived.set()
        return True

    async def room(self) -> None:
        """Wait until about half of the queue is free."""
        await self._room.wait()

    async def ask(self, fact: AnyFact, *, wait_s: float) -> list[Entry]:
        """Have one fact decided and committed, and return the entries it led to.

        Raises:
            TimeoutError: not durable within ``wait_s``; it may still become so.
            LogFull: refused at once, because the log cannot be written at the moment.
        """
        if self.refusing is not None:
            raise LogFull(self.refusing)
        outcome: asyncio.Future[list[Entry]] = asyncio.get_running_loop().create_future()
        if not self.submit(Submission((fact,), outcome=outcome)):
            raise LogFull(f"{self._waiting} facts wait to be written; try again in a moment")
        async with asyncio.timeout(wait_s):
            return await outcome

    # ------------------------------------------------------------ the rounds

    async def run(self) -> None:
        """Write until ``close``.

        Raises:
            LostLog: the log is damaged or somebody else writes to it.
        """
        try:
            self._arm()
            while await self._something_waits():
                batch = self._gather()
                if not await self._commit(batch):
                    return
                self._publish(batch)
                self._arm()
                await self._snapshot()
            await self._snapshot(last=True)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Take nothing more in; ``run`` returns once what waits is durable (or cannot be made so)."""
        self._closed.set()
        self._arrived.set()

    async def _something_waits(self) -> bool:
        while not self._queue:
            if self._closed.is_set():
                return False
            self._arrived.clear()
            await self._arrived.wait()
        return True

    def _gather(self) -> Batch:
        batch = Batch([self._queue.popleft()])
        count = len(batch.submissions[0].facts)
        while self._queue and count + len(self._queue[0].facts) <= BATCH_LIMIT:
            batch.submissions.append(self._queue.popleft())
            count += len(batch.submissions[-1].facts)
        self._waiting -= count
        if self._waiting <= QUEUE_LIMIT // 2:
            self._room.set()
        return batch

    async def _commit(self, batch: Batch) -> bool:
        """Decide and append, again and again until it is durable; False when ``close`` cut it short."""
        pause_s = RETRY_FIRST_S
        while True:
            self._stage(batch)
            try:
                if batch.entries:
                    await self._append(batch.entries)
                if self.refusing is not None:
                    log.info("log can be written again", seq=self.seq)
                    self.refusing = None
                return True
            except (LogFull, LogBusy, LogUnavailable) as error:
                await self._refuse(error)
            except StoreError as error:
                raise LostLog(str(error)) from error
            if self._closed.is_set():
                log.error("leaving with facts unwritten", facts=sum(len(s.facts) for s in batch.submissions))
                return False
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _stage(self, batch: Batch) -> None:
        """Decide all facts of the batch, each on top of what the ones before it led to."""
        batch.entries, batch.outcomes = [], []
        for submission in batch.submissions:
            start = len(batch.entries)
            for fact in submission.facts:
                self._stage_fact(fact, batch)
            if submission.outcome is not None:
                batch.outcomes.append((submission.outcome, batch.entries[start:]))

    def _stage_fact(self, fact: AnyFact, batch: Batch) -> None:
        """A fact that the mind cannot digest is put aside: one bug must not stop all jobs, again at every restart."""
        try:
            records = self._staged.decide(fact, self._clock.now())
            for record in records:
                self._staged.evolve(record)
        except Exception:
            self.failed_facts += 1
            log.exception("the mind cannot digest a fact; it is put aside. This is a bug: please report it", fact=fact)
            self._restage(batch.entries)
            return
        next_seq = self.seq + len(batch.entries) + 1
        batch.entries += [Entry(seq=seq, record=record) for seq, record in enumerate(records, next_seq)]

    def _restage(self, entries: Sequence[Entry] = ()) -> None:
        self._staged = self._load(self.durable.dump())
        for entry in entries:
            self._staged.evolve(entry.record)

    async def _append(self, entries: Sequence[Entry]) -> None:
        records = [entry.record for entry in entries]
        await self._in_thread(lambda: self._log.append(records, expected=self.seq))
        self.commits += 1

    async def _refuse(self, error: StoreError) -> None:
        """Nothing was written, or so we are told: throw the staged mind away and believe only what the log holds."""
        why = f"{error}; until then the controller decides nothing, and agents go on by themselves"
        if self.refusing is None:
            log.error("the log cannot be written", error=str(error), kind=type(error).__name__)
        self.refusing = why
        try:
            found = await self._in_thread(lambda: list(self._log.read(after=self.seq)))
        except (LogBusy, LogUnavailable):
            found = []
        except StoreError as lost:
            raise LostLog(str(lost)) from lost
        if found:
            self._fold(found)
        self._restage()
        self._wake_readers()

    def _publish(self, batch: Batch) -> None:
        self._fold(batch.entries)
        for submission in batch.submissions:
            if submission.durable is not None:
                submission.durable()
        for outcome, entries in batch.outcomes:
            if not outcome.done():
                outcome.set_result(entries)
        self._wake_readers()

    def _fold(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.durable.evolve(entry.record)
            self.seq = entry.seq
        if entries:
            self._publish_entries(entries)

    # ------------------------------------------------------------ time and upkeep

    def _arm(self) -> None:
        """Have ourselves woken at the mind's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._staged.next_deadline()
        if due is None:
            return
        loop = asyncio.get_running_loop()
        delay_s = max(0.0, (due - self._clock.now()) / 1e9)
        last_due, last_at = self._last_due
        if due == last_due:
            delay_s = max(delay_s, last_at + SAME_DEADLINE_S - loop.time())
        self._timer = loop.call_later(delay_s, self._deadline_came, due)

    def _deadline_came(self, due: Nanos) -> None:
        now = self._clock.now()
        if now < due:
            self._arm()  # timers of the loop are coarser than nanoseconds
            return
        self._last_due = (due, asyncio.get_running_loop().time())
        self.submit(Submission((TimePassed(job=JobId(""), at=now),)), own=True)

    async def _snapshot(self, *, last: bool = False) -> None:
        """Save the fold when it is due and nobody waits; it is for speed only, so failing to is no reason to stop."""
        new = self.seq - self._snapshot_seq
        if new == 0 or (not last and (new < SNAPSHOT_EVERY or (self._queue and new < 2 * SNAPSHOT_EVERY))):
            return
        seq, state = self.seq, self.durable.dump()
        self._snapshot_seq = seq
        try:
            await self._in_thread(lambda: self._log.save_snapshot(seq, state))
        except StoreError as error:
            log.warning("snapshot not saved; the next start takes longer", seq=seq, error=str(error))

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond ``close``."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
