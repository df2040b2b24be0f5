"""The loop that recovers: trains, notices that an epoch is over, enters the next one, and goes on from the common step.

A survivor comes here by an exception that `with step` swallowed; a newcomer comes here from its set-up, with
stand-in groups; both then walk the same way: reset, rebuild, agree, restore.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.slot import Version
from keepstep.model.beat import Phase
from keepstep.model.topology import Roster
from keepstep.model.wire import (
    TakeSeat,
    WorkerAdvanced,
    WorkerBroken,
    WorkerCannotResume,
    WorkerDone,
    WorkerJoined,
    WorkerResumed,
)
from keepstep.trainer.exceptions import (
    CannotResume,
    CommunicationAborted,
    FrameworkUnsupported,
    GroupsUnsupported,
    InjectedFault,
    StateMismatch,
    StateNotPlain,
    StepMisused,
)
from keepstep.trainer.frameworks_torch import reset_after_abort
from keepstep.trainer.recovery_torch import Found, Restorer, everybody_is_here
from keepstep.trainer.steps import Step, require_entered

if TYPE_CHECKING:
    from keepstep.trainer.session_torch import Session

BROKEN_WAIT_S = 600.0
"""How long a rank whose collective broke waits to be told the next epoch; covers the wait for a new node."""
REBUILD_LIMIT_S = 600.0
"""Far above the controller's own limit, which ends a rebuild earlier by opening another epoch."""
REPLICA_WAIT_S = 2.0
"""How long the first reduction of a step waits for the previous step's copy on the other node."""
REPLICA_AGAIN_S = 30.0
"""After a wait in vain no step waits for so long: a keeper that is away must not cost every step the whole wait."""
REPLICA_POLL_S = 0.0002
FAREWELL_S = 1.0
"""How long the word that the loop is complete may take to leave; the script may end right after it."""


def needs_replica(snapshot_every: int, replicated: bool) -> bool:
    """Whether a step must wait until the step before it is safe on another node.

    Replicated parameters could be had from any rank, but the buffers and random state of a rank whose node is lost are
    nowhere else: with a copy that lags, the job would go on with other numbers. Where replicated state is copied only
    every few steps that is so by choice, and waiting would bring nothing.
    """
    return snapshot_every == 1 or (snapshot_every > 0 and not replicated)


class Loop:
    """One ``ks.steps(total)`` under an agent."""

    def __init__(self, session: Session, total: int, start: int) -> None:
        self._s = session
        self._total, self._start = total, start
        self.done = start
        """Steps committed."""
        self._live: Version | None = None
        self._advance_due = False
        self._gated = False
        self._gap_said = False
        self._gap_until = 0.0
        self._restorer = Restorer(
            session.state,
            session.snapshots,
            session.token,
            session.snap_dir,
            self._overtaken,
        )

    # ---------------------------------------------------------------- the loop

    def run(self) -> Iterator[Step]:
        self._enter()
        while True:
            if self._s.control.pending is not None:
                self._recover()
            elif self.done >= self._total:
                if self._finish():
                    return
            else:
                step = Step(self, self.done)
                yield step
                require_entered(step)

    def _enter(self) -> None:
        """First arrival: everything is built, nothing is trained."""
        session = self._s
        session.state.bind()
        session.check_room()
        roster = session.roster
        if session.groups.stand_in:
            self._recover(first=True)
            return
        try:
            found = self._resume_saved(roster) if roster.mode == "restart" else None
        except Exception as error:
            if not self._absorb(error, self.done):
                raise
            return
        if found is not None and found.version is not None:
            self._go_on(roster, found, {})
            return
        session.snapshots.forget_all()
        self._live = Version(self._start, roster.epoch)
        self._save(self._live)
        self._go_on(roster, Found(version=self._live, newest=self._start, source="initial"), {})

    def _resume_saved(self, roster: Roster) -> Found | None:
        """After a restart of all processes: what the keepers still hold, if it is not behind the script's own start."""
        found = self._restorer.meet(roster, self._s.rank, None, newcomer=True)
        if found.version is None or found.version.step < self._start:
            why = found.why or "it is newer than the newest common snapshot"
            print(f"keepstep: rank {self._s.rank} starts at step {self._start}: {why}", file=sys.stderr, flush=True)
            return None
        return found

    def _finish(self) -> bool:
        """Nobody leaves before all have committed the last step."""
        try:
            everybody_is_here()
        except Exception as error:
            if not self._absorb(error, self.done):
                raise
            return False
        session = self._s
        if not session.control.complete():
            return False
        session.losses.flush()
        session.beat.phase(Phase.DONE)
        session.control.send(WorkerDone(epoch=session.roster.epoch, step=self.done))
        session.control.flush(FAREWELL_S)
        return True

    # ---------------------------------------------------------------- one step

    def begin(self, step: Step) -> None:
        session = self._s
        session.groups.mark()
        session.beat.phase(Phase.STEP)
        if self._gated and session.cuda:
            self._await_replica()

    def commit(self, step: Step, loss: Any) -> None:
        session = self._s
        self._suffer_injected(step)
        problem = self._last_words_together()
        epoch = session.roster.epoch
        self.done = step.index + 1
        self._live = Version(self.done, epoch)
        session.state.touched = False
        # In this order: a process killed in between leaves a second, equal line when the step is done again. The other
        # way round its successor would go on behind a step whose loss nobody has written.
        session.losses.write(step.index, epoch, session.readable(loss))
        self._save(self._live)
        session.beat.commit(self.done)
        if problem is not None:
            step.committed = True
            raise problem
        if self._advance_due:
            self._advance_due = False
            session.control.send(WorkerAdvanced(epoch=epoch, step=self.done))

    def _last_words_together(self) -> Exception | None:
        """What ranks do together before a commit.

        The step is complete here already. Where the step before can be had back it is done again after a failure,
        exactly as it was. Where it cannot (no snapshots), the failure is returned: commit first, then raise it.
        """
        session = self._s
        if session.cuda:
            # An aborted NCCL kernel ends early and leaves sums half done; what the stream still holds may rest on it.
            session.await_device()
            if self.interrupted():
                raise CommunicationAborted("the epoch ended before the device had finished this step")
        try:
            if session.groups.world_ops_since_mark() == 0:
                everybody_is_here()  # ranks must not drift apart by more than one step
            session.state.settle_buckets()
        except Exception as error:
            if session.roster.snapshot_every == 1:
                raise
            return error
        return None

    def interrupted(self) -> bool:
        return self._s.control.pending is not None or self._s.groups.aborted

    def failed(self, step: Step, error: Exception) -> bool:
        """A user's exception is reported and goes on; a fault of communication ends here."""
        if not isinstance(error, (StepMisused, StateNotPlain, InjectedFault)) and self._absorb(error, step.index):
            return True
        self._s.report_failure(error, step.index)
        return False

    def _absorb(self, error: Exception, step: int) -> bool:
        """Whether a newer epoch explains this exception; waits for one if communication is broken."""
        session = self._s
        if not self.interrupted():
            if session.groups.broken is None:
                return False
            session.beat.phase(Phase.RECOVERING)
            session.control.send(WorkerBroken(epoch=session.roster.epoch, step=step, error=session.groups.broken[:500]))
        if session.control.pending is None and not session.control.wait(BROKEN_WAIT_S):
            print(
                f"keepstep: rank {session.rank}: communication broke and nobody opened another epoch within "
                f"{BROKEN_WAIT_S:g} s; giving up",
                file=sys.stderr,
                flush=True,
            )
            return False
        session.beat.freed()
        session.losses.drop()
        return True

    def _suffer_injected(self, step: Step) -> None:
        control = self._s.control
        if control.slow_down_s > 0:
            seconds, control.slow_down_s = control.slow_down_s, 0.0
            time.sleep(seconds)
        if control.raise_injected:
            control.raise_injected = False
            raise InjectedFault(f"injected into step {step.index} of rank {self._s.rank} on request")

    def _save(self, version: Version) -> None:
        session, every = self._s, self._s.roster.snapshot_every
        full = every > 0 and version.step % every == 0
        if full or (version.step == self._start and every > 0):
            session.snapshots.save(session.state, version, key=session.roster.key, full=True, ring=session.has_buddy)
        if every != 1 and (every > 1 or session.state.replicated):
            session.snapshots.save(session.state, version, key=session.roster.key, full=False, ring=False)

    def _await_replica(self) -> None:
        """A step may change parameters everywhere only when the step before it is safe on another node."""
        session = self._s
        if session.snapshots.replicated():
            self._gap_said, self._gap_until = False, 0.0
            return
        if time.monotonic() < self._gap_until:
            return
        deadline = time.monotonic() + REPLICA_WAIT_S
        while not session.snapshots.replicated():
            if session.control.pending is not None:
                return
            if time.monotonic() > deadline:
                self._gap_until = time.monotonic() + REPLICA_AGAIN_S
                if not self._gap_said:
                    self._gap_said = True
                    print(
                        f"keepstep: rank {session.rank} step {self.done}: no copy on another node after "
                        f"{REPLICA_WAIT_S:g} s; training goes on, losing this node now would lose the step",
                        file=sys.stderr,
                        flush=True,
                    )
                return
            time.sleep(REPLICA_POLL_S)

    # ---------------------------------------------------------------- recovery

    def _overtaken(self) -> bool:
        """A newer epoch waits: whatever is under way for the present one is in vain."""
        return self._s.control.pending is not None

    def _recover(self, *, first: bool = False) -> None:
        """Enter the newest epoch; a fault meanwhile means that there is an even newer one."""
        session = self._s
        session.beat.phase(Phase.RECOVERING)
        seat, aborts = session.take_seat(first=first)
        while True:
            try:
                self._recover_into(seat, aborts)
                return
            except Exception as error:
                self._explain(seat.roster, error)
            seat, aborts = session.take_seat(first=False)

    def _explain(self, roster: Roster, error: Exception) -> None:
        """Say what went wrong in this epoch and wait for the next; raise where none comes."""
        session = self._s
        if session.control.pending is not None:
            return
        own = isinstance(error, (CannotResume, StateMismatch, StateNotPlain, FrameworkUnsupported, GroupsUnsupported))
        if own or (session.groups.broken is None and not isinstance(error, (RuntimeError, OSError))):
            why = f"rank {session.rank}: {type(error).__name__}: {error}"[:500]
            session.control.send(WorkerCannotResume(epoch=roster.epoch, why=why))
        else:
            why = session.groups.broken or f"{type(error).__name__}: {error}"
            session.control.send(WorkerBroken(epoch=roster.epoch, step=self.done, error=why[:500]))
        print(f"keepstep: rank {session.rank}: recovery into {roster.key} failed: {error}", file=sys.stderr, flush=True)
        if not session.control.wait(BROKEN_WAIT_S):
            session.report_failure(error, self.done)
            raise error

    def _recover_into(self, seat: TakeSeat, aborts: int) -> None:
        session, roster = self._s, seat.roster
        newcomer = session.groups.stand_in
        clock = _Phases(session.control.announced_ns)
        session.enter(roster, self.done)
        clock.lap("abort")
        session.beat.phase(Phase.RECOVERING)
        if not newcomer:
            reset_after_abort(list(session.state.modules.values()), list(session.state.optimizers.values()))
        clock.lap("reset")
        session.groups.rebuild(
            store_host=roster.store_host,
            store_port=roster.store_port,
            key=roster.key,
            rank=session.rank,
            world_size=roster.world_size,
            limit_s=REBUILD_LIMIT_S,
            aborts=aborts,
        )
        session.control.send(WorkerJoined(epoch=roster.epoch, ms=clock.lap("swap")))
        found = self._restorer.meet(roster, session.rank, self._live, newcomer=newcomer or self._live is None)
        if found.version is None:
            raise CannotResume(found.why)
        clock.phases["agree"] = self._restorer.agree_ms
        clock.lap("restore", less=self._restorer.agree_ms)
        if found.version not in session.snapshots.private():
            self._save(found.version)
        self._go_on(roster, found, clock.phases)

    def _go_on(self, roster: Roster, found: Found, phases: dict[str, float]) -> None:
        """This rank stands on the common step; training begins."""
        session = self._s
        assert found.version is not None
        self._live = found.version
        self.done = found.version.step
        session.state.touched = False
        self._gap_until = 0.0
        self._gated = needs_replica(roster.snapshot_every, session.state.replicated) and session.has_buddy
        session.groups.before_reduce = self._await_replica if self._gated and not session.cuda else None
        session.beat.epoch(roster.epoch, self.done)
        session.control.send(
            WorkerResumed(
                epoch=roster.epoch,
                step=self.done,
                newest=max(found.newest, self.done),
                source=found.source,
                phases=phases,
            )
        )
        self._advance_due = True


class _Phases:
    """Milliseconds per phase, from the announcement of the epoch on."""

    def __init__(self, announced_ns: int) -> None:
        self.phases: dict[str, float] = {}
        self._last = announced_ns or time.monotonic_ns()

    def lap(self, name: str, less: float = 0.0) -> float:
        now = time.monotonic_ns()
        self.phases[name] = round(max(0.0, (now - self._last) / 1e6 - less), 3)
        self._last = now
        return self.phases[name]
