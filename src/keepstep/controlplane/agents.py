"""The desk at which agents arrive: who may come in, what they said, what they are told.

One connection per node of a job; a newer one replaces the older. Orders leave here, and only here, after the batch
that holds them is durable (``batch``); a node that comes back is told again what it has not reported done.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog
from msgspec import structs

from keepstep import __version__
from keepstep.controlplane.batch import Submission
from keepstep.controlplane.connection import AgentConnection
from keepstep.controlplane.leases import Contact, LeaseTable, NodeKey
from keepstep.controlplane.news import News
from keepstep.model import exits
from keepstep.model.actions import AnyAction
from keepstep.model.facts import AgentDisconnected, AgentLeft, AnyFact, JobSubmitted, LeaseExpired, LeaseRenewed
from keepstep.model.ids import JobId
from keepstep.model.records import JobMoved, Observed, Ordered
from keepstep.model.topology import JobSpec
from keepstep.model.wire import PROTOCOL, AgentHello, Reports, Welcome
from keepstep.ports import Clock, Entry

MAX_CONNECTIONS = 16_384
OVERSLEPT_S = 0.1
"""A look at the leases that comes later than this after its time shows that this process itself was held up."""
TWIN_HEARTBEATS = 2
"""An agent heard within so many heartbeats lives: another one under its name, elsewhere, is not its successor."""
GRACE_HEARTBEATS = 3
"""How many heartbeats' time a silent node gets then, once."""

log = structlog.get_logger(__name__)


class Book(Protocol):
    """What the durable state says; never ahead of the log."""

    def spec(self, job: JobId) -> JobSpec | None: ...
    def acked(self, key: NodeKey) -> int:
        """The newest report number of the node that is durable; 0 for none."""
        ...

    def pending(self, key: NodeKey) -> Sequence[AnyAction]: ...
    def ended(self, job: JobId) -> tuple[str, int] | None:
        """Final state and exit code of a job that is over."""
        ...


class Inbox(Protocol):
    def submit(self, submission: Submission, *, own: bool = False) -> bool: ...
    async def room(self) -> None: ...


class AgentDesk:
    """See ``connection.Desk``. ``publish`` is what the writer calls with every durable batch."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        book: Book,
        leases: LeaseTable,
        clock: Clock,
        token: str,
        lease_s: float,
        heartbeat_s: float,
        pace_window_s: float = 0.0,
        monotonic: Callable[[], float],
    ) -> None:
        self._inbox = inbox
        self._book = book
        self._leases = leases
        self._clock = clock
        self._token = token.encode()
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._pace_window_s = pace_window_s
        self._monotonic = monotonic
        self._all: set[AgentConnection] = set()
        self._by_node: dict[NodeKey, AgentConnection] = {}
        self._announced: dict[JobId, JobSpec] = {}
        """Specs on their way into the log."""
        self.changed = News()
        """Wakes when a connection has closed."""
        self._timer: asyncio.TimerHandle | None = None
        self._resumer: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ connections

    def opened(self, connection: AgentConnection) -> bool:
        if len(self._all) >= MAX_CONNECTIONS:
            log.error("too many connections", limit=MAX_CONNECTIONS, peer=connection.peer)
            return False
        self._all.add(connection)
        return True

    def hello(self, connection: AgentConnection, hello: AgentHello) -> None:
        key = NodeKey(hello.job, hello.node)
        older = self._by_node.get(key)
        why = self._objection(hello) or self._twin(connection, hello, older)
        if why is not None:
            connection.refuse(why[0], code=why[1])
            return
        if self._book.spec(hello.job) is None and hello.job not in self._announced:
            submitted = JobSubmitted(job=hello.job, at=self._clock.now(), spec=hello.spec)
            if not self._inbox.submit(Submission((submitted,))):
                connection.drop("no room for another job at the moment")
                return
            self._announced[hello.job] = hello.spec
        self._by_node[key] = connection
        connection.accept(key, hello.boot)
        if older is not None:
            older.drop(f"replaced by a newer connection of {key.node} from {connection.peer}")
        log.info("agent connected", job=key.job, node=key.node, peer=connection.peer, boot=hello.boot)
        connection.send(
            Welcome(
                version=__version__,
                acked=self._book.acked(key),
                lease_s=self._lease_s,
                heartbeat_s=self._heartbeat_s,
                pace_window_s=self._pace_window_s,
            )
        )
        pending = self._book.pending(key)
        if pending:
            connection.order(pending)

    def reports(self, connection: AgentConnection, reports: Reports) -> bool:
        key = connection.key
        assert key is not None
        stranger = next((fact for fact in reports.facts if (fact.job, fact.node) != key), None)
        if stranger is not None:
            connection.drop(f"{type(stranger).__name__} of {stranger.job}/{stranger.node} sent by {key.job}/{key.node}")
            return True
        renewed = self._leases.contact(key) in (Contact.BROKEN, Contact.EXPIRED)
        facts: tuple[AnyFact, ...] = reports.facts
        if renewed:
            facts = (LeaseRenewed(job=key.job, node=key.node, at=self._clock.now()), *facts)
        if facts:
            newest = max((fact.seq for fact in reports.facts), default=0)
            durable = (lambda: connection.acknowledge(newest)) if newest else None
            if not self._inbox.submit(Submission(facts, durable=durable)):
                self._resume_later()
                return False
        if self._book.ended(key.job) is not None or any(isinstance(fact, AgentLeft) for fact in reports.facts):
            self._leases.forget(key)
        else:
            self._leases.heard(key, self._monotonic())
            self._set_timer()
        return True

    def closed(self, connection: AgentConnection, why: str) -> None:
        self._all.discard(connection)
        self.changed.wake()
        key = connection.key
        if key is None or self._by_node.get(key) is not connection:
            return
        del self._by_node[key]
        log.info("agent disconnected", job=key.job, node=key.node, why=why)
        if self._leases.broken(key):
            self._tell(AgentDisconnected(job=key.job, node=key.node, at=self._clock.now(), why=why))

    def close(self) -> None:
        """Hang up on everybody; the lease table is not told, for it is we who leave."""
        if self._timer is not None:
            self._timer.cancel()
        if self._resumer is not None:
            self._resumer.cancel()
        self._by_node.clear()
        for connection in tuple(self._all):
            connection.drop("the controller leaves")

    @property
    def connected(self) -> frozenset[NodeKey]:
        return frozenset(self._by_node)

    # ------------------------------------------------------------ after the commit

    def publish(self, entries: Sequence[Entry]) -> None:
        """Send the orders of a durable batch, one frame per node."""
        orders: dict[NodeKey, list[AnyAction]] = {}
        for entry in entries:
            match entry.record:
                case Ordered(action=action):
                    orders.setdefault(NodeKey(action.job, action.node), []).append(action)
                case JobMoved(job=job) if self._book.ended(job) is not None:
                    self._leases.forget_job(job)
                case Observed(fact=JobSubmitted(job=job)):
                    self._announced.pop(job, None)
                case _:
                    pass
        for key, actions in orders.items():
            connection = self._by_node.get(key)
            if connection is not None:
                connection.order(actions)

    # ------------------------------------------------------------ leases

    def take_over(self, nodes: Iterable[tuple[NodeKey, Contact]]) -> None:
        """Start from the log after a restart: whoever was connected is so no more, and it was we who went away."""
        now = self._monotonic()
        for key, contact in nodes:
            self._leases.expect(key, now, Contact.BROKEN if contact is Contact.ALIVE else contact)
            if contact is Contact.ALIVE:
                why = "the controller was restarted"
                self._tell(AgentDisconnected(job=key.job, node=key.node, at=self._clock.now(), why=why, ours=True))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            return
        due = self._leases.next_look()
        if due is not None:
            delay_s = max(0.0, due - self._monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look, due)

    def _look(self, due: float) -> None:
        self._timer = None
        now = self._monotonic()
        if now - due > OVERSLEPT_S:
            log.warning("this process was held up; silent nodes get a moment more", late_s=round(now - due, 3))
            self._leases.forgive(now, GRACE_HEARTBEATS * self._heartbeat_s)
        for key, connection in self._by_node.items():
            if connection.paused:
                self._leases.heard(key, now)
        for key, silent_s in self._leases.expired(now):
            log.warning("lease expired", job=key.job, node=key.node, silent_s=round(silent_s, 3))
            self._tell(LeaseExpired(job=key.job, node=key.node, at=self._clock.now(), silent_s=silent_s))
        self._set_timer()

    # ------------------------------------------------------------ helpers

    def _tell(self, fact: AnyFact) -> None:
        self._inbox.submit(Submission((fact,)), own=True)

    def _resume_later(self) -> None:
        if self._resumer is None:
            self._resumer = asyncio.get_running_loop().create_task(self._resume_when_there_is_room())

    async def _resume_when_there_is_room(self) -> None:
        await self._inbox.room()
        self._resumer = None
        for connection in tuple(self._by_node.values()):
            if connection.paused:
                connection.resume()

    def _objection(self, hello: AgentHello) -> tuple[str, int] | None:
        """Why this agent may not come in, and the exit code it should leave with."""
        if self._token and not hmac.compare_digest(hello.token.encode(), self._token):
            return (
                f"the token of node {hello.node} is {'wrong' if hello.token else 'missing'}: "
                "start it with the controller's --token-file",
                exits.PREFLIGHT,
            )
        if hello.protocol != PROTOCOL:
            return (
                f"node {hello.node} speaks protocol {hello.protocol} (keepstep {hello.version}), "
                f"this controller speaks {PROTOCOL} (keepstep {__version__}): install the same version on both",
                exits.BAD_CONFIG,
            )
        if hello.version != __version__:
            return (
                f"node {hello.node} runs keepstep {hello.version}, this controller {__version__}: "
                "install the same version on both",
                exits.BAD_CONFIG,
            )
        if not hello.job or not hello.node or hello.spec.job != hello.job:
            return (
                f"hello of job {hello.job!r}, node {hello.node!r} with the specification of job {hello.spec.job!r}: "
                "a job and a node need a name, the same everywhere",
                exits.BAD_CONFIG,
            )
        known = self._book.spec(hello.job) or self._announced.get(hello.job)
        if known is not None and known != hello.spec:
            return difference(known, hello.spec), exits.BAD_CONFIG
        ended = self._book.ended(hello.job)
        if ended is not None and not self._book.pending(NodeKey(hello.job, hello.node)):
            state, code = ended
            return f"job {hello.job} is over ({state}); start a new one for more training", code
        return None

    def _twin(
        self, connection: AgentConnection, hello: AgentHello, older: AgentConnection | None
    ) -> tuple[str, int] | None:
        """Two machines under one name would take turns in replacing each other, and start each rank twice."""
        if older is None or older.boot == hello.boot or older.address == connection.address:
            return None  # a reconnect, or an agent that was started again
        silent_s = self._leases.silent_s(NodeKey(hello.job, hello.node), self._monotonic())
        if silent_s is None or silent_s > TWIN_HEARTBEATS * self._heartbeat_s:
            return None
        return (
            f"node name {hello.node} is taken by the agent at {older.peer}, which is alive: "
            "give each node a name of its own (--node-name)",
            exits.BAD_CONFIG,
        )


def difference(known: JobSpec, offered: JobSpec) -> str:
    """Name the first field in which a node's idea of the job differs from the one in the log."""
    for field in structs.fields(JobSpec):
        ours, theirs = getattr(known, field.name), getattr(offered, field.name)
        if ours != theirs:
            flag = field.name.replace("_", "-")
            return (
                f"job {known.job} was started with {flag} {_show(ours)}, this node says {_show(theirs)}: "
                "use the same command on every node, or another job id"
            )
    raise AssertionError("equal specifications")


def _show(value: object) -> str:
    return repr(" ".join(value)) if isinstance(value, tuple) else repr(value)
