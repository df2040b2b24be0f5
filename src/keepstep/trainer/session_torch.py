"""Session: what one process under an agent holds from `init` to its end, and the few things it can do with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from keepstep.checkpoint import room, title
from keepstep.checkpoint.exceptions import NotEnoughMemory
from keepstep.model import env, exits
from keepstep.model.beat import Phase
from keepstep.model.facts import UserError
from keepstep.model.topology import Roster
from keepstep.model.wire import TakeSeat, WorkerFailed
from keepstep.trainer.beat import Beat
from keepstep.trainer.control import Control
from keepstep.trainer.exceptions import CannotResume
from keepstep.trainer.flight import Flight
from keepstep.trainer.groups_torch import GROUPS, Groups
from keepstep.trainer.join_torch import Identity, join_roster
from keepstep.trainer.losses import LossFile
from keepstep.trainer.orphan import DEFAULT_GRACE_S, Orphan
from keepstep.trainer.recorder_torch import recorded, switch_on
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.spent import SPENT
from keepstep.trainer.state_torch import State
from keepstep.trainer.steps import describe_error

FAREWELL_S = 1.0
"""How long a process's last words may take to leave before it goes on to its end."""


class Session:
    """Made by ``join``."""

    def __init__(
        self,
        *,
        control: Control,
        beat: Beat,
        groups: Groups,
        seat: TakeSeat,
        who: Identity,
        node_dir: Path,
        run_dir: Path,
    ) -> None:
        self.control, self.beat, self.groups, self.who = control, beat, groups, who
        self.roster: Roster = seat.roster
        self.rank = int(seat.rank)
        self.token = _token()
        self.snap_dir = node_dir / env.SNAP_DIR
        self.state = State()
        self.snapshots = Snapshots(self.snap_dir, self.rank, node_dir / env.KEEPER_SOCKET)
        self.losses = LossFile(run_dir / env.LOSS_DIR / f"rank{self.rank}.jsonl")
        self._node_dir, self._seat, self._reported = node_dir, seat, False

    @property
    def cuda(self) -> bool:
        return self.who.device.startswith("cuda")

    @property
    def has_buddy(self) -> bool:
        seat = self.roster.seat_of(self.rank)
        place = self.roster.place(seat.node) if seat else None
        return place is not None and place.buddy is not None

    def take_seat(self, *, first: bool) -> tuple[TakeSeat, int]:
        """The newest seat; for a newcomer's first arrival the one it was let in with, if there is none newer."""
        aborts = self.groups.aborts
        taken = self.control.take(lambda: self.groups.aborts)
        if taken is None:
            if not first:
                raise CannotResume(f"rank {self.rank}: no newer epoch to enter")
            taken = self._seat, aborts
        if taken[0].rank != self.rank:
            raise CannotResume(
                f"rank {self.rank} was offered the seat of rank {taken[0].rank}; a process keeps its rank"
            )
        return taken

    def enter(self, roster: Roster, step: int) -> None:
        self.roster = roster
        self.beat.epoch(roster.epoch, step)

    def check_room(self) -> None:
        """Refuse before the run what would run out of memory during it."""
        config = self.snapshots.config
        if self.roster.snapshot_every == 0 and not config.durable:
            return
        seat = self.roster.seat_of(self.rank)
        assert seat is not None
        replica = self._node_dir / env.REPLICA_DIR
        try:
            room.check(
                version_bytes=self.state.expected_bytes(),
                ranks=len(self.roster.seats_on(seat.node)),
                has_buddy=self.has_buddy,
                room=room.free(self.snap_dir) + room.used(self.snap_dir, replica),
                durable=config.durable,
                full_every=config.policy.full_every,
            )
        except NotEnoughMemory as error:
            raise self.refuse(error, exits.PREFLIGHT) from None

    def refuse(self, error: Exception, code: int) -> SystemExit:
        """Say why this process cannot take part, in a sentence; the caller raises what this returns.

        It is no fault of the script's lines, and would be the same at the next try: so no traceback, no place.
        """
        print(f"keepstep: {error}", file=sys.stderr, flush=True)
        said = UserError(type=type(error).__name__, message=str(error)[:2000])
        if not self._reported:
            self._reported = True
            self.control.send(WorkerFailed(error=said))
            self.control.flush(FAREWELL_S)
        return SystemExit(code)

    def readable(self, loss: Any) -> Any:
        """A number, or a promise of one: reading a loss from a device now would wait for the device."""
        if not isinstance(loss, torch.Tensor):
            return loss
        value = loss.detach()
        if value.device.type != "cuda":
            return float(value)
        host = torch.empty((), dtype=value.dtype, pin_memory=True)
        host.copy_(value.reshape(()), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def read() -> float:
            copied.synchronize()
            return float(host)

        return read

    def await_device(self) -> None:
        """Until everything that this process has given to its device is done."""
        torch.cuda.current_stream().synchronize()

    def report_failure(self, error: BaseException, step: int | None) -> None:
        """Tell the agent, once, which exception is about to end this process."""
        if self._reported:
            return
        self._reported = True
        consequence = self.groups.aborted or self.groups.broken is not None
        self.control.send(WorkerFailed(error=describe_error(error, step=step, consequence=consequence)))
        self.control.flush(FAREWELL_S)

    def watch_uncaught(self) -> None:
        """Exceptions outside of steps are reported too, before Python prints them."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if issubclass(kind, Exception):
                self.report_failure(error, None)
            before(kind, error, trace)

        sys.excepthook = hook


def join(version: str, timeout: timedelta | None) -> Session:
    """Connect to the agent, wait for a seat (a standby parks here), and take it.

    Raises:
        SystemExit: the agent refuses this process, or there has been none for too long.
    """
    node_dir, run_dir = Path(_need(env.NODE_DIR)), Path(_need(env.RUN_DIR))
    slot = _need(env.SLOT)
    beat = Beat(node_dir / env.BEAT_DIR / slot)
    grace_s = float(os.environ.get(env.ORPHAN_GRACE, DEFAULT_GRACE_S))
    orphan = Orphan(node_dir / env.SHIM_SOCKET, grace_s)
    control = Control(node_dir / env.AGENT_SOCKET, slot, version, GROUPS.abort, orphan)
    waiting = Phase.PARKED if os.environ.get(env.ROLE) == "standby" else Phase.STARTING
    beat.phase(waiting)
    control.start()
    taken = _wait_for_seat(control, lambda: beat.phase(waiting))
    roster = taken.roster
    seat = roster.seat_of(taken.rank)
    if seat is None:
        raise CannotResume(f"the roster {roster.key} has no rank {taken.rank}")
    title.show(f"rank {taken.rank}", f"r{taken.rank}", job=os.environ.get(env.JOB, "?"), program=sys.argv[0])
    beat.epoch(roster.epoch, 0)
    beat.phase(Phase.SETUP)
    GROUPS.on_progress = beat.collective
    GROUPS.tell_positions(Flight(node_dir / env.FLIGHT_DIR / slot))
    SPENT.watch_collections()
    if torch.cuda.is_available():  # there the groups are torch's own, and so is what tells where they stand
        switch_on()
        control.positions = lambda: recorded(GROUPS.members())
    who, groups = join_roster(roster, seat, stand_in=roster.mode == "in_process", timeout=timeout)
    session = Session(
        control=control, beat=beat, groups=groups, seat=taken, who=who, node_dir=node_dir, run_dir=run_dir
    )
    session.watch_uncaught()
    return session


def _wait_for_seat(control: Control, alive: Callable[[], None]) -> TakeSeat:
    control.wait(None, alive)
    if control.refused is not None:
        raise SystemExit(control.refused.code or exits.BAD_CONFIG)
    taken = control.take(_no_aborts)
    if taken is None:
        print("keepstep: no agent has been there for too long; this process ends", file=sys.stderr, flush=True)
        raise SystemExit(1)
    return taken[0]


_no_aborts: Callable[[], int] = lambda: 0  # noqa: E731


def _need(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise CannotResume(f"{name} is not set although {env.SLOT} is; start the script with `keepstep run`")
    return value


def _token() -> str:
    path = os.environ.get(env.TOKEN_FILE)
    return Path(path).read_text().strip() if path else ""
