"""Agent of a node: ``python -m keepstep.agent.main --config FILE``.

Puts the parts together and lives until the controller, a signal or the launcher's end says otherwise. May be killed at
any moment: the launcher starts it again and it picks up what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from keepstep.agent import departure, proc
from keepstep.agent.config import AgentConfig
from keepstep.agent.console import Console
from keepstep.agent.departure import Departure
from keepstep.agent.deputy import Deputy
from keepstep.agent.exceptions import AgentError, BadConfig
from keepstep.agent.faults import Faults
from keepstep.agent.helpers import FINISH_S, FINISH_STOPPED_S, Helpers
from keepstep.agent.node import Node
from keepstep.agent.notes import NotesDoor
from keepstep.agent.pace import Paces
from keepstep.agent.programs import Programs
from keepstep.agent.pulse import Pulse
from keepstep.agent.restores import Restores
from keepstep.agent.shimlink import ShimLink
from keepstep.agent.supervisor import Supervisor
from keepstep.agent.teller import Teller
from keepstep.agent.uplink import Uplink
from keepstep.agent.workers import Workers
from keepstep.model.actions import StopJob
from keepstep.model.facts import AgentLeft, WorkerExited
from keepstep.model.wire import Welcome

STOP_GRACE_S = 10.0
"""From the signal to SIGKILL when this node is told to leave; a second signal ends the waiting."""
CONSOLE_S = 2.0
"""How long the last lines may take to reach the terminal."""
LONELY_LOOK_S = 0.25
SOCKET_PATH_BYTES = 107


class Agent:
    def __init__(self, config: AgentConfig) -> None:
        self.node = node = Node(config)
        node.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.restarted = node.load()
        node.outbox.open()
        self.teller = Teller()
        self.console = Console(config.node, config.output, node.dir)
        self.link = ShimLink(node)
        self.programs = Programs(node, self.link, self.console)
        self.workers = Workers(node)
        self.faults = Faults(node, self.workers)
        self.supervisor = Supervisor(node, self.programs, self.workers, self.faults)
        self.helpers = Helpers(node, self.programs)
        self.notes = NotesDoor(node)
        self.uplink = Uplink(node)
        self.deputy = Deputy(node, self.supervisor, self.helpers, self.uplink)
        self.pulse = Pulse(node)
        self.restores = Restores(node)
        self.paces = Paces(node)
        self._left: asyncio.Future[Departure] = asyncio.get_running_loop().create_future()
        self._farewell: asyncio.Task[None] | None = None
        self._connect_parts()

    def _connect_parts(self) -> None:
        self.faults.shim_pid = lambda: self.link.pid
        self.uplink.on_orders = self.supervisor.order
        self.uplink.on_welcome = self._welcomed
        self.supervisor.on_join = self.helpers.used
        self.supervisor.on_stop = self._stopped
        self.workers.on_resumed = self.programs.resumed
        self.helpers.on_keeper_port = self.uplink.joined_again
        self.programs.on_fault = self.deputy.consider
        self.pulse.on_frozen = self.deputy.consider
        self.pulse.on_dead_standby = self.programs.end_standby

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """Until the end of this node's part; the exit code is the job's."""
        parts: list[asyncio.Task[None]] = []
        try:
            self.node.write_checkpoint_config()
            await self.workers.open()
            self.notes.open()
            await self.deputy.server.open()
            self.uplink.peer_port = self.deputy.server.port
            self._watch_signals()
            self._watch_launcher()
            self.teller.start()
            self.node.tell = self.teller.say
            self.console.start()
            self.programs.adopt()
            work = (
                self.link.run(),
                self._report(),
                self.pulse.run(),
                self.restores.run(),
                self.paces.run(),
                self._lonely(),
            )
            parts = [self._part(one) for one in work]
            self.helpers.start()
            if self.restarted:
                self.node.say("agent is back; it goes on with what runs here")
                self.supervisor.resume()
                self._recall_faults()
            end = await self._left
        except AgentError as error:
            self.node.say(f"error: {error}")
            await self.supervisor.end_programs(STOP_GRACE_S)
            end = Departure(code=error.code, why=str(error), category="infrastructure")
        await self._leave(end, parts)
        return end.code

    def _recall_faults(self) -> None:
        """What a former agent had reported but nobody has heard may have to be helped without a controller."""
        for fact in self.node.outbox.pending():
            if isinstance(fact, WorkerExited) and fact.code != 0 and not fact.killed_by_us:
                self.deputy.consider(fact, trained=self.node.resumed > 0)

    async def _report(self) -> None:
        await self.helpers.keeper_ready()
        await self.uplink.run()

    def _welcomed(self, welcome: Welcome) -> None:
        asked = self.node.spec.pace_window_s
        self.paces.window_s = welcome.pace_window_s if asked is None else asked

    def _part(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A part that must not end by itself; its error is the agent's."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._part_ended)
        return task

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._left.done():
            return
        error = task.exception()
        if error is not None:
            self._left.set_exception(
                error if isinstance(error, AgentError) else AgentError(f"internal error: {error!r}")
            )

    async def _lonely(self) -> None:
        """Without a controller nobody says when the job is over: leave when nothing is left to wait for."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        limit = self.node.config.controller_wait_s
        while True:
            await asyncio.sleep(LONELY_LOOK_S)
            over = bool(self.node.seats()) and not self.node.table.workers() and not self.supervisor.stopping
            if not over or self.uplink.up:
                since = None
                continue
            since = since if since is not None else loop.time()
            if loop.time() - since >= limit and not self._left.done():
                await self.helpers.finish(FINISH_S)
                self._left.set_result(Departure.alone(self.node.table.first_fault, limit))

    # ------------------------------------------------------------ the end

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if self._farewell is not None:
            self.helpers.hurry()
            for slot in self.node.table:
                if slot.is_program:
                    self.supervisor.kill(slot)
            return
        self._say_farewell(f"stopped by {number.name}", 128 + number, number)

    def _watch_launcher(self) -> None:
        pid = self.node.config.launcher_pid
        if not pid:
            return
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self._launcher_gone()
            return
        asyncio.get_running_loop().add_reader(fd, self._launcher_gone, fd)

    def _launcher_gone(self, fd: int | None = None) -> None:
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        if self._farewell is None:
            self._say_farewell("the launcher (keepstep run) ended", 128 + signal.SIGTERM, signal.SIGTERM)

    def _say_farewell(self, why: str, code: int, number: int) -> None:
        async def leave() -> None:
            self.node.report(AgentLeft, why=why)
            # Heard before any rank ends: what breaks on other nodes then is known to be a consequence.
            await self.uplink.flush()
            await self.supervisor.end_programs(STOP_GRACE_S, number)
            await self.helpers.finish(FINISH_STOPPED_S)
            self.notes.flush()
            await self.uplink.flush()
            if not self._left.done():
                self._left.set_result(Departure(code=code, why=why))

        self._farewell = asyncio.get_running_loop().create_task(leave())

    async def _stopped(self, stop: StopJob) -> None:
        """The controller's last order is carried out."""
        await self.helpers.finish(FINISH_STOPPED_S if stop.code else FINISH_S)
        self.notes.flush()
        await self.uplink.flush()
        if not self._left.done():
            self._left.set_result(Departure.ordered(stop))

    async def _leave(self, end: Departure, parts: list[asyncio.Task[None]]) -> None:
        self.helpers.stopping = True
        for task in parts[1:]:
            task.cancel()
        self.console.close(CONSOLE_S)
        await self.link.leave()
        for slot in self.node.table:
            # Children of a shim that had died before: its successor does not know them.
            if slot.alive():
                proc.kill_group(slot.pid)
        for task in parts:
            task.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        self.programs.close()
        self.workers.close()
        self.notes.close()
        self.deputy.server.close()
        self.node.outbox.close()
        departure.write_exit(self.node, end, self.node.table.first_fault)
        departure.remove_node_dir(self.node)
        self.teller.close(CONSOLE_S)


def load_config(path: Path) -> AgentConfig:
    """Read and check what the launcher wrote.

    Raises:
        BadConfig: with the field and the way out.
    """
    try:
        config = msgspec.json.decode(path.read_bytes(), type=AgentConfig)
    except OSError as error:
        raise BadConfig(f"agent configuration {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BadConfig(f"agent configuration {path}: {error}") from error
    longest = f"{config.node_dir}/keeper.sock".encode()
    if len(longest) > SOCKET_PATH_BYTES:
        raise BadConfig(
            f"node_dir {config.node_dir} is too long for Unix sockets ({len(longest)} bytes with a socket's name, "
            f"limit {SOCKET_PATH_BYTES}); set KEEPSTEP_RUNTIME_DIR to a shorter directory in memory"
        )
    return config


async def _main(config: AgentConfig) -> int:
    return await Agent(config).run()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="keepstep-agent", description="Agent of one node.")
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        config = load_config(options.config)
        proc.become_subreaper()
        code = _run(config)
    except AgentError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.code
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    # A console thread that hangs on a reader who does not read must not hold the process.
    os._exit(code)


def _run(config: AgentConfig) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_main(config))
    return uvloop.run(_main(config))


if __name__ == "__main__":
    main()
