"""The agent's line to its store: what it does when the line breaks, and when the store says nothing any more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from agent_rig import bare_node, roster_of

from keepstep.agent import helpers as module
from keepstep.agent import proc
from keepstep.agent.helpers import Helpers
from keepstep.agent.node import Node
from keepstep.agent.programs import Programs
from keepstep.agent.slots import Slot
from keepstep.model.ids import SlotId


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own that stands for the store."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield child
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class _Programs:
    """Stands for what starts helpers: counts how often that is asked for."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.on_helper_gone: Any = None

    async def start_helper(self, role: str, *_: Any, **__: Any) -> None:
        self.started.set()


def _node(node_dir: Path, run_dir: Path, pid: int) -> Node:
    node = bare_node(node_dir, run_dir, services=("store",))
    stat = proc.stat(pid)
    assert stat is not None
    node.table.add(Slot(id=SlotId("store0"), role="store", out="", err="", pid=pid, start=stat.start))
    return node


def _helpers(node: Node) -> tuple[Helpers, _Programs]:
    programs = _Programs()
    return Helpers(node, cast(Programs, programs)), programs


async def _until_port(helpers: Helpers, port: int) -> None:
    async with asyncio.timeout(10):
        while helpers.unused_store != port:
            await asyncio.sleep(0.005)


def test_broken_line_to_a_living_store_is_opened_again(
    node_dir: Path, tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """The store closes the connection but lives: the agent connects again and learns of the next unused store."""

    async def story() -> None:
        lines = iter([7001, 7002])

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            port = next(lines)
            writer.write(json.dumps({"unused": port}).encode() + b"\n")
            if port == 7001:
                writer.close()

        server = await asyncio.start_unix_server(converse, path=str(node_dir / module.STORE_SOCKET))
        node = _node(node_dir, tmp_path, process.pid)
        helpers, programs = _helpers(node)
        helpers.start()
        await _until_port(helpers, 7002)
        assert node.table.stores == [7002]
        assert process.poll() is None
        assert not programs.started.is_set()
        helpers.stopping = True
        server.close()
        node.outbox.close()

    asyncio.run(story())


@pytest.mark.parametrize("opens", [False, True], ids=["never opens", "never answers"])
def test_silent_store_is_ended_and_replaced(
    node_dir: Path,
    tmp_path: Path,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    opens: bool,
) -> None:
    """A store that does not open its socket, or accepts and says nothing, is killed; its end starts another."""
    monkeypatch.setattr(module, "STORE_START_S", 0.2)
    monkeypatch.setattr(module, "STORE_ANSWER_S", 0.2)

    async def story() -> None:
        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = None
        if opens:
            server = await asyncio.start_unix_server(converse, path=str(node_dir / module.STORE_SOCKET))
        node = _node(node_dir, tmp_path, process.pid)
        helpers, programs = _helpers(node)
        helpers.start()
        ended = await asyncio.wait_for(asyncio.to_thread(process.wait), 10)
        assert ended == -signal.SIGKILL
        slot = node.table.get(SlotId("store0"))
        assert slot is not None
        node.table.remove(slot.id)
        programs.on_helper_gone(slot)
        await asyncio.wait_for(programs.started.wait(), 10)
        helpers.stopping = True
        if server is not None:
            server.close()
        node.outbox.close()

    asyncio.run(story())


def test_store_that_takes_a_use_without_an_answer_is_ended(
    node_dir: Path, tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has frozen after it was ready: an epoch takes its store and no next one comes, so it is killed."""
    monkeypatch.setattr(module, "STORE_ANSWER_S", 0.2)

    async def story() -> None:
        asked = asyncio.Event()

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b'{"unused": 7001}\n')
            assert json.loads(await reader.readline()) == {"op": "use", "port": 7001}
            asked.set()

        server = await asyncio.start_unix_server(converse, path=str(node_dir / module.STORE_SOCKET))
        node = _node(node_dir, tmp_path, process.pid)
        helpers, _ = _helpers(node)
        helpers.start()
        await _until_port(helpers, 7001)
        assert process.poll() is None
        helpers.used(roster_of("n0", store_port=7001))
        await asyncio.wait_for(asked.wait(), 5)
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), 10) == -signal.SIGKILL
        helpers.stopping = True
        server.close()
        node.outbox.close()

    asyncio.run(story())
