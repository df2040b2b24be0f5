"""Processes that are being started while something else happens: none is lost, none lives twice, none is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from agent_rig import AgentProcess, FakeController, join, joined, roster_of, shim_pids, until

from keepstep.agent.config import Program
from keepstep.model import env as names
from keepstep.model.facts import ActionDone, ActionFailed, WorkerExited
from keepstep.model.ids import Rank

SLEEPER = """
import os, pathlib, time
run = pathlib.Path(os.environ["KEEPSTEP_RUN_DIR"])
(run / (os.environ["KEEPSTEP_SLOT"] + ".pid")).write_text(str(os.getpid()))
time.sleep(100)
"""


@asynccontextmanager
async def rig(node_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[FakeController, AgentProcess]]:
    path = tmp_path / "sleeper.py"
    path.write_text(SLEEPER)
    controller = FakeController()
    await controller.open()
    agent = AgentProcess(node_dir, tmp_path / "run", controller, Program(kind="script", target=str(path)))
    await agent.start()
    try:
        await joined(controller)
        await until(lambda: zygote_of(node_dir) > 0)
        yield controller, agent
    finally:
        await agent.stop()
        await controller.close()
        print(agent.log)


def zygote_of(node_dir: Path) -> int:
    """The fork server below this node's shim; 0 while there is none."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            parent = Path(f"/proc/{name}/stat").read_text().rsplit(") ", 1)[1].split()[1]
            of_parent = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if b"keepstep.agent.zygote" in words and str(node_dir).encode() in of_parent:
            return int(name)
    return 0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The fork server is held, as on a machine that is short of CPU or memory."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def pid_file(agent: AgentProcess, slot: str) -> Path:
    return agent.run_dir / f"{slot}.pid"


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] in "ZX"
    except OSError:
        return True


def test_process_that_is_born_after_its_epoch_is_ended_at_once(node_dir: Path, tmp_path: Path) -> None:
    """A newer roster comes while the fork server is busy: what it starts for the older one does not live on."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            older, newer = roster_of("n0"), roster_of("n0", epoch=2, mode="restart", attempt=1)
            with stopped(zygote_of(node_dir)):
                controller.order(join(older))
                await until(lambda: set(agent.slots()) == {"r0e65536", "r1e65536"})
                controller.order(join(newer))
                assert "superseded" in (await controller.wait(ActionFailed)).why
            await controller.wait(ActionDone)
            await until(lambda: set(agent.slots()) == {"r0e131072", "r1e131072"})
            for slot in ("r0e131072", "r1e131072"):
                await until(lambda slot=slot: pid_file(agent, slot).exists())
            for slot in ("r0e65536", "r1e65536"):
                ended = await controller.wait(WorkerExited, lambda f, slot=slot: f.slot == slot)
                assert ended.killed_by_us
                if pid_file(agent, slot).exists():
                    assert is_gone(int(pid_file(agent, slot).read_text()))

    asyncio.run(story())


def test_agent_killed_while_programs_start_watches_them_afterwards(node_dir: Path, tmp_path: Path) -> None:
    """The next agent hears of processes that the former one had asked for, and so of their ends."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            with stopped(zygote_of(node_dir)):
                controller.order(join(roster_of("n0")))
                await until(lambda: set(agent.slots()) == {"r0e65536", "r1e65536"})
                await agent.kill()
                await agent.start()
                await until(lambda: len(controller.hellos) == 2)
            for slot in ("r0e65536", "r1e65536"):
                await until(lambda slot=slot: agent.pid_of(slot) > 0)
            os.kill(agent.pid_of("r1e65536"), signal.SIGKILL)
            ended = await controller.wait(WorkerExited)
            assert (ended.rank, ended.signal) == (Rank(1), signal.SIGKILL)

    asyncio.run(story())


def test_agent_and_shim_killed_while_programs_start_start_them_again(node_dir: Path, tmp_path: Path) -> None:
    """Asked for, never started, and nobody left who was asked: the roster still wants them, so they are asked for."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            zygote, shim = zygote_of(node_dir), agent.shim_pid()
            os.kill(zygote, signal.SIGSTOP)
            controller.order(join(roster_of("n0")))
            await until(lambda: set(agent.slots()) == {"r0e65536", "r1e65536"})
            await agent.kill()
            for pid in (shim, zygote):
                os.kill(pid, signal.SIGKILL)
            await agent.start()
            for slot in ("r0e65536", "r1e65536"):
                await until(lambda slot=slot: pid_file(agent, slot).exists())
                await until(lambda slot=slot: agent.pid_of(slot) > 0)

    asyncio.run(story())


def test_shim_that_is_just_being_started_does_not_outlive_the_agent(node_dir: Path, tmp_path: Path) -> None:
    """The node leaves before the successor of a dead shim has opened its socket (the fixture looks for it)."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (_, agent):
            await until(lambda: _connected(str(node_dir)))  # a first shim that never answers is another story
            shim = agent.shim_pid()
            os.kill(shim, signal.SIGKILL)
            successors: list[int] = []
            await until(lambda: bool(successors.extend(p for p in shim_pids(node_dir) if p != shim) or successors))
            with stopped(successors[0]):
                os.kill(agent.pid, signal.SIGTERM)
                await agent.ended()
                assert is_gone(successors[0])

    asyncio.run(story())


def _connected(node_dir: str) -> bool:
    """Whether the shim of this node has accepted a connection (state 03 of the kernel's table of local sockets)."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return any(len(row) > 7 and row[5] == "03" and row[7] == f"{node_dir}/{names.SHIM_SOCKET}" for row in rows)
