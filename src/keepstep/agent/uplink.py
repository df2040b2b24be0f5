"""The agent's line to the controller: hello, reports at once, a heartbeat, orders. Reconnects for ever, with manners.

The controller's absence stops nothing here: facts wait in the outbox, trainers train.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable

import msgspec

from keepstep import __version__
from keepstep.agent.exceptions import AgentError
from keepstep.agent.node import Node, concrete
from keepstep.model import exits
from keepstep.model.actions import AnyAction
from keepstep.model.facts import AgentJoined, AnyFact, SlotState, StandbyGone, WorkerExited
from keepstep.model.ids import Epoch
from keepstep.model.wire import (
    PROTOCOL,
    Acked,
    AgentHello,
    ControllerToAgent,
    FrameError,
    Orders,
    Refused,
    Reports,
    Unpacker,
    Welcome,
    pack,
)

FIRST_RETRY_S = 0.02
LAST_RETRY_S = 1.0
CONNECT_S = 5.0
WELCOME_S = 10.0
BATCH = 500
"""Facts per frame when a backlog is sent."""
UNACKED_MS = 5000
"""The kernel breaks a connection on which nothing was acknowledged for so long (a cut cable says nothing)."""
LEAVE_S = 2.0
"""How long the last reports may take to be acknowledged before the agent leaves."""


class Uplink:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._writer: asyncio.StreamWriter | None = None
        self._welcomed = False
        self._told_absent = False
        self._ever = False
        self._acked = asyncio.Event()
        self.since = asyncio.get_running_loop().time()
        """When the line last changed between up and down."""
        self.on_orders: Callable[[AnyAction], None] = lambda action: None
        self.on_welcome: Callable[[Welcome], None] = lambda welcome: None
        self.peer_port = 0
        node.outbox.on_add = self._added

    @property
    def up(self) -> bool:
        return self._welcomed

    async def run(self) -> None:
        """Connect and converse until the agent leaves.

        Raises:
            AgentError: the controller refuses this agent; trying again without a change is pointless.
        """
        delay = FIRST_RETRY_S
        while True:
            try:
                await self._once()
                delay = FIRST_RETRY_S
            except (OSError, TimeoutError, FrameError) as error:
                self._say_absent(error)
            finally:
                self._down()
            self._give_up_in_time()
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(LAST_RETRY_S, delay * 1.6)

    def joined_again(self) -> None:
        """Something in ``AgentJoined`` has changed (the keeper's port): say it anew."""
        if self._welcomed:
            self._send(Reports(facts=(self._joined(),)))

    async def flush(self) -> None:
        """Give the last reports a chance to be heard before leaving."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while self._welcomed and self._node.outbox.pending():
                    self._acked.clear()
                    await self._acked.wait()

    # ------------------------------------------------------------ one connection

    async def _once(self) -> None:
        host, port = self._address()
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
        self._writer = writer
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS)
            self._send(
                AgentHello(
                    protocol=PROTOCOL,
                    version=__version__,
                    job=self._node.job,
                    node=self._node.id,
                    boot=self._node.boot,
                    spec=self._node.spec,
                    token=self._node.token,
                )
            )
            await self._converse(reader)
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader) -> None:
        unpacker: Unpacker[ControllerToAgent] = Unpacker(ControllerToAgent)
        heartbeat: asyncio.Task[None] | None = None
        try:
            while True:
                async with asyncio.timeout(None if self._welcomed else WELCOME_S):
                    data = await reader.read(262144)
                if not data:
                    raise ConnectionResetError("the controller closed the connection")
                for frame in unpacker.feed(data):
                    match frame:
                        case Welcome():
                            self._welcome(frame)
                            heartbeat = asyncio.get_running_loop().create_task(self._beat(frame.heartbeat_s))
                        case Refused(why=why, code=code):
                            raise AgentError(f"the controller refuses this node: {why}", code)
                        case Acked(seq=seq):
                            self._node.outbox.acked(seq)
                            self._acked.set()
                        case Orders(actions=actions):
                            for action in actions:
                                self.on_orders(action)
        finally:
            if heartbeat is not None:
                heartbeat.cancel()

    def _welcome(self, welcome: Welcome) -> None:
        outbox = self._node.outbox
        self.on_welcome(welcome)
        outbox.welcome(welcome.acked)
        outbox.away = False
        facts: list[AnyFact] = [self._joined(), *outbox.pending()]
        self._welcomed = self._ever = True
        self._told_absent = False
        self.since = asyncio.get_running_loop().time()
        for start in range(0, len(facts), BATCH):
            self._send(Reports(facts=tuple(facts[start : start + BATCH])))

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._send(Reports())

    def _joined(self) -> AnyFact:
        """Who we are and what runs here. Its number is 0: it is said anew on each connection, not kept."""
        node, config = self._node, self._node.config
        slots: dict[str, SlotState] = {s.id: s.state() for s in node.table if s.is_program}
        # A process whose exit the controller has not heard of counts as there: it will hear the exit itself, with its
        # reason, right after this.
        for fact in node.outbox.pending():
            if isinstance(fact, WorkerExited):
                slots.setdefault(
                    fact.slot, SlotState(slot=fact.slot, pid=0, role="worker", rank=fact.rank, epoch=fact.epoch)
                )
            elif isinstance(fact, StandbyGone):
                slots.setdefault(fact.slot, SlotState(slot=fact.slot, pid=0, role="standby"))
        return concrete(
            node.fact(
                AgentJoined,
                host=config.host,
                boot=node.boot,
                peer_port=self.peer_port,
                keeper_port=node.keeper_port,
                node_rank=config.node_rank,
                rack=config.rack,
                wants_standby=config.wants_standby,
                epoch=node.roster.epoch if node.roster is not None else Epoch(0),
                slots=tuple(slots.values()),
                version=__version__,
            )
        )

    # ------------------------------------------------------------ helpers

    def _added(self, fact: AnyFact) -> None:
        if self._welcomed:
            self._send(Reports(facts=(fact,)))

    def _send(self, frame: AgentHello | Reports) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(frame))

    def _down(self) -> None:
        if self._welcomed:
            self.since = asyncio.get_running_loop().time()
        self._welcomed = False
        self._writer = None
        self._node.outbox.away = True

    def _address(self) -> tuple[str, int]:
        """Configured, or what the controller of this run has written down after it was started again."""
        config = self._node.config
        try:
            note = msgspec.json.decode((self._node.run_dir / "controller.json").read_bytes())
            if note["host"] == config.controller_host:
                return str(note["host"]), int(note["agent_port"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
            pass
        return config.controller_host, config.controller_port

    def _say_absent(self, error: Exception) -> None:
        if self._told_absent or not self._ever:
            return
        self._told_absent = True
        self._node.say(f"no controller ({error}); training goes on, reports are kept, trying again")

    def _give_up_in_time(self) -> None:
        """A node that has never been heard has nothing to lose; waiting for ever would only hold it."""
        waited = asyncio.get_running_loop().time() - self.since
        limit = self._node.spec.join_timeout_s
        if not self._ever and self._node.roster is None and waited > limit:
            host, port = self._address()
            raise AgentError(
                f"no controller answered at {host}:{port} within {limit:g} s (join_timeout_s); check that it runs and "
                "that the address can be reached from this node",
                exits.PREFLIGHT,
            )
