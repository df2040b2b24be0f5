"""The archiver as one of the node's helpers: started where there are durable tiers, and waited for at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from agent_rig import bare_node

from keepstep.agent import proc
from keepstep.agent.helpers import Helpers
from keepstep.agent.node import Node
from keepstep.agent.programs import Programs
from keepstep.agent.slots import Slot
from keepstep.model import env
from keepstep.model.ids import SlotId
from keepstep.model.settings import CheckpointPolicy

FINISHES = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sock.bind(sys.argv[1])
print("ready", flush=True)
while sock.recv(99) != b"finish":
    pass
"""
IGNORES = FINISHES.replace('!= b"finish"', "")


class _Programs:
    """Stands for what starts helpers: remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.on_helper_gone: Any = None

    async def start_helper(self, role: str, module: str, *_: Any, **__: Any) -> None:
        self.asked.append((role, module))


def _with_archiver(node_dir: Path, run_dir: Path, program: str) -> tuple[Node, subprocess.Popen[str]]:
    node = bare_node(node_dir, run_dir)
    argv = [sys.executable, "-c", program, str(node_dir / env.ARCHIVER_SOCKET)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    stat = proc.stat(child.pid)
    assert stat is not None
    node.table.add(Slot(id=SlotId("archiver0"), role="archiver", out="", err="", pid=child.pid, start=stat.start))
    return node, child


@pytest.mark.parametrize(
    ("policy", "started"),
    [
        (CheckpointPolicy(), False),
        (CheckpointPolicy(dir="s3://b/x"), True),
        (CheckpointPolicy(local_dir="/x"), True),
    ],
)
def test_started_only_where_there_is_a_durable_tier(
    node_dir: Path, tmp_path: Path, policy: CheckpointPolicy, started: bool
) -> None:
    """A job without one does not pay for a process."""

    async def story() -> list[tuple[str, str]]:
        node = bare_node(node_dir, tmp_path, services=("keeper",))
        node.spec = type(node.spec)(job=node.job, min_nodes=1, max_nodes=1, nproc_per_node=1, ckpt=policy)
        programs = _Programs()
        helpers = Helpers(node, cast(Programs, programs))
        helpers.start()
        await asyncio.sleep(0.05)
        helpers.stopping = True
        for task in helpers._tasks:
            task.cancel()
        return programs.asked

    asked = asyncio.run(story())
    assert (("archiver", "keepstep.checkpoint.archiver") in asked) == started


def test_the_job_waits_for_the_last_checkpoint(node_dir: Path, tmp_path: Path) -> None:
    """At the end the archiver is told to finish; when it has, the node goes on, and no other one is started."""

    async def story() -> None:
        node, child = _with_archiver(node_dir, tmp_path, FINISHES)
        programs = _Programs()
        helpers = Helpers(node, cast(Programs, programs))

        async def reap() -> None:
            await asyncio.to_thread(child.wait)
            slot = node.table.get(SlotId("archiver0"))
            assert slot is not None
            node.table.remove(slot.id)
            helpers._gone(slot)

        reaper = asyncio.create_task(reap())
        await helpers.finish(30.0)
        await reaper
        assert child.returncode == 0
        await asyncio.sleep(0)
        assert programs.asked == []

    asyncio.run(story())


def test_an_archiver_that_never_finishes_holds_nobody(
    node_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The wait has an end, which is said; and whoever presses ctrl-C again does not wait at all."""

    async def story() -> None:
        node, child = _with_archiver(node_dir, tmp_path, IGNORES)
        said: list[str] = []
        node.tell = said.append
        helpers = Helpers(node, cast(Programs, _Programs()))
        await helpers.finish(0.1)
        assert any("has not finished within 0.1 s" in line for line in said)
        asyncio.get_running_loop().call_soon(helpers.hurry)
        await helpers.finish(3600.0)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    asyncio.run(story())


def test_without_an_archiver_nobody_waits(node_dir: Path, tmp_path: Path) -> None:
    """A job that has none is over at once."""

    async def story() -> None:
        helpers = Helpers(bare_node(node_dir, tmp_path), cast(Programs, _Programs()))
        await asyncio.wait_for(helpers.finish(3600.0), 1.0)

    asyncio.run(story())
