"""The loop that recovers: trains, notices that an epoch is over, enters the next one, and goes on from the common step.

A survivor comes here by an exception that `with step` swallowed; a newcomer comes here from its set-up, with
stand-in groups; both then walk the same way: reset, rebuild, agree, restore.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.slot import Version
from keepstep.model import exits
from keepstep.model.beat import Phase
from keepstep.model.topology import Roster
from keepstep.model.wire import (
    TakeSeat,
    WorkerAdvanced,
    WorkerDone,
    WorkerJoined,
    WorkerResumed,
)
from keepstep.trainer import broken
from keepstep.trainer.exceptions import (
    CannotResume,
    CommunicationAborted,
    InjectedFault,
    StateMismatch,
    StateNotPlain,
    StepMisused,
)
from keepstep.trainer.exchange_torch import everybody
from keepstep.trainer.final import say_if_over, until_durable
from keepstep.trainer.frameworks_torch import reset_after_abort
from keepstep.trainer.gate import Gate, needs_replica
from keepstep.trainer.pacing_torch import Pacing
from keepstep.trainer.phases import Phases
from keepstep.trainer.recovery_torch import Found, Restorer, everybody_is_here
from keepstep.trainer.saver import Saver
from keepstep.trainer.spent import SPENT
from keepstep.trainer.steps import Step, require_entered

if TYPE_CHECKING:
    from keepstep.trainer.session_torch import Session

REBUILD_LIMIT_S = 600.0
"""Far above the controller's own limit, which ends a rebuild earlier by opening another epoch."""
FAREWELL_S = 1.0
"""How long the word that the loop is complete may take to leave; the script may end right after it."""


class Loop:
    """One ``ks.steps(total)`` under an agent."""

    def __init__(self, session: Session, total: int, start: int) -> None:
        self._s = session
        self._total, self._start = total, start
        self.done = start
        """Steps committed."""
        self._live: Version | None = None
        self._written: Version | None = None
        self._advance_due = False
        self._gated = False
        self._replicated = False
        self._pacing = Pacing(session.snapshots, session.rank, total)
        self._gate = Gate(session.snapshots, session.rank, self._overtaken)
        self._saver = Saver(session.snapshots, session.rank)
        self._restorer = Restorer(
            session.state, session.snapshots, session.token, session.snap_dir, self._overtaken, session.beat
        )

    # ---------------------------------------------------------------- the loop

    def run(self) -> Iterator[Step]:
        self._enter()
        while True:
            self._s.control.boundary()
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
        session.snapshots.watch(session.state)
        roster = session.roster
        self._pacing.restart(self._start, roster.snapshot_every)
        if session.groups.stand_in:
            self._recover(first=True)
            self._reserve(later=True)
            return
        self._reserve()
        try:
            found = self._resume(roster)
        except Exception as error:
            if self._absorb(error, self.done):
                return
            if isinstance(error, (CannotResume, StateMismatch)):
                raise session.refuse(error, exits.BAD_CONFIG) from None
            raise
        if found is not None and found.version is not None:
            say_if_over(found.version.step, self._total, session.rank)
            self._go_on(roster, found, {})
            return
        session.snapshots.forget_all()
        self._live = Version(self._start, roster.epoch)
        self._save(self._live)
        self._go_on(roster, Found(version=self._live, newest=self._start, source="initial"), {})

    def _reserve(self, *, later: bool = False) -> None:
        """The first snapshot must not pay for making its memory."""
        if self._pacing.every > 0 or self._s.snapshots.config.durable:
            self._s.snapshots.reserve(self._s.state.expected_bytes(), later=later)

    def _resume(self, roster: Roster) -> Found | None:
        """Where all have been started: the newest step that durable tiers hold and, after a restart, the keepers."""
        session, restart = self._s, roster.mode == "restart"
        if not restart:
            session.snapshots.forget_all()
            if not (session.snapshots.config.durable and session.snapshots.config.policy.resume):
                return None
        session.beat.phase(Phase.RECOVERING)  # no fixed time fits a restore: it may go on for as long as it moves
        found = self._restorer.meet(roster, session.rank, None, newcomer=restart, all_new=True)
        session.beat.phase(Phase.SETUP)
        if found.version is None or found.version.step < self._start:
            if restart or found.version is not None:
                why = found.why or "it is newer than the newest common snapshot"
                print(f"keepstep: rank {session.rank} starts at step {self._start}: {why}", file=sys.stderr, flush=True)
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
        session.snapshots.settle()
        if session.snapshots.config.durable and not self._await_durable():
            return False
        if not session.control.complete():
            return False
        session.losses.flush()
        session.beat.phase(Phase.DONE)
        session.control.send(WorkerDone(epoch=session.roster.epoch, step=self.done))
        session.control.flush(FAREWELL_S)
        return True

    def _await_durable(self) -> bool:
        """Whether the loop may end; not while a recovery waits, which may need this process's last state."""
        session = self._s
        if self._live is not None and self._live != self._written:
            session.beat.phase(Phase.DONE)
            kept = session.snapshots
            until_durable(kept.pins, self._live, archiver=kept.archiver, rank=session.rank, stop=self._overtaken)
        return not self._overtaken()

    # ---------------------------------------------------------------- one step

    def begin(self, step: Step) -> None:
        session = self._s
        session.groups.mark()
        session.beat.phase(Phase.STEP)

    def commit(self, step: Step, loss: Any) -> None:
        session = self._s
        broken.suffer_injected(session, step.index)
        session.snapshots.await_copy()  # before the last words: once they are said, others overwrite the step before
        if self._gated and session.cuda:
            self._await_replica()  # for the same reason; nothing of ours is called before NCCL's reductions
        problem = self._last_words_together()
        epoch = session.roster.epoch
        self.done = step.index + 1
        self._live = Version(self.done, epoch)
        session.state.touched = False
        # In this order: a process killed in between leaves a second, equal line when the step is done again. The other
        # way round its successor would go on behind a step whose loss nobody has written.
        session.losses.write(step.index, epoch, session.readable(loss))
        self._pacing.step()
        self._save(self._live)
        SPENT.save_ns = int(session.snapshots.waited_s * 1e9)
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
            sharded = self._pacing.every > 0 and not self._replicated
            if sharded or session.groups.world_ops_since_mark() == 0:  # else ranks drift apart by more than one step
                common = everybody(session.snapshots.whole)
                if sharded and not common and self._pacing.full(self.done + 1):
                    session.snapshots.forget_newest()
            session.state.settle_buckets()
            self._pacing.agree_to_hold(self.done + 1)
            if self._pacing.agree(self.done + 1):
                self._set_gate()
        except Exception as error:
            if self._pacing.every == 1:
                raise
            return error
        return None

    def interrupted(self) -> bool:
        return self._s.control.pending is not None or self._s.groups.aborted

    def torn(self) -> bool:
        return self.interrupted() or self._s.groups.broken is not None

    def failed(self, step: Step, error: Exception) -> bool:
        """A user's exception is reported and goes on; a fault of communication ends here."""
        if not isinstance(error, (StepMisused, StateNotPlain, InjectedFault)) and self._absorb(error, step.index):
            return True
        self._s.report_failure(error, step.index)
        return False

    def _absorb(self, error: Exception, step: int) -> bool:
        """Whether a newer epoch explains this exception; waits for one if communication is broken."""
        if self._s.groups.broken is not None:
            self._s.control.boundary()  # others have left for it
        return broken.explained(self._s, step, interrupted=self.interrupted())

    def _save(self, version: Version) -> None:
        session, every, step = self._s, self._pacing.every, version.step
        full = self._pacing.full(step) or (step == self._start and every > 0)
        if full:
            if session.has_buddy and not self._gated:
                self._gate.look(step)
            self._saver.save(
                session.state,
                version,
                key=session.roster.key,
                full=True,
                ring=True,
                world_size=session.roster.world_size,
                overlap=self._pacing.overlap and step < self._total,  # nothing comes after the last one
                pin=step == self._pacing.held,
            )
        elif every != 1 and (every > 1 or session.state.replicated):
            self._saver.save(session.state, version, key=session.roster.key, full=False, ring=False)
        self._pacing.saved(full=full)

    def _before_reduction(self) -> None:
        """What the step before must have come to before this one can be committed anywhere.

        Sharded state that is still being copied is nowhere else: no rank may give up the step before that. A live
        replica has it all, so there only the copy on another node counts.
        """
        session = self._s
        if not self._replicated:
            session.snapshots.await_copy()
        if self._gated:
            self._await_replica()

    def _await_replica(self) -> None:
        self._gate.wait(self.done)
        if self._replicated and self._pacing.too_dear(self._gate):
            self._gated = False

    def _set_gate(self) -> None:
        session = self._s
        self._replicated = session.state.replicated
        self._gated = needs_replica(self._pacing.every, self._replicated) and session.has_buddy
        waits = self._gated or (self._pacing.every > 0 and not self._replicated)
        session.groups.before_reduce = self._before_reduction if waits and not session.cuda else None

    def rewind(self, step: int) -> None:
        """The guard has put the state of ``step`` back on all ranks: what was saved of later ones is untrue."""
        session = self._s
        version = Version(step, session.roster.epoch)
        session.snapshots.forget_after(version)
        session.losses.drop()
        session.beat.epoch(session.roster.epoch, step)
        self._live, self.done = version, step
        session.state.touched = False
        self._pacing.restart(step, session.roster.snapshot_every)
        self._pacing.held = -1
        self._gate.restart()
        if version not in session.snapshots.full():
            self._save(version)

    # ---------------------------------------------------------------- recovery

    def _overtaken(self) -> bool:
        """A newer epoch waits: whatever is under way for the present one is in vain."""
        return self._s.control.pending is not None

    def _recover(self, *, first: bool = False) -> None:
        """Enter the newest epoch; a fault meanwhile means that there is an even newer one."""
        session = self._s
        session.beat.phase(Phase.RECOVERING)
        session.snapshots.settle()
        seat, aborts = session.take_seat(first=first)
        while True:
            try:
                self._recover_into(seat, aborts)
                return
            except Exception as error:
                broken.in_recovery(self._s, seat.roster, error, self.done)
            seat, aborts = session.take_seat(first=False)

    def _recover_into(self, seat: TakeSeat, aborts: int) -> None:
        session, roster = self._s, seat.roster
        newcomer = session.groups.stand_in
        clock = Phases(session.control.announced_ns)
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
        self._pacing.restart(found.version.step, roster.snapshot_every)
        if due := self._pacing.durable(found.version.step):
            self._pacing.held = found.version.step
        if found.version not in session.snapshots.private() or (due and found.version not in session.snapshots.full()):
            self._save(found.version)
        elif due and found.source == "peer":
            session.snapshots.pins.hold(found.version)  # whether its archiver had written it, the lost node alone knew
        self._go_on(roster, found, clock.phases)

    def _go_on(self, roster: Roster, found: Found, phases: dict[str, float]) -> None:
        """This rank stands on the common step; training begins."""
        session = self._s
        assert found.version is not None
        self._live = found.version
        self._written = found.version if found.durable else None
        self.done = found.version.step
        session.state.touched = False
        self._pacing.restart(self.done, roster.snapshot_every)
        self._gate.restart()
        self._set_gate()
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
