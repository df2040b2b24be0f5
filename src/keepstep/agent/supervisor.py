"""Carries out orders: brings this node's processes into line with the newest roster, once, and never for an old one.

A roster says who shall live here; carrying it out means to compare that with what lives here. So a repeated order, or
one that a restarted agent finds half done, needs no special case.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, assert_never

from keepstep.agent import boundary, proc, stacks, taints
from keepstep.agent.exceptions import SpawnRefused
from keepstep.agent.faults import Faults
from keepstep.agent.links import links_of
from keepstep.agent.node import Node
from keepstep.agent.positions import take_positions
from keepstep.agent.programs import Programs
from keepstep.agent.selftest import SelfTests
from keepstep.agent.slots import Slot
from keepstep.agent.workers import Workers
from keepstep.model.actions import (
    AnyAction,
    InjectFault,
    Join,
    KeepStandbys,
    KillProcess,
    SelfTest,
    StopJob,
    TaintCheckpoints,
    TakeStacks,
)
from keepstep.model.facts import ActionDone, ActionFailed, StacksTaken
from keepstep.model.ids import ActionId, Rank, show_epoch
from keepstep.model.topology import Member, Roster

RESTART_GRACE_S = 2.0
"""Before a whole-job restart: from SIGTERM to SIGKILL. Somebody has failed already; waiting helps nobody."""
GONE_S = 10.0
"""After SIGKILL a process is gone within this time, or the kernel holds it (state D) and we go on without."""


class Supervisor:
    def __init__(self, node: Node, programs: Programs, workers: Workers, faults: Faults) -> None:
        self._node = node
        self._programs = programs
        self._workers = workers
        self._faults = faults
        self._join: asyncio.Task[None] | None = None
        self._joining = ""
        """Key of the roster that is being carried out."""
        self._waiting: list[Join] = []
        """Orders to answer once it is."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._selftests = SelfTests(node)
        self._under_way: set[ActionId] = set()
        self.stopping = False
        self.on_join: Callable[[Roster], None] = lambda roster: None
        self.on_stop: Callable[[StopJob], Awaitable[None]]
        programs.on_unstarted = self.resume

    # ------------------------------------------------------------ orders

    def order(self, action: AnyAction) -> None:
        """Start to carry out an order; its outcome is reported as a fact."""
        try:
            self._order(action)
        except Exception as error:
            # The controller has to know; the line to it and the trainers must not suffer.
            self._node.say(f"internal error while carrying out {action.id}: {error!r}")
            self._report(action, f"internal error: {error!r}")

    def _order(self, action: AnyAction) -> None:
        known = self._node.table.outcome(action.id)
        if known is not None:
            self._report(action, known)
            return
        refusal = self._refusal(action)
        if refusal is not None:
            self._finish(action, refusal)
            return
        match action:
            case Join():
                self._start_join(action)
            case KillProcess(slot=name):
                slot = self._node.table.get(name)
                if slot is not None:
                    self.kill(slot)
                self._finish(action, "")
            case KeepStandbys(count=count):
                self._node.table.wanted_standbys = max(0, count)
                self._programs.forgive_standbys("the controller orders them anew")
                self._finish(action, "")
            case StopJob():
                self._start_stop(action)
            case TakeStacks():
                self._spawn_task(self._look(action))
            case SelfTest():
                self._spawn_task(self._finish_later(action, self._selftests.carry_out(action)))
            case TaintCheckpoints():
                self._spawn_task(self._finish_later(action, taints.carry_out(self._node, action)))
            case InjectFault():
                # Remembered first: a fault that hits this very agent must not be repeated by the next one.
                self._finish(action, self._faults.why_not(action) or "")
                self._faults.carry_out(action)
            case _:
                assert_never(action)

    def enter(self, roster: Roster) -> str | None:
        """Enter a roster that did not come from the controller; a sentence when it is refused."""
        refusal = self._node.accept(roster)
        if refusal is None:
            self._begin(roster, None)
        return refusal

    def resume(self) -> None:
        """Go on with whatever the accepted roster still asks for: after a restart of the agent, or of the shim."""
        if self._node.roster is not None and not self.stopping:
            self._begin(self._node.roster, None)

    def kill(self, slot: Slot) -> None:
        """SIGKILL at once, with everything it started; stopped processes die of it, too."""
        slot.doomed = True
        self._node.table.save()
        if slot.alive():
            proc.kill_group(slot.pid)

    def _refusal(self, action: AnyAction) -> str | None:
        if action.job != self._node.job or action.node != self._node.id:
            return f"order {action.id} is for node {action.node} of job {action.job}, not for this one"
        if self.stopping and not isinstance(action, StopJob):
            return "this node is leaving the job"
        if isinstance(action, StopJob | KeepStandbys | Join | TaintCheckpoints):
            # Stopping is always right, standbys and marks seat nobody, and a Join is fenced by its roster.
            return None
        roster = self._node.roster
        if roster is not None and action.epoch < roster.epoch:
            return f"epoch {show_epoch(action.epoch)} is older than the accepted {show_epoch(roster.epoch)}"
        return None

    def _finish(self, action: AnyAction, outcome: str) -> None:
        self._node.table.remember(action.id, outcome)
        self._report(action, outcome)

    def _report(self, action: AnyAction, outcome: str) -> None:
        if outcome:
            self._node.report(ActionFailed, action=action.id, why=outcome)
        else:
            self._node.report(ActionDone, action=action.id)

    # ------------------------------------------------------------ rosters

    def _start_join(self, action: Join) -> None:
        leaves = self._node.roster is not None and not action.roster.seats_on(self._node.id)
        if leaves and action.roster.boundary_s > 0 and self._node.table.workers():
            self._spawn_task(self._leave(action))
        else:
            self._accept_join(action)

    async def _leave(self, action: Join) -> None:
        """All ranks of this node move to another one although nothing is broken here: they finish their step, and its
        copy goes to the buddy, before they end."""
        await boundary.committed(self._node, limit_s=action.roster.boundary_s)
        self._accept_join(action)

    def _accept_join(self, action: Join) -> None:
        refusal = self._node.accept(action.roster)
        if refusal is not None:
            self._finish(action, refusal)
            return
        self._begin(action.roster, action)

    def _begin(self, roster: Roster, action: Join | None) -> None:
        if self._join is not None and not self._join.done():
            if self._joining == roster.key:
                self._waiting += [action] if action is not None else []
                return
            # The newer roster compares with what is there; what the older one had begun is part of that.
            self._join.cancel()
            for older in self._waiting:
                self._finish(older, f"superseded by epoch {show_epoch(roster.epoch)}")
        self._joining, self._waiting = roster.key, [action] if action is not None else []
        self.on_join(roster)
        self._seat_the_living(roster)
        if roster.boundary_s > 0:
            self._spawn_task(boundary.entered(self._node, roster))
        self._join = self._spawn_task(self._converge(roster))

    def _seat_the_living(self, roster: Roster) -> None:
        """Before anything else: survivors can only let go of their collectives when they know."""
        for seat in roster.seats_on(self._node.id):
            slot = self._node.table.get(seat.slot)
            if slot is None or slot.doomed or slot.epoch == roster.epoch:
                continue
            promoted = slot.role == "standby"
            slot.role, slot.rank, slot.local_rank, slot.epoch = "worker", seat.rank, seat.local_rank, roster.epoch
            slot.attached, slot.parked, slot.done = True, False, False
            self._workers.seat(slot)
            if promoted:
                self._programs.promoted(slot, roster)
        self._node.table.save()

    async def _converge(self, roster: Roster) -> None:
        seated = {s.slot for s in roster.seats_on(self._node.id)}
        leftover = [s for s in self._node.table.workers() if s.id not in seated]
        if roster.mode == "restart":
            await self._end(leftover, RESTART_GRACE_S)
        else:
            for slot in leftover:
                self.kill(slot)
        self._report_dead_seats(roster)
        refused: list[str] = []
        while missing := self._missing(roster):
            refused += await self._start_all(roster, missing)
        self._programs.refill_soon()
        for action in self._waiting:
            self._finish(action, "; ".join(refused))
        self._waiting = []

    def _missing(self, roster: Roster) -> list[Member]:
        """Seats whose process is neither here nor has ended."""
        table = self._node.table
        return [s for s in roster.seats_on(self._node.id) if s.slot not in table and not table.has_ended(s.slot)]

    async def _start_all(self, roster: Roster, seats: list[Member]) -> list[str]:
        """Start these at once; a sentence for each that cannot be."""
        outcomes = await asyncio.gather(
            *(self._programs.start_worker(roster, seat) for seat in seats), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, SpawnRefused):
                raise outcome
        return [f"{seat.slot}: {o}" for seat, o in zip(seats, outcomes, strict=True) if isinstance(o, SpawnRefused)]

    def _report_dead_seats(self, roster: Roster) -> None:
        """A seat was given to a process that had died before the roster came: it is vacant in this epoch, too."""
        for seat in roster.seats_on(self._node.id):
            ended = self._node.table.end_of(seat.slot)
            if ended is not None and ended < roster.epoch:
                self._programs.report_dead(seat, roster)

    # ------------------------------------------------------------ looking

    async def _look(self, action: TakeStacks) -> None:
        """Show where the ranks' processes stand; what cannot be seen is said process by process."""
        workers = [slot for slot in self._node.table.workers() if slot.rank in action.ranks and slot.alive()]
        trees = [stacks.Tree(Rank(slot.rank), slot.id, slot.pid) for slot in workers if slot.rank is not None]
        # Also of a process that has just ended: where it was tells why the others wait.
        seats = [seat for seat in self._node.seats() if seat.rank in action.ranks]
        try:
            positions = take_positions(self._node.dir, seats)
            told = {position.rank for position in positions}
            positions += await self._workers.positions(s for s in workers if s.attached and s.rank not in told)
            links, addresses = links_of({tree.rank: tree.pid for tree in trees})
            found = await stacks.take(trees, self._node.dir, native=action.native)
        except Exception as error:
            self._node.say(f"internal error while looking into the processes: {error!r}")
            self._finish(action, f"internal error: {error!r}")
            return
        self._node.report(
            StacksTaken,
            epoch=action.epoch,
            request=action.request,
            processes=tuple(found),
            positions=positions,
            links=links,
            addresses=addresses,
        )
        self._finish(action, "")

    async def _finish_later(self, action: SelfTest | TaintCheckpoints, work: Coroutine[Any, Any, str]) -> None:
        """Such an order takes a while and must not hold up the others. Its id is remembered when it is done."""
        if action.id in self._under_way:
            work.close()  # sent again by a controller that came back
            return
        self._under_way.add(action.id)
        try:
            self._finish(action, await work)
        except Exception as error:
            self._finish(action, f"internal error: {error!r}")
        finally:
            self._under_way.discard(action.id)

    # ------------------------------------------------------------ the end

    def _start_stop(self, action: StopJob) -> None:
        if self.stopping:
            self._finish(action, "")
            return
        self.stopping = True
        self._spawn_task(self._stop(action))

    async def _stop(self, action: StopJob) -> None:
        if self._join is not None:
            self._join.cancel()
        await self.end_programs(action.grace_s)
        self._finish(action, "")
        await self.on_stop(action)

    async def end_programs(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """A signal to workers, SIGKILL after ``grace_s``; standbys have nothing to save."""
        self.stopping = True
        self._node.table.wanted_standbys = 0  # else their ends would be answered by new ones, which nobody ends
        for slot in self._node.table.standbys():
            self.kill(slot)
        await self._end(self._node.table.workers(), grace_s, number)
        await self._gone([s for s in self._node.table if s.is_program], GONE_S)

    async def _end(self, slots: list[Slot], grace_s: float, number: int = signal.SIGTERM) -> None:
        for slot in slots:
            slot.doomed = True
            now = proc.stat(slot.pid) if slot.pid else None
            if now is not None and now.state == "T":
                # A stopped process cannot hear SIGTERM; waiting for it would be waiting for nothing.
                proc.kill_group(slot.pid)
            elif slot.alive():
                proc.send_signal(slot.pid, slot.start, number)
        self._node.table.save()
        await self._gone(slots, grace_s)
        for slot in slots:
            if slot.id in self._node.table:
                self.kill(slot)
        await self._gone(slots, GONE_S)

    async def _gone(self, slots: list[Slot], within_s: float) -> None:
        """Until all have left the table (their exits are reported) or the time is over."""
        await self._programs.wait_gone({s.id for s in slots}, within_s)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.say(f"internal error while carrying out an order: {error!r}; the controller will repeat it")
