"""No controller: a fault is not left waiting. The agents of a job help themselves, one at a time, in minor epochs.

The agent of the dead rank offers a process of its own to the deputy (the agent of the lowest rank's node that
answers); the deputy changes that one seat. See "No controller" in ``docs/explanation/protocol.md``.
"""

from __future__ import annotations

import asyncio

from keepstep.agent import deputyplan, peers
from keepstep.agent.helpers import Helpers
from keepstep.agent.node import Node
from keepstep.agent.slots import Slot
from keepstep.agent.supervisor import Supervisor
from keepstep.agent.uplink import Uplink
from keepstep.model.facts import RecoveredLocally, WorkerExited, WorkerFrozen
from keepstep.model.ids import Epoch, SlotId, show_epoch
from keepstep.model.topology import Place, Roster
from keepstep.model.wire import FrameError, PeerAnswer, PeerFault, PeerJoin

LOOK_S = 0.01
"""While a fault is open: how often we look whether somebody has taken it."""
TRIES = 20
"""How often a deputy is asked about one fault before we just wait for the controller."""
RETRY_S = 0.25
STORE_S = 5.0
"""How long a deputy waits for an unused store."""
RIVALS = 3
"""Minors that a deputy tries when another deputy was faster."""
LOCAL_LIMIT = 8
"""Recoveries without a controller; more in one absence is a pattern that somebody with a memory should judge."""
JOIN_TRIES = 3

Cause = WorkerExited | WorkerFrozen


class Deputy:
    def __init__(self, node: Node, supervisor: Supervisor, helpers: Helpers, uplink: Uplink) -> None:
        self._node = node
        self._supervisor = supervisor
        self._helpers = helpers
        self._uplink = uplink
        self._open: dict[SlotId, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()
        self._signatures: set[str] = set()
        self._count = 0
        self._absence = 0.0
        """Since when the controller has been away: names the absence that ``_count`` belongs to."""
        self.server = peers.PeerServer(node, self.answer)

    # ------------------------------------------------------------ our own faults

    def consider(self, cause: Cause, *, trained: bool) -> None:
        """A process of ours is gone or frozen. If no controller takes it, ask the agents.

        Args:
            trained: it had its state once; before that only a restart of all can help, which is the controller's.
        """
        if self._node.level2 and trained and cause.slot not in self._open and not self._supervisor.stopping:
            task = asyncio.get_running_loop().create_task(self._care(cause))
            self._open[cause.slot] = task
            task.add_done_callback(lambda _: self._open.pop(cause.slot, None))

    async def _care(self, cause: Cause) -> None:
        for _ in range(TRIES):
            if await self._is_taken(cause):
                return
            if isinstance(cause, WorkerFrozen) and (slot := self._node.table.get(cause.slot)) is not None:
                self._supervisor.kill(slot)
            answer = await self._ask(cause)
            if not answer.ok:
                await asyncio.sleep(RETRY_S)
        if not await self._is_taken(cause):
            self._node.say(f"no agent could replace {cause.slot} (rank {cause.rank}); waiting for the controller")

    async def _is_taken(self, cause: Cause) -> bool:
        """Wait for the controller as long as it seems to be there; ``True`` once the seat has changed hands."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._node.config.controller_patience_s
        while self._has_seat(cause.slot) and not self._supervisor.stopping:
            if not self._uplink.up:
                return False
            heard = self._node.outbox.heard(cause.seq)
            if not heard and loop.time() > patience:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _has_seat(self, slot: SlotId) -> bool:
        return any(m.slot == slot for m in self._node.seats())

    async def _ask(self, cause: Cause) -> PeerAnswer:
        roster = self._node.roster
        assert roster is not None, "a slot with a seat has a roster"
        offer = self._offer(cause)
        fault = PeerFault(
            job=self._node.job,
            node=self._node.id,
            token=self._node.token,
            epoch=roster.epoch,
            cause=cause,
            offer=offer,
        )
        for node in roster.node_order:
            if node == self._node.id:
                return await self.lead(fault)
            place = roster.place(node)
            if place is None:
                continue
            try:
                return await peers.ask(place.host, place.peer_port, fault)
            except (OSError, TimeoutError, FrameError):
                continue
        return PeerAnswer(ok=False, why="no agent of the job answers")

    def _offer(self, cause: Cause) -> SlotId:
        """A parked standby, or the name of a process that will be started cold."""
        parked: list[Slot] = [s for s in self._node.table.standbys() if s.parked and not s.doomed and s.alive()]
        return parked[0].id if parked else self._node.table.new_name(f"r{cause.rank}d")

    # ------------------------------------------------------------ being the deputy

    async def answer(self, question: PeerFault | PeerJoin) -> PeerAnswer:
        """What other agents ask us."""
        if isinstance(question, PeerFault):
            return await self.lead(question)
        refusal = self._supervisor.enter(question.roster)
        return PeerAnswer(ok=refusal is None, why=refusal or "", epoch=self._epoch())

    async def lead(self, fault: PeerFault) -> PeerAnswer:
        """Open a minor epoch for this fault and bring every node into it."""
        async with self._lock:
            refusal = self._reason_to_decline(fault)
            if refusal is not None:
                return PeerAnswer(ok=False, why=refusal, epoch=self._epoch())
            made = await self._plan(fault)
            for _ in range(RIVALS):
                if isinstance(made, str):
                    return PeerAnswer(ok=False, why=made, epoch=self._epoch())
                refusal = self._supervisor.enter(made)
                if refusal is not None:
                    return PeerAnswer(ok=False, why=refusal, epoch=self._epoch())
                rival = await self._bring_in(made, fault)
                if rival is None:
                    self._recovered(made, fault)
                    return PeerAnswer(ok=True, epoch=made.epoch)
                # Ours lost somewhere; the same seats once more, above both. What the rival had changed is dead in
                # ours, and its owner will say so.
                store = await self._store()
                made = store if isinstance(store, str) else deputyplan.again(made, rival, store_port=store)
            return PeerAnswer(ok=False, why=f"{RIVALS} minors were taken by rivals", epoch=self._epoch())

    def _reason_to_decline(self, fault: PeerFault) -> str | None:
        if self._supervisor.stopping:
            return f"node {self._node.id} is leaving the job"
        if self._node.roster is None:
            return f"node {self._node.id} has no roster"
        if self._uplink.up and not self._node.outbox.pending():
            return "the controller answers here; it decides"
        if self._uplink.since != self._absence:
            self._absence, self._count = self._uplink.since, 0
        if self._count >= LOCAL_LIMIT:
            return f"{LOCAL_LIMIT} recoveries without a controller are enough; waiting for it"
        error = fault.cause.error if isinstance(fault.cause, WorkerExited) else None
        if error is not None and not error.consequence:
            if error.signature in self._signatures:
                where = f"{error.file}:{error.line}"
                return f"{error.type} came back at {where}; that is the program's fault, the controller decides"
            self._signatures.add(error.signature)
        return None

    async def _plan(self, fault: PeerFault) -> Roster | str:
        store = await self._store()
        if isinstance(store, str):
            return store
        roster = self._node.roster
        assert roster is not None, "looked at before"
        host = self._node.config.host
        return deputyplan.plan(
            roster,
            fault,
            deputy=self._node.id,
            store_host=host,
            store_port=store,
            resumed=self._node.resumed == roster.epoch,
        )

    async def _store(self) -> int | str:
        """Port of an unused store of ours, or a sentence."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STORE_S
        while not self._helpers.unused_store:
            if loop.time() > deadline:
                return f"node {self._node.id} has had no unused store for {STORE_S:g} s"
            await asyncio.sleep(LOOK_S)
        return self._helpers.unused_store

    async def _bring_in(self, roster: Roster, fault: PeerFault) -> Epoch | None:
        """Tell all other nodes; the epoch of a rival minor that somebody has entered before, else ``None``."""
        join = PeerJoin(token=self._node.token, roster=roster, cause=fault.cause)
        nodes = {m.node for m in roster.members} - {self._node.id}
        places = [p for p in roster.places if p.node in nodes]
        answers = await asyncio.gather(*(self._tell(place, join) for place in places))
        rivals = [a.epoch for a in answers if not a.ok and a.epoch >= roster.epoch]
        return max(rivals) if rivals else None

    async def _tell(self, place: Place, join: PeerJoin) -> PeerAnswer:
        for _ in range(JOIN_TRIES):
            try:
                return await peers.ask(place.host, place.peer_port, join)
            except (OSError, TimeoutError, FrameError):
                await asyncio.sleep(RETRY_S)
        # Its ranks will not join; the controller's rebuild deadline or its return will find that.
        self._node.say(f"node {place.node} could not be told of epoch {show_epoch(join.roster.epoch)}")
        return PeerAnswer(ok=False, why="no answer")

    def _recovered(self, roster: Roster, fault: PeerFault) -> None:
        self._count += 1
        why = (
            f"no controller answered; rank {fault.cause.rank} on {fault.node} was given to {fault.offer} "
            f"in epoch {show_epoch(roster.epoch)}"
        )
        self._node.say(why)
        self._node.report(RecoveredLocally, roster=roster, cause=fault.cause, why=why)

    def _epoch(self) -> Epoch:
        return self._node.roster.epoch if self._node.roster is not None else Epoch(0)
