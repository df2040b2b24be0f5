"""The agents' desk over real sockets: who is let in, what is told to whom, and when a node counts as gone."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from control_client import Client, joined, spec
from control_fakes import FakeMind, GatedLog, exited, ready

from keepstep import __version__
from keepstep.controlplane import connection as connection_module
from keepstep.controlplane import writer as writer_module
from keepstep.controlplane.agents import AgentDesk, difference
from keepstep.controlplane.clock import AnchoredClock
from keepstep.controlplane.connection import AgentConnection
from keepstep.controlplane.leases import Contact, LeaseTable, NodeKey
from keepstep.controlplane.writer import Writer
from keepstep.model.actions import AnyAction
from keepstep.model.facts import (
    AgentDisconnected,
    AgentJoined,
    AgentLeft,
    AnyFact,
    JobSubmitted,
    LeaseExpired,
    LeaseRenewed,
)
from keepstep.model.ids import JobId, Nanos, NodeId
from keepstep.model.records import Observed
from keepstep.model.topology import JobSpec
from keepstep.model.wire import MAX_FRAME, PROTOCOL, Acked, Orders, Refused, Reports, Welcome

LEASE_S = 0.3


class FakeBook:
    """Reads the fake mind."""

    def __init__(self, mind: Callable[[], FakeMind]) -> None:
        self._mind = mind
        self.over: tuple[str, int] | None = None

    def spec(self, job: JobId) -> JobSpec | None:
        facts = [record.fact for record in self._mind().records if isinstance(record, Observed)]
        return next((fact.spec for fact in facts if isinstance(fact, JobSubmitted) and fact.job == job), None)

    def acked(self, key: NodeKey) -> int:
        return self._mind().seqs.get(key.node, 0)

    def pending(self, key: NodeKey) -> Sequence[AnyAction]:
        return [action for action in self._mind().pending_orders(key.node) if action.job == key.job]

    def ended(self, job: JobId) -> tuple[str, int] | None:
        return self.over


class Rig:
    def __init__(self, *, token: str = "", lease_s: float = 30.0) -> None:
        self.log = GatedLog()
        self.writer: Writer[FakeMind] = Writer(
            event_log=self.log,
            durable=FakeMind(),
            seq=0,
            load=FakeMind.load,
            clock=AnchoredClock(),
            publish=lambda entries: self.desk.publish(entries),
        )
        self.book = FakeBook(lambda: self.writer.durable)
        self.leases = LeaseTable(lease_s)
        self.warp_s = 0.0
        """Added to the desk's clock; its timers run on real time."""
        self.desk = AgentDesk(
            inbox=self.writer,
            book=self.book,
            leases=self.leases,
            clock=AnchoredClock(),
            token=token,
            lease_s=lease_s,
            heartbeat_s=0.1,
            monotonic=lambda: time.monotonic() + self.warp_s,
        )
        self.port = 0

    def facts(self, *kinds: type[AnyFact]) -> list[AnyFact]:
        facts = [entry.record.fact for entry in self.log.read() if isinstance(entry.record, Observed)]
        return [fact for fact in facts if not kinds or isinstance(fact, kinds)]

    async def until(self, kind: type[AnyFact], count: int = 1) -> list[AnyFact]:
        """Wait until the log holds ``count`` facts of a kind."""
        async with asyncio.timeout(10):
            while len(self.facts(kind)) < count:
                await asyncio.sleep(0.005)
        return self.facts(kind)


def run(test: Callable[[Rig], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        rig = Rig(**options)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: AgentConnection(rig.desk), "127.0.0.1", 0)
        rig.port = server.sockets[0].getsockname()[1]
        task = loop.create_task(rig.writer.run())
        try:
            async with asyncio.timeout(30):
                await test(rig)
        finally:
            rig.log.gate.set()
            server.close()
            rig.desk.close()
            rig.writer.close()
            await task

    asyncio.run(main())


def test_reports_are_acknowledged_after_the_commit_only() -> None:
    """An agent may forget a report exactly when it is durable."""

    async def test(rig: Rig) -> None:
        client, welcome = await Client.welcomed(rig.port)
        assert (welcome.version, welcome.acked, welcome.heartbeat_s) == (__version__, 0, 0.1)
        await rig.until(JobSubmitted)
        rig.log.gate.clear()
        client.report(joined(1), ready(2))
        with pytest.raises(TimeoutError):
            await client.take(Acked, seconds=0.1)
        assert rig.log.last() == 1
        rig.log.gate.set()
        assert (await client.take(Acked)).seq == 2
        assert [type(fact) for fact in rig.facts()] == [JobSubmitted, type(joined()), type(ready(2))]

    run(test)


def test_orders_reach_their_node_and_are_repeated_after_a_reconnect() -> None:
    """An order goes to the node it names; a node that comes back is told again and knows what is durable."""

    async def test(rig: Rig) -> None:
        one, _ = await Client.welcomed(rig.port, node="n0")
        two, _ = await Client.welcomed(rig.port, node="n1")
        one.report(joined(1), exited(2))
        orders = await one.take(Orders)
        assert [action.id for action in orders.actions] == ["n0/2"]
        two.report(joined(1, node="n1"))
        await two.acked(1)
        assert not [frame for frame in two.frames if isinstance(frame, Orders)]
        one.close()
        await rig.until(AgentDisconnected)
        again, welcome = await Client.welcomed(rig.port, node="n0", boot="b2")
        assert welcome.acked == 2
        assert [action.id for action in (await again.take(Orders)).actions] == ["n0/2"]

    run(test)


def test_an_order_for_an_absent_node_waits_for_it() -> None:
    """Orders for a node without a connection are neither lost nor a reason to stop."""

    async def test(rig: Rig) -> None:
        await rig.writer.ask(exited(1, node="later"), wait_s=5)
        client, _ = await Client.welcomed(rig.port, node="later")
        assert [action.id for action in (await client.take(Orders)).actions] == ["later/1"]

    run(test)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"token": "wrong"}, 66, "token of node n0 is wrong"),
        ({"token": ""}, 66, "token of node n0 is missing"),
        ({"protocol": PROTOCOL + 1}, 65, f"speaks protocol {PROTOCOL + 1} .*speaks {PROTOCOL}"),
        ({"version": "0.0.7"}, 65, f"runs keepstep 0.0.7, this controller {__version__}"),
        ({"spec": spec("another")}, 65, "hello of job 'j', node 'n0' with the specification of job 'another'"),
        ({"node": ""}, 65, "need a name"),
    ],
)
def test_who_is_not_let_in_is_told_why(changes: dict[str, object], code: int, words: str) -> None:
    """Each refusal has a sentence and an exit code, then the line is cut; nothing of it reaches the log."""

    async def test(rig: Rig) -> None:
        client = await Client.connect(rig.port)
        client.hello(**{"token": "secret", **changes})
        client.report(joined(1))
        refused = await client.take(Refused)
        assert refused.code == code
        assert re.search(words, refused.why)
        await client.closed()
        assert rig.facts() == []

    run(test, token="secret")


def test_the_right_token_is_let_in() -> None:
    """With the token the hello is answered by a welcome."""

    async def test(rig: Rig) -> None:
        await Client.welcomed(rig.port, token="secret")

    run(test, token="secret")


def test_a_job_is_submitted_once_and_other_ideas_of_it_are_refused() -> None:
    """The first hello defines the job; a node with another world or command is told what differs."""

    async def test(rig: Rig) -> None:
        rig.log.gate.clear()  # the job is still on its way into the log when the others come
        await Client.welcomed(rig.port, node="n0")
        await Client.welcomed(rig.port, node="n1")
        other = await Client.connect(rig.port)
        other.hello(node="n2", spec=spec(max_nodes=3))
        refused = await other.take(Refused)
        assert refused.code == 65
        assert "was started with max-nodes 1, this node says 3" in refused.why
        rig.log.gate.set()
        await rig.until(JobSubmitted)
        other = await Client.connect(rig.port)
        other.hello(node="n2", spec=spec(command=("other.py", "--lr", "1")))
        assert "command 'train.py', this node says 'other.py --lr 1'" in (await other.take(Refused)).why
        assert len(rig.facts(JobSubmitted)) == 1

    run(test)


def test_differences_are_found_in_every_field() -> None:
    """Whatever differs is named by its flag."""
    for field, value in {"min_nodes": 9, "standbys": 4, "allow_inject": True, "hang_detect": "off"}.items():
        assert field.replace("_", "-") in difference(spec(), spec(**{field: value}))


def test_a_job_that_is_over_takes_nobody_in() -> None:
    """An agent that comes too late leaves with the job's own exit code."""

    async def test(rig: Rig) -> None:
        rig.book.over = ("FAILED", 93)
        client = await Client.connect(rig.port)
        client.hello()
        refused = await client.take(Refused)
        assert (refused.code, refused.why) == (93, "job j is over (FAILED); start a new one for more training")

    run(test)


def test_the_end_of_a_job_ends_the_interest_in_its_nodes() -> None:
    """Agents that go away after the end are not reported as lost."""

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        client.report(joined(1))
        await client.acked(1)
        rig.book.over = ("FINISHED", 0)
        client.report(ready(2))
        await client.acked(2)
        client.close()
        await asyncio.sleep(2 * LEASE_S)
        assert rig.facts(AgentDisconnected, LeaseExpired) == []

    run(test, lease_s=LEASE_S)


def test_what_is_too_long_for_a_frame_ends_the_connection_not_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order beyond the frame limit is an error in the log; other nodes' orders go on."""

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        other, _ = await Client.welcomed(rig.port, node="n1")
        monkeypatch.setattr("keepstep.model.wire.MAX_FRAME", 10)
        await rig.writer.ask(exited(1), wait_s=5)
        monkeypatch.undo()
        await client.closed()
        await rig.writer.ask(exited(1, node="n1"), wait_s=5)
        await other.take(Orders)

    run(test)


def test_two_machines_under_one_name_are_told_apart() -> None:
    """The second one is refused while the first is alive, and is its successor once that is silent."""

    async def test(rig: Rig) -> None:
        first, _ = await Client.welcomed(rig.port, boot="b1")
        first.report(joined())
        await first.acked(1)
        rig.warp_s = -60.0  # however slow this machine is, the first has been heard just now
        twin = await Client.connect(rig.port, address="127.0.0.2")
        twin.hello(boot="b2")
        refused = await twin.take(Refused)
        assert "--node-name" in refused.why
        first.report(ready(2))
        await first.acked(2)
        rig.warp_s = 5.0
        successor = await Client.connect(rig.port, address="127.0.0.2")
        successor.hello(boot="b3")
        await successor.take(Welcome)
        await first.closed()

    run(test)


def test_a_newer_connection_replaces_the_older() -> None:
    """A restarted agent takes over at once; the old line is cut and not reported as a loss."""

    async def test(rig: Rig) -> None:
        old, _ = await Client.welcomed(rig.port)
        old.report(joined(1))
        await old.acked(1)
        new, welcome = await Client.welcomed(rig.port, boot="b2")
        assert welcome.acked == 1
        await old.closed()
        new.report(joined(2, boot="b2"), exited(3))
        assert [action.id for action in (await new.take(Orders)).actions] == ["n0/3"]
        assert rig.facts(AgentDisconnected) == []

    run(test)


def test_a_lost_connection_then_a_lost_lease_then_a_return() -> None:
    """kill of an agent: disconnected at once, expired after the lease, renewed before its first new fact."""

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        client.report(joined(1))
        await client.acked(1)
        client.writer.transport.abort()
        await rig.until(AgentDisconnected)
        (expired,) = await rig.until(LeaseExpired)
        assert isinstance(expired, LeaseExpired)
        assert LEASE_S <= expired.silent_s < LEASE_S + 5
        again, _ = await Client.welcomed(rig.port, boot="b2")
        again.report(joined(2, boot="b2"))
        await again.acked(2)
        kinds = [type(fact) for fact in rig.facts()]
        assert kinds[-2:] == [LeaseRenewed, AgentJoined]
        assert (kinds.count(AgentDisconnected), kinds.count(LeaseExpired), kinds.count(LeaseRenewed)) == (1, 1, 1)

    run(test, lease_s=LEASE_S)


def test_a_restarted_controller_says_that_it_was_away() -> None:
    """Nodes that the log shows as connected are told off as *our* absence; those that stay away expire, once."""

    async def test(rig: Rig) -> None:
        keys = {name: NodeKey(JobId("j"), NodeId(name)) for name in ("back", "gone", "lost")}
        rig.desk.take_over(
            [(keys["back"], Contact.ALIVE), (keys["gone"], Contact.ALIVE), (keys["lost"], Contact.EXPIRED)]
        )
        broken = await rig.until(AgentDisconnected, 2)
        assert [(fact.node, fact.ours) for fact in broken if isinstance(fact, AgentDisconnected)] == [
            ("back", True),
            ("gone", True),
        ]
        rig.warp_s = 29.0
        client, _ = await Client.welcomed(rig.port, node="back")
        client.report(joined(1, node="back"))
        await rig.until(LeaseRenewed)
        rig.warp_s = 31.0
        rig.desk._look(due=time.monotonic() + rig.warp_s)
        await rig.until(LeaseExpired)
        assert [fact.node for fact in rig.facts(LeaseExpired, LeaseRenewed)] == ["back", "gone"]
        assert "lost" not in [fact.node for fact in rig.facts()]

    run(test)


def test_heartbeats_keep_a_lease_and_leave_no_trace() -> None:
    """Empty reports renew the lease; none of them reaches the log."""

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        client.report(joined(1))
        await client.acked(1)
        before = rig.log.last()
        end = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < end:
            client.report()
            await asyncio.sleep(LEASE_S / 10)
        assert rig.log.last() == before
        await rig.until(LeaseExpired)

    run(test, lease_s=LEASE_S)


def test_leaving_in_good_order_is_no_loss() -> None:
    """After ``AgentLeft`` neither the closed connection nor the silence is reported."""

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        client.report(joined(1), AgentLeft(job=JobId("j"), node=NodeId("n0"), at=Nanos(2), seq=2, why="ctrl-C"))
        await client.acked(2)
        client.close()
        await asyncio.sleep(2 * LEASE_S)
        assert rig.facts(AgentDisconnected, LeaseExpired) == []

    run(test, lease_s=LEASE_S)


def test_nobody_speaks_for_another_node() -> None:
    """A fact that names another node or job ends the connection and is not logged."""

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        client.report(ready(1, node="n7"))
        await client.closed()
        assert rig.facts(type(ready(1))) == []

    run(test)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", (MAX_FRAME + 1).to_bytes(4, "big"), b"\0\0\0\x05hello"])
def test_strangers_are_turned_away(data: bytes) -> None:
    """Bytes that are no frame of ours end the connection at once."""

    async def test(rig: Rig) -> None:
        client = await Client.connect(rig.port)
        client.writer.write(data)
        await client.closed()

    run(test)


def test_reports_before_the_hello_are_out_of_turn() -> None:
    """Nothing is taken from a connection that has not introduced itself."""

    async def test(rig: Rig) -> None:
        client = await Client.connect(rig.port)
        client.report(joined(1))
        await client.closed()
        assert rig.facts() == []

    run(test)


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a hello does not stay open."""
    monkeypatch.setattr(connection_module, "HELLO_TIMEOUT_S", 0.05)

    async def test(rig: Rig) -> None:
        client = await Client.connect(rig.port)
        await client.closed(seconds=5)

    run(test)


def test_an_agent_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for one agent is bounded; it gets everything again after reconnecting."""
    monkeypatch.setattr(connection_module, "OUTGOING_LIMIT", 64 * 1024)

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        seq = 0
        while rig.desk.connected:
            await rig.writer.ask(exited(seq := seq + 1), wait_s=5)
            big = rig.desk._by_node.get(NodeKey(JobId("j"), NodeId("n0")))
            if big is not None:
                big.send(Refused(why="x" * 100_000, code=0))
        again, _ = await Client.welcomed(rig.port)
        assert len((await again.take(Orders)).actions) == seq

    run(test)


def test_a_storm_is_taken_in_at_the_pace_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the queue is full agents are not read from; afterwards every report arrives, once and in order."""
    monkeypatch.setattr(writer_module, "QUEUE_LIMIT", 20)

    async def test(rig: Rig) -> None:
        client, _ = await Client.welcomed(rig.port)
        rig.log.gate.clear()
        for seq in range(1, 200):
            client.send(Reports(facts=(ready(seq),)))
        connection = rig.desk._by_node[NodeKey(JobId("j"), NodeId("n0"))]
        while not connection.paused:
            await asyncio.sleep(0.001)
        rig.log.gate.set()
        await client.acked(199)
        assert [fact.seq for fact in rig.facts(type(ready(1)))] == list(range(1, 200))
        assert not connection.paused

    run(test)


def test_welcome_is_the_first_frame() -> None:
    """An agent can rely on the welcome before anything else, pending orders included."""

    async def test(rig: Rig) -> None:
        await rig.writer.ask(exited(1), wait_s=5)
        client, _ = await Client.welcomed(rig.port)
        await client.take(Orders)
        assert [type(frame) for frame in client.frames] == [Welcome, Orders]

    run(test)
