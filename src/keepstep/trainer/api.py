"""The trainer SDK: ``ks = keepstep.init()``, ``ks.register(...)``, ``for step in ks.steps(total): with step: ...``.

The same lines run under ``keepstep run`` (a lost rank is replaced while this process lives on), under ``torchrun``,
and alone; where nobody could replace a rank they only count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from keepstep import __version__
from keepstep.model import env, exits
from keepstep.model.beat import Phase
from keepstep.trainer.exceptions import StepMisused
from keepstep.trainer.steps import PlainLoop, Step

if TYPE_CHECKING:
    import torch

    from keepstep.trainer.guard import Guard
    from keepstep.trainer.join_torch import Identity
    from keepstep.trainer.level1_torch import Level1
    from keepstep.trainer.options import Checkpoint
    from keepstep.trainer.session_torch import Session
    from keepstep.trainer.state_torch import State
    from keepstep.trainer.steps import Rewinding
    from keepstep.trainer.told import Told

_PHASES = {
    "evaluation": Phase.EVALUATION,
    "checkpoint": Phase.CHECKPOINT,
    "compile": Phase.COMPILE,
    "setup": Phase.SETUP,
    "other": Phase.OTHER,
}
_made: Keepstep | None = None


class Keepstep:
    """This process's place in the job. Made by ``keepstep.init``."""

    def __init__(
        self, who: Identity, session: Session | None, alone: Level1 | None = None, guard: Guard | None = None
    ) -> None:
        from keepstep.trainer.join_torch import device_named

        self.rank: int = who.rank
        self.local_rank: int = who.local_rank
        self.world_size: int = who.world_size
        self.device: torch.device = device_named(who.device)
        self.level: int = 2 if session is not None else 1 if alone is not None else 0
        """2, under ``keepstep run``: a lost rank is replaced while this process lives on. 1, with checkpoints under
        torchrun: all ranks are started again and go on from the last snapshot. 0: the loop only counts."""
        self._session, self._alone, self._guard = session, alone, guard
        self._own = _own_state() if guard is not None and session is None and alone is None else None
        self._looping = False

    def register(self, *, replicated: bool | None = None, **objects: Any) -> None:
        """Name what training changes: models, optimizers, schedulers, scalers, data, anything with a ``state_dict``.

        Args:
            replicated: whether parameters and optimizer state are the same on all ranks, so that any rank's copy
                serves all. ``None``: yes for DistributedDataParallel without a sharded optimizer, else no.
            objects: each may also be a list of such objects.
        """
        if self._looping:
            raise StepMisused("register() comes before ks.steps(): a newcomer could not know what was added later")
        if self._state is not None:
            from keepstep.trainer.follow_torch import followed

            ready = {name: followed(name, item) for name, item in objects.items()}
            self._state.register(ready, replicated)

    def steps(self, total: int, *, start: int = 0) -> Iterator[Step]:
        """Yield the steps ``start`` to ``total - 1``; goes round again from the common step after a recovery.

        Args:
            start: where a script that has loaded its own checkpoint begins.
        """
        if self._looping:
            raise StepMisused("ks.steps() is already in use; one loop per process")
        if not 0 <= start <= total:
            raise StepMisused(f"ks.steps({total}, start={start}): start must lie between 0 and {total}")
        self._looping = True
        loop = self._loop(total, start)
        return loop.run() if self._guard is None else self._guarded(loop, self._guard, total)

    def _loop(self, total: int, start: int) -> Rewinding:
        if self._alone is not None:
            from keepstep.trainer.level1_loop_torch import Level1Loop

            return Level1Loop(self._alone, total, start)
        if self._session is None:
            if self._own is not None:
                self._own.bind()
            return PlainLoop(total, start)
        from keepstep.trainer.loop_torch import Loop

        return Loop(self._session, total, start)

    def _guarded(self, loop: Rewinding, settings: Guard, total: int) -> Iterator[Step]:
        from keepstep.trainer.guard_torch import Guardian
        from keepstep.trainer.readings_torch import require_host_sums

        if self._own is not None:
            require_host_sums()
        part, state = self._session or self._alone, self._state
        assert state is not None
        every = part.snapshots.config.policy.every if part is not None and part.snapshots.config.durable else 0
        guardian = Guardian(
            settings,
            state,
            rank=self.rank,
            epoch=lambda: part.roster.epoch if part is not None else 0,
            rewind=loop.rewind,
            tell=self._tell,
            quiet=part.snapshots.settle if part is not None else lambda: None,
            replaceable=self._session is not None,
            durable=lambda step: every > 0 and (step % every == 0 or step == total),
        )
        for step in loop.run():
            step.watcher = guardian
            yield step

    def _tell(self, told: Told) -> None:
        from keepstep.model.wire import WorkerGuarded
        from keepstep.trainer.told import printed

        printed(told)
        if self._session is not None:
            self._session.control.send(WorkerGuarded(**{name: getattr(told, name) for name in told.__struct_fields__}))

    @property
    def _state(self) -> State | None:
        part = self._session or self._alone
        return part.state if part is not None else self._own

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what the rank is doing when it is not a step: hang limits are wider for ``evaluation`` and the like."""
        if name not in _PHASES:
            raise StepMisused(f"phase {name!r} is not known; choose one of {', '.join(_PHASES)}")
        if self._session is None:
            yield
            return
        beat = self._session.beat
        before = beat.current
        beat.phase(_PHASES[name])
        try:
            yield
        finally:
            beat.phase(before)


def init(
    *,
    timeout: float | timedelta | None = None,
    checkpoint: Checkpoint | None = None,
    guard: Guard | None = None,
) -> Keepstep:
    """Join the job and make the process groups; call it once, before the model is built.

    Args:
        checkpoint: snapshots and durable generations without ``keepstep run`` (level 1); ``KEEPSTEP_CKPT_DIR`` and its
            kin ask for the same. Under ``keepstep run`` its flags decide.
        guard: look at losses, gradient norms and replicas; ``KEEPSTEP_GUARD=observe`` or ``on`` asks for the same.
        timeout: of collectives, in seconds; torch's default where ``None``. It is only the last resort here: a broken
            collective is ended as soon as the fault is known.
    """
    global _made
    if _made is not None:
        return _made
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    watch = _settled(guard)
    if env.SLOT in os.environ:
        import keepstep.trainer.loop_torch  # noqa: F401 - while a standby has time: later the others would wait for it
        from keepstep.trainer.session_torch import join

        session = join(__version__, limit)
        _made = Keepstep(session.who, session, guard=watch)
        if checkpoint is not None and session.who.rank == 0:
            ours = "--ckpt-dir and its kin decide"
            print(f"keepstep: checkpoint= has no effect under keepstep run, where {ours}", file=sys.stderr, flush=True)
    else:
        from keepstep.trainer.join_torch import join_plain

        who = join_plain(limit)
        _made = Keepstep(who, None, _level1(who, checkpoint), watch)
    return _made


def _settled(asked: Guard | None) -> Guard | None:
    """The guard's settings that hold, if there is one."""
    from keepstep.checkpoint.exceptions import BadSetting
    from keepstep.trainer import guard

    try:
        return guard.settle(asked, os.environ)
    except BadSetting as error:
        if asked is not None:
            raise  # the script's own argument: its author wants to see the line
        print(f"keepstep: {error}", file=sys.stderr, flush=True)
        raise SystemExit(exits.BAD_CONFIG) from None


def _own_state() -> State:
    from keepstep.trainer.state_torch import State

    return State()


def _level1(who: Identity, asked: Checkpoint | None) -> Level1 | None:
    """The checkpoint engine alone, where the script or its environment asks for it."""
    from keepstep.trainer import options

    if asked is None and not options.wanted(os.environ):
        return None
    from keepstep.checkpoint.exceptions import BadSetting
    from keepstep.trainer.level1_torch import Level1

    try:
        return Level1(who, asked or options.Checkpoint())
    except BadSetting as error:
        if asked is not None:
            raise  # the script's own argument: its author wants to see the line
        print(f"keepstep: {error}", file=sys.stderr, flush=True)
        raise SystemExit(exits.BAD_CONFIG) from None


def pause(name: str) -> AbstractContextManager[None]:
    """``ks.phase(name)`` for code that does not hold ``ks``; nothing where nobody has joined a job."""
    return nullcontext() if _made is None else _made.phase(name)
