"""A small agent for tests: connects, says hello, sends facts, collects what comes back."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from keepstep import __version__
from keepstep.model.facts import AgentJoined, AnyFact
from keepstep.model.ids import JobId, Nanos, NodeId
from keepstep.model.topology import JobSpec
from keepstep.model.wire import (
    PROTOCOL,
    Acked,
    AgentHello,
    ControllerToAgent,
    Frame,
    Orders,
    Refused,
    Reports,
    Unpacker,
    Welcome,
    pack,
)

F = TypeVar("F", bound=Frame)


def spec(job: str = "j", **changes: object) -> JobSpec:
    fields: dict[str, object] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "command": ("train.py",)}
    return JobSpec(job=JobId(job), **{**fields, **changes})  # type: ignore[arg-type]


def joined(seq: int = 1, *, node: str = "n0", job: str = "j", boot: str = "b1", **changes: object) -> AgentJoined:
    fields: dict[str, object] = {"host": "127.0.0.1", "peer_port": 1, "keeper_port": 2, "version": __version__}
    return AgentJoined(
        job=JobId(job),
        node=NodeId(node),
        at=Nanos(1),
        seq=seq,
        boot=boot,
        **{**fields, **changes},  # type: ignore[arg-type]
    )


class Client:
    """One connection. ``take`` waits for the next frame of a kind; frames before it are kept in ``frames``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.frames: list[Frame] = []
        self.reader = reader
        self.writer = writer
        self._unpacker: Unpacker[Welcome | Refused | Acked | Orders] = Unpacker(ControllerToAgent)
        self._ready: list[Frame] = []

    @classmethod
    async def connect(cls, port: int, *, address: str = "127.0.0.1") -> Client:
        """``address``: where the connection comes from."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))

    @classmethod
    async def welcomed(cls, port: int, **changes: object) -> tuple[Client, Welcome]:
        client = await cls.connect(port)
        client.hello(**changes)
        return client, await client.take(Welcome)

    def hello(self, *, job: str = "j", node: str = "n0", boot: str = "b1", **changes: object) -> None:
        fields: dict[str, object] = {"protocol": PROTOCOL, "version": __version__, "spec": spec(job)}
        self.send(AgentHello(job=JobId(job), node=NodeId(node), boot=boot, **{**fields, **changes}))  # type: ignore[arg-type]

    def report(self, *facts: AnyFact) -> None:
        self.send(Reports(facts=facts))

    def send(self, frame: Frame) -> None:
        self.writer.write(pack(frame))

    async def take(self, kind: type[F], *, seconds: float = 10.0) -> F:
        async with asyncio.timeout(seconds):
            while True:
                while self._ready:
                    frame = self._ready.pop(0)
                    self.frames.append(frame)
                    if isinstance(frame, kind):
                        return frame
                data = await self.reader.read(65536)
                if not data:
                    raise ConnectionResetError(f"closed while waiting for {kind.__name__}; got {self.frames}")
                self._ready += self._unpacker.feed(data)

    async def acked(self, seq: int) -> None:
        while (await self.take(Acked)).seq < seq:
            pass

    async def closed(self, *, seconds: float = 10.0) -> None:
        """Wait until the other side has hung up."""
        async with asyncio.timeout(seconds):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                return

    def close(self) -> None:
        self.writer.close()
