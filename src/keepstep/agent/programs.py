"""Programs of a node: starts workers, standbys and helpers through the shim, and turns exits into facts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep.agent import environ, proc
from keepstep.agent.beats import committed, create_beat
from keepstep.agent.console import Console
from keepstep.agent.exceptions import SpawnRefused
from keepstep.agent.files import tail_lines
from keepstep.agent.first_error import first_error, size
from keepstep.agent.node import Node
from keepstep.agent.positions import forget_positions
from keepstep.agent.shimlink import ShimLink
from keepstep.agent.slots import Role, Slot
from keepstep.agent.watch import Watch
from keepstep.agent.zygote import cuda_visible
from keepstep.model.env import BEAT_DIR
from keepstep.model.facts import StandbyGone, UserError, WorkerExited
from keepstep.model.ids import Epoch, Rank, SlotId, show_epoch
from keepstep.model.topology import Member, Roster

STDERR_LINES = 20
STANDBY_FAILURES = 3
"""Standbys that end before they park, in a row, before this node stops trying: until a new order, or a new epoch."""


class OnFault(Protocol):
    def __call__(self, cause: WorkerExited, /, *, trained: bool) -> None: ...


class Programs:
    def __init__(self, node: Node, link: ShimLink, console: Console) -> None:
        self._node = node
        self._link = link
        self._console = console
        self._watch = Watch(link, self._exited)
        self._changed = asyncio.Event()
        self._refill: asyncio.Task[None] | None = None
        self._failures = 0
        self._resumed = node.resumed
        self._awaited: set[SlotId] = set()
        """Starts for whose outcome somebody here waits."""
        self.on_unstarted: Callable[[], None] = lambda: None
        """A worker that was asked for will not come: the roster has to ask again."""
        self.on_fault: OnFault = lambda cause, /, *, trained: None
        self.on_helper_gone: Callable[[Slot], None] = lambda slot: None
        link.on_state = self._adopt_late
        link.on_started = self._started
        link.on_refused = self._refused

    # ------------------------------------------------------------ starting

    async def start_worker(self, roster: Roster, seat: Member) -> None:
        """Start a process for a seat of the roster."""
        name = f"rank_{seat.rank}"
        folder = self._node.log_dir(roster.attempt)
        slot = Slot(
            id=seat.slot,
            role="worker",
            rank=seat.rank,
            local_rank=seat.local_rank,
            epoch=roster.epoch,
            out=str(folder / f"{name}.out"),
            err=str(folder / f"{name}.err"),
            error_file=str(folder / f"{name}.{seat.slot}.error.json"),
        )
        config = self._node.config
        env = environ.worker_env(config, os.environ, roster, seat, slot.error_file)
        await self._start(slot, self._request(slot, env))

    async def start_helper(self, role: Role, module: str, args: list[str], *, fork: bool) -> Slot:
        """Start one of our own modules (keeper, store) beside the workers."""
        folder = self._node.log_dir()
        slot = Slot(
            id=self._node.table.new_name(role),
            role=role,
            out=str(folder / f"{role}.out"),
            err=str(folder / f"{role}.err"),
        )
        request = {
            "id": slot.id,
            "start": "fork" if fork else "spawn",
            "kind": "module",
            "target": module,
            "args": args,
            "env": environ.service_env(self._node.config, os.environ),
            "cwd": self._node.config.node_dir,
            "out": slot.out,
            "err": slot.err,
        }
        await self._start(slot, request)
        return slot

    def forgive_standbys(self, why: str) -> None:
        """What kept standbys from parking may be over: try again."""
        if self._failures >= STANDBY_FAILURES:
            self._node.say(f"standbys are started here again: {why}")
        self._failures = 0
        self.refill_soon()

    def resumed(self, epoch: Epoch) -> None:
        """A rank of this node holds its state in ``epoch``."""
        if epoch > self._resumed:
            self._resumed = epoch
            self.forgive_standbys(f"epoch {show_epoch(epoch)} has resumed")
        else:
            self.refill_soon()

    def refill_soon(self) -> None:
        """Look whether standbys are missing; while an epoch recovers it has the first right to the CPU."""
        self._changed.set()
        if self._refill is None or self._refill.done():
            self._refill = asyncio.get_running_loop().create_task(self._refill_standbys())

    async def _refill_standbys(self) -> None:
        await asyncio.sleep(0)
        while self._settled() and self._failures < STANDBY_FAILURES:
            have = self._node.table.standbys()
            wanted = self._node.table.wanted_standbys
            for slot in have[wanted:]:
                slot.doomed = True
                proc.kill_group(slot.pid)
            if len(have) >= wanted:
                return
            try:
                await self._start_standby()
            except SpawnRefused as error:
                self._standby_failed(str(error))

    async def _start_standby(self) -> None:
        roster = self._node.roster
        folder = self._node.log_dir(roster.attempt if roster else 0)
        name = self._node.table.new_name("s")
        slot = Slot(
            id=name, role="standby", out=str(folder / f"standby_{name}.out"), err=str(folder / f"standby_{name}.err")
        )
        env = environ.standby_env(self._node.config, os.environ, name)
        await self._start(slot, self._request(slot, env))

    def _settled(self) -> bool:
        """Has every local rank of the roster that holds got its state? A node without seats always has."""
        roster = self._node.roster
        if roster is None:
            return True
        slots = [self._node.table.get(seat.slot) for seat in self._node.seats()]
        return all(s is not None and (s.resumed == roster.epoch or s.done) for s in slots)

    def _request(self, slot: Slot, env: dict[str, str]) -> dict[str, Any]:
        program = self._node.config.program
        start = program.start
        if program.kind == "executable" or (start == "auto" and cuda_visible()):
            start = "spawn"
        return {
            "id": slot.id,
            "start": "spawn" if start == "spawn" else "fork",
            "kind": program.kind,
            "target": program.target,
            "args": environ.program_args(program.args, slot.local_rank),
            "env": env,
            "cwd": os.getcwd(),
            "out": slot.out,
            "err": slot.err,
            "error_file": slot.error_file,
        }

    async def _start(self, slot: Slot, request: dict[str, Any]) -> None:
        slot.out_from, slot.err_from = size(slot.out), size(slot.err)
        # In the table before it is asked for: if we die in between, the next agent asks the shim about it.
        self._node.table.add(slot)
        if slot.is_program:
            create_beat(self._node.dir, slot.id)
            forget_positions(self._node.dir, {s.id for s in self._node.table} | {s.slot for s in self._node.seats()})
            self._console.follow(slot)
        self._awaited.add(slot.id)
        try:
            await self._link.spawn(request)
        except SpawnRefused:
            self._node.table.remove(slot.id)
            self._console.finish(slot.id)
            raise
        finally:
            self._awaited.discard(slot.id)

    def _started(self, name: str, pid: int) -> None:
        """The shim's word, whoever asked: an agent before us, or a join that has been superseded since."""
        slot = self._node.table.get(SlotId(name))
        if slot is None:
            # Given up (too late to be of use): it must not live beside what has been started in its place.
            self._link.end(name)
        elif not slot.pid:
            self._born(slot, pid)

    def _refused(self, name: str, why: str) -> None:
        slot = self._node.table.get(SlotId(name))
        if slot is not None and not slot.pid and slot.id not in self._awaited:
            self._node.say(f"{name} could not be started: {why}")
            self._exited(slot, None)

    def _born(self, slot: Slot, pid: int) -> None:
        now = proc.stat(pid)
        slot.pid, slot.start = pid, now.start if now is not None else -1
        if slot.doomed:
            # Its epoch ended while it was being started.
            proc.kill_group(pid)
        self._node.table.save()
        self._watch.watch(slot)

    # ------------------------------------------------------------ finding again

    def adopt(self) -> None:
        """Watch what an earlier agent started; whatever is gone is reported now, with its status if the shim has it."""
        for slot in self._node.table:
            if slot.pid:
                if slot.is_program:
                    self._console.follow(slot)
                self._watch.watch(slot)

    def close(self) -> None:
        """The node's part is over: no exit is noted any more and no standby started, as their table is removed."""
        self._watch.close()
        if self._refill is not None:
            self._refill.cancel()

    def _adopt_late(self, pids: dict[str, int], queued: set[str]) -> None:
        """The shim's list names processes whose pid a former agent did not live to write down."""
        unstarted = False
        for slot in self._node.table:
            if slot.pid:
                continue
            if slot.id in pids:
                self._born(slot, pids[slot.id])
            elif slot.id not in queued and slot.id not in self._link.asked:
                # It was never started; forgetting it lets whoever wants it ask for it again.
                self._node.table.forget(slot.id)
                if not slot.is_program:
                    self.on_helper_gone(slot)
                unstarted = unstarted or slot.is_program
        if unstarted:
            self.on_unstarted()
            self.refill_soon()

    def end_standby(self, slot: Slot, why: str) -> None:
        """It could not take a seat: nobody may count on it, and another is started in its place."""
        slot.doomed, slot.why_ended = True, why
        self._node.table.save()
        self._node.say(f"standby {slot.id} is ended: {why}")
        proc.kill_group(slot.pid)

    def promoted(self, slot: Slot, roster: Roster) -> None:
        """A standby has become a rank: its output goes on under the rank's name (an open file follows a rename)."""
        folder = self._node.log_dir(roster.attempt)
        for stream in ("out", "err"):
            new = folder / f"rank_{slot.rank}.{slot.id}.{stream}"
            with contextlib.suppress(OSError):
                os.rename(getattr(slot, stream), new)
                setattr(slot, stream, str(new))
        self._console.follow(slot)

    # ------------------------------------------------------------ exits

    def _exited(self, slot: Slot, status: int | None) -> None:
        code, number = proc.split_status(status)
        if slot.is_program:
            self._console.finish(slot.id)
            with contextlib.suppress(OSError):
                if slot.rank is not None:
                    self._node.steps[slot.rank] = committed(self._node.dir, slot.id)
                (self._node.dir / BEAT_DIR / slot.id).unlink()
        fact: WorkerExited | None = None
        match slot.role:
            case "worker":
                said = first_error(slot.err, slot.out, slot.err_from, slot.out_from) if _ends_badly(slot, code) else ()
                fact = self._node.report(
                    WorkerExited,
                    slot=slot.id,
                    rank=slot.rank if slot.rank is not None else Rank(-1),
                    epoch=slot.epoch,
                    code=code,
                    signal=number,
                    stderr_tail=tail_lines(slot.err, STDERR_LINES) if code != 0 else (),
                    first_error=said,
                    error=slot.failure or read_error(slot.error_file),
                    killed_by_us=slot.doomed,
                )
            case "standby":
                self._standby_gone(slot, code, number)
            case "store" | "keeper" | "archiver":
                pass
        # Reported (and so in the outbox) first: dying here repeats a report, never loses one.
        self._node.table.remove(slot.id)
        self._changed.set()
        if fact is not None and code != 0 and not slot.doomed:
            # A fault that a newer epoch has got over is not what ends the job later on.
            known = self._node.table.first_fault
            over = known is not None and known.epoch < self._node.resumed
            self._node.table.first_fault = fact if known is None or over else known
            self.on_fault(fact, trained=slot.resumed > 0)
        elif not slot.is_program:
            self.on_helper_gone(slot)
        elif slot.role == "standby":
            self.refill_soon()

    def report_dead(self, seat: Member, roster: Roster) -> None:
        """The seat's process had ended before the roster came."""
        fact = self._node.report(WorkerExited, slot=seat.slot, rank=seat.rank, epoch=roster.epoch)
        self._node.table.mark_ended(seat.slot, roster.epoch)
        self.on_fault(fact, trained=True)

    def _standby_gone(self, slot: Slot, code: int | None, number: int | None) -> None:
        how = f"signal {number}" if number else f"code {code}"
        last = tail_lines(slot.err, 1)
        why = f"ended with {how}" + (f": {last[0]}" if last else "")
        if slot.doomed:
            why = f"ended by the agent: {slot.why_ended}" if slot.why_ended else "ended by the agent"
        self._node.report(StandbyGone, slot=slot.id, why=why)
        if slot.parked:
            self._failures = 0
        elif not slot.doomed or slot.why_ended:
            self._standby_failed(f"{slot.id} {why}; its output is in {slot.err}")

    def _standby_failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= STANDBY_FAILURES:
            self._node.say(
                f"no more standbys are started here: {STANDBY_FAILURES} in a row did not reach keepstep.init; "
                f"the last: {why}"
            )

    async def wait_gone(self, slots: set[SlotId], within_s: float) -> None:
        """Until none of the slots is in the table, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(name in self._node.table for name in slots):
                    self._changed.clear()
                    await self._changed.wait()


def _ends_badly(slot: Slot, code: int | None) -> bool:
    """Whether its output may say why: it failed, and not because we ended it."""
    return code != 0 and (not slot.doomed or bool(slot.why_ended))


def read_error(path: str) -> UserError | None:
    """The exception that the launcher stub, or torch's ``@record``, has left in a file."""
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError):
        return msgspec.json.decode(data, type=UserError)
    with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError):
        message = msgspec.json.decode(data, type=_TorchError).message
        text = message if isinstance(message, str) else message.message
        kind, _, rest = text.partition(":")
        return UserError(type=kind.strip() or "Exception", message=rest.strip())
    return None


class _TorchMessage(msgspec.Struct):
    message: str


class _TorchError(msgspec.Struct):
    """What ``torch.distributed.elastic.multiprocessing.errors`` writes."""

    message: _TorchMessage | str
