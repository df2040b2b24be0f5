"""A real agent process under a small fake controller: orders go in, facts come out."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from keepstep.agent.config import AgentConfig, Output, Program
from keepstep.agent.node import Node
from keepstep.model.actions import AnyAction, Join
from keepstep.model.facts import AgentJoined, AnyFact, Fact
from keepstep.model.ids import ActionId, Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import JobSpec, Member, Place, Roster
from keepstep.model.wire import Acked, AgentHello, AgentToController, Orders, Refused, Reports, Unpacker, Welcome, pack

JOB = JobId("j1")
F = TypeVar("F", bound=Fact)


class FakeController:
    """Speaks the controller's side of the wire; a test decides what it says."""

    def __init__(self) -> None:
        self.facts: list[AnyFact] = []
        self.hellos: list[AgentHello] = []
        self.acking = True
        self.acked: dict[str, int] = {}
        self.refuse: Refused | None = None
        self.port = 0
        self._news = asyncio.Event()
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Gone, as after kill -9: connections break, the port refuses."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unpacker: Unpacker[AgentToController] = Unpacker(AgentToController)
        node = ""
        try:
            while data := await reader.read(65536):
                for frame in unpacker.feed(data):
                    if isinstance(frame, AgentHello):
                        node = frame.node
                        self.hellos.append(frame)
                        self._writers[node] = writer
                        welcome = Welcome(version="t", acked=self.acked.get(node, 0), lease_s=10.0, heartbeat_s=0.2)
                        writer.write(pack(self.refuse or welcome))
                    else:
                        self._hear(node, frame, writer)
        except OSError:
            pass

    def _hear(self, node: str, reports: Reports, writer: asyncio.StreamWriter) -> None:
        self.facts += reports.facts
        if self.acking and reports.facts:
            self.acked[node] = max([self.acked.get(node, 0), *(f.seq for f in reports.facts)])
            writer.write(pack(Acked(seq=self.acked[node])))
        self._news.set()

    def order(self, *actions: AnyAction) -> None:
        for action in actions:
            self._writers[action.node].write(pack(Orders(actions=(action,))))

    def all(self, kind: type[F]) -> list[F]:
        return [f for f in self.facts if isinstance(f, kind)]

    async def wait(self, kind: type[F], where: Callable[[F], bool] = lambda f: True, *, within_s: float = 30.0) -> F:
        """The first such fact, past or future."""
        async with asyncio.timeout(within_s):
            while True:
                for fact in self.facts:
                    if isinstance(fact, kind) and where(fact):
                        return fact
                self._news.clear()
                await self._news.wait()


class AgentProcess:
    """One agent (and its launcher stand-in: this test process)."""

    def __init__(
        self, node_dir: Path, run_dir: Path, controller: FakeController, program: Program, **more: Any
    ) -> None:
        spec_fields = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **more.pop("spec", {})}
        fields: dict[str, Any] = {
            "node": "n0",
            "host": "127.0.0.1",
            "launcher_pid": os.getpid(),
            "services": (),
            "warm": "none",
            "orphan_grace_s": 20.0,
            **more,
        }
        self.config = AgentConfig(
            spec=JobSpec(job=JOB, **spec_fields),
            program=program,
            output=Output(log_dir=str(run_dir / "logs")),
            run_dir=str(run_dir),
            node_dir=str(node_dir),
            controller_host="127.0.0.1",
            controller_port=controller.port,
            **fields,
        )
        self.node_dir, self.run_dir = node_dir, run_dir
        run_dir.mkdir(exist_ok=True)
        self._file = run_dir / f"agent-{self.config.node}.json"
        self._file.write_bytes(msgspec.json.encode(self.config))
        self.process: asyncio.subprocess.Process | None = None

    @property
    def node(self) -> NodeId:
        return NodeId(self.config.node)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        log = open(self.run_dir / f"agent-{self.config.node}.log", "ab")  # noqa: SIM115, ASYNC230
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "keepstep.agent.main", "--config", str(self._file), stdout=log, stderr=log
        )
        log.close()

    async def kill(self) -> None:
        """kill -9 of the agent alone."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def ended(self, within_s: float = 20.0) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), within_s)

    async def stop(self) -> None:
        """Whatever state it is in: nothing may be left."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            try:
                await self.ended()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self.node_dir.exists():
            end_shim(self.node_dir)

    @property
    def log(self) -> str:
        return (self.run_dir / f"agent-{self.config.node}.log").read_text()

    def slots(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode((self.node_dir / "slots.json").read_bytes())["slots"]
        return found

    def pid_of(self, slot: str) -> int:
        return int(self.slots()[slot]["pid"])

    def shim_pid(self) -> int:
        return next(pid for pid in shim_pids(self.node_dir))


def shim_pids(node_dir: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"keepstep.agent.shim" in words and str(node_dir).encode() in words:
                found.append(int(name))
    return found


def end_shim(node_dir: Path) -> None:
    for pid in shim_pids(node_dir):
        os.kill(pid, signal.SIGTERM)


_numbers = itertools.count(1)


def next_id(step: str) -> ActionId:
    return ActionId(f"t/{step}/{next(_numbers)}")


def roster_of(
    *nodes: str,
    epoch: int = 1,
    per_node: int = 2,
    mode: Any = "fresh",
    slots: dict[int, str] | None = None,
    newcomers: tuple[int, ...] = (),
    peer_ports: dict[str, int] | None = None,
    store_port: int = 1,
    **more: Any,
) -> Roster:
    """A roster with ``per_node`` ranks on each node; ``epoch`` counts majors."""
    major = epoch << 16
    members = []
    for place, node in enumerate(nodes):
        for local in range(per_node):
            rank = place * per_node + local
            slot = (slots or {}).get(rank, f"r{rank}e{major}")
            members.append(
                Member(
                    rank=Rank(rank), node=NodeId(node), slot=SlotId(slot), local_rank=local, newcomer=rank in newcomers
                )
            )
    places = tuple(
        Place(node=NodeId(n), host="127.0.0.1", keeper_port=0, peer_port=(peer_ports or {}).get(n, 0)) for n in nodes
    )
    return Roster(
        job=JOB,
        epoch=Epoch(major),
        origin="controller",
        mode=mode,
        world_size=len(members),
        members=tuple(members),
        places=places,
        store_host="127.0.0.1",
        store_port=store_port,
        **more,
    )


def join(roster: Roster, node: str = "n0") -> Join:
    return Join(id=next_id("join"), job=JOB, epoch=roster.epoch, node=NodeId(node), roster=roster)


def bare_node(node_dir: Path, run_dir: Path, **more: Any) -> Node:
    """What the parts of an agent share, without the agent."""
    fields: dict[str, Any] = {"services": (), **more}
    config = AgentConfig(
        spec=JobSpec(job=JOB, min_nodes=1, max_nodes=1, nproc_per_node=1),
        program=Program(kind="script", target="t.py"),
        output=Output(log_dir=str(run_dir)),
        node="n0",
        host="127.0.0.1",
        run_dir=str(run_dir),
        node_dir=str(node_dir),
        controller_host="127.0.0.1",
        controller_port=1,
        launcher_pid=0,
        **fields,
    )
    node = Node(config)
    node.outbox.open()
    return node


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """For states of files and processes, which nobody announces."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        await asyncio.sleep(0.01)


async def joined(controller: FakeController, agents: int = 1) -> dict[str, AgentJoined]:
    """Wait for so many agents; their first words by node."""
    async with asyncio.timeout(30):
        while len({f.node for f in controller.all(AgentJoined)}) < agents:
            await asyncio.sleep(0.01)
    return {f.node: f for f in controller.all(AgentJoined)}
