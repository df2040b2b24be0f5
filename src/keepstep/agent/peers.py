"""Agent to agent: one question and one answer per connection, only while no controller answers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable

from keepstep.agent.node import Node
from keepstep.model.wire import FrameError, PeerAnswer, PeerFault, PeerJoin, PeerToPeer, Unpacker, pack

CONNECT_S = 1.0
"""A node that does not take the connection by then is passed over."""
ANSWER_S = 10.0
QUESTION_S = 5.0

Answer = Callable[[PeerFault | PeerJoin], Awaitable[PeerAnswer]]


class PeerServer:
    """Listens on the node's peer port, the same one after a restart of the agent."""

    def __init__(self, node: Node, answer: Answer) -> None:
        self._node = node
        self._answer = answer
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        host = self._node.config.host
        try:
            self._server = await asyncio.start_server(self._converse, host, self._node.table.peer_port)
        except OSError:
            # The old port is taken; the controller and later rosters will tell the new one.
            self._server = await asyncio.start_server(self._converse, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._node.table.peer_port = self.port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(QUESTION_S):
                question = await _read(reader)
            writer.write(pack(await self._reply(question)))
            await writer.drain()
        except (OSError, TimeoutError, FrameError):
            pass
        finally:
            writer.close()

    async def _reply(self, question: PeerToPeer) -> PeerAnswer:
        if isinstance(question, PeerAnswer):
            return PeerAnswer(ok=False, why="an answer without a question")
        if not hmac.compare_digest(question.token.encode(), self._node.token.encode()):
            return PeerAnswer(ok=False, why="wrong token; all nodes of a job need the same --token-file")
        return await self._answer(question)


async def ask(host: str, port: int, question: PeerFault | PeerJoin) -> PeerAnswer:
    """Ask another agent.

    Raises:
        OSError, TimeoutError, FrameError: it is not there, or not one of us.
    """
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(pack(question))
        async with asyncio.timeout(ANSWER_S):
            answer = await _read(reader)
        if not isinstance(answer, PeerAnswer):
            raise FrameError(f"{host}:{port} answered with {type(answer).__name__}")
        return answer
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> PeerToPeer:
    unpacker: Unpacker[PeerToPeer] = Unpacker(PeerToPeer)
    while data := await reader.read(65536):
        for frame in unpacker.feed(data):
            return frame
    raise FrameError("the peer closed the connection without a word")
