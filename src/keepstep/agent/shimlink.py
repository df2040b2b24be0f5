"""The agent's end of the shim: connects, starts one where there is none, asks for programs, hears of exits.

A request survives the shim: after a reconnect the shim's own list decides whether a program was started or has to be
asked for again, so none is lost and none is started twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from keepstep.agent import proc
from keepstep.agent.environ import omp_threads
from keepstep.agent.exceptions import ShimUnavailable, SpawnRefused
from keepstep.agent.node import Node
from keepstep.agent.streaming import streaming
from keepstep.model import env as names

START_S = 20.0
"""A shim that has not opened its socket by then is broken."""
SPAWN_S = 300.0
"""Longest wait for a program to be started; most of it is the warm-up on a loaded machine."""
RETRY_S = 0.01
LONG_RETRY_S = 5.0
"""Between two tries to start a shim when one try has failed as a whole."""
LEAVE_S = 2.0
LINE_BYTES = 16 * 1024 * 1024
KEPT_STATUS = 4096

Message = dict[str, Any]


class ShimLink:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._writer: asyncio.StreamWriter | None = None
        self._requests: dict[str, Message] = {}
        self._waiters: dict[str, asyncio.Future[int]] = {}
        self._statuses: dict[int, int] = {}
        self._heard: dict[int, asyncio.Event] = {}
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        """The shim that we started last; it may not have opened its socket yet."""
        self._told = asyncio.Event()
        """Set once the shim has said what it knows."""
        self.pid = 0
        self.zygote_warm = False
        self.on_state: Callable[[dict[str, int], set[str]], None] = lambda pids, queued: None
        """Told at each (re)connect: running pids by name, and names still waiting."""
        self.on_started: Callable[[str, int], None] = lambda name, pid: None
        """Told of each start, also of one that a former agent asked for or that nobody waits for any more."""
        self.on_refused: Callable[[str, str], None] = lambda name, why: None

    # ------------------------------------------------------------ public

    @property
    def asked(self) -> set[str]:
        """Names of programs that were asked for and not yet answered."""
        return set(self._requests)

    async def run(self) -> None:
        """Keep a connection for as long as the agent lives; never returns by itself.

        Raises:
            ShimUnavailable: the very first one cannot be started.
        """
        while not self._closing:
            try:
                reader, self._writer = await self._connect()
            except ShimUnavailable as error:
                if not self._told.is_set():
                    raise
                # Programs are running; that no new one can be started is no reason to end them.
                self._node.say(f"{error}; trying again in {LONG_RETRY_S:g} s")
                await asyncio.sleep(LONG_RETRY_S)
                continue
            self._send({"op": "hello"})
            try:
                while line := await reader.readline():
                    self._hear(json.loads(line))
            except (OSError, ValueError):
                pass
            finally:
                self._writer.close()
                self._writer = None
            if not self._closing:
                self._node.say("the process parent (shim) is gone; programs go on, starting another")

    async def spawn(self, request: Message) -> int:
        """Start a program and return its pid; asking twice for one name gives the same process.

        Raises:
            SpawnRefused: it cannot be started, and why.
        """
        name = request["id"]
        future = self._waiters.get(name)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            # Whoever waits may be cancelled; then nobody asks for the error, and that is no news for the terminal.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._waiters[name] = future
            self._requests[name] = {"op": "spawn", **request}
            self._send(self._requests[name])
        try:
            async with asyncio.timeout(SPAWN_S):
                return await asyncio.shield(future)
        except TimeoutError as error:
            self._forget(name)
            raise SpawnRefused(
                f"{name} was not started within {SPAWN_S:g} s; see shim.err in the log directory"
            ) from error

    async def status(self, pid: int, within_s: float) -> int | None:
        """Wait status of an ended process, or ``None`` when the shim does not say within that time."""
        if (known := self._own_status(pid)) is not None:
            return known
        if not self._told.is_set():
            # We are new ourselves; the shim may have kept the exit for us.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), START_S)
        if pid not in self._statuses and self._writer is not None:
            event = self._heard.setdefault(pid, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), within_s)
            self._heard.pop(pid, None)
        found = self._statuses.pop(pid, None)
        return found if found is not None else self._own_status(pid)

    def end(self, name: str) -> None:
        """SIGKILL a program that nothing here knows of."""
        self._send({"op": "kill", "id": name, "signal": signal.SIGKILL})

    def settle(self, pid: int) -> None:
        """The exit is reported; the shim may forget it."""
        self._send({"op": "ack", "pid": pid})

    async def leave(self) -> None:
        """End the shim and everything it started."""
        self._closing = True
        self._send({"op": "leave"})
        deadline = asyncio.get_running_loop().time() + LEAVE_S
        while self.pid and proc.stat(self.pid) is not None and asyncio.get_running_loop().time() < deadline:
            if (now := proc.stat(self.pid)) is not None and now.state == "Z":
                break
            await asyncio.sleep(RETRY_S)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._process is not None:
            # Just started, it has not heard that it shall leave, and would wait for an agent.
            self._process.kill()

    # ------------------------------------------------------------ connection

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = str(self._node.dir / names.SHIM_SOCKET)
        process: subprocess.Popen[bytes] | None = None
        deadline = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=LINE_BYTES)
            except OSError as error:
                if process is None:
                    process = self._process = self._start()
                ended = process.poll()
                if ended is not None or asyncio.get_running_loop().time() > deadline:
                    what = f"ended with {ended}" if ended is not None else f"did not answer within {START_S:g} s"
                    log = self._node.log_dir() / "shim.err"
                    raise ShimUnavailable(f"the process parent (shim) {what}; its output is in {log}") from error
                await asyncio.sleep(RETRY_S)

    def _start(self) -> subprocess.Popen[bytes]:
        config = self._node.config
        # The C library reads its settings, libgomp and OpenBLAS their thread count, when a program is loaded; for
        # trainers that is in the fork server.
        env = {**os.environ, **streaming(os.environ)}
        if (threads := omp_threads(config, env)) is not None:
            env["OMP_NUM_THREADS"] = threads
        if paths := env.get("PYTHONPATH"):
            env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in paths.split(os.pathsep) if p)
        command = [sys.executable, "-m", "keepstep.agent.shim", "--node-dir", str(self._node.dir)]
        command += ["--warm", config.warm, "--orphan-grace-s", str(config.orphan_grace_s)]
        with open(self._node.log_dir() / "shim.err", "ab") as log:
            # In a directory of ours: a user's random.py or queue.py in the current one must not become the shim's.
            return subprocess.Popen(
                command,
                env=env,
                cwd=self._node.dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    # ------------------------------------------------------------ what it says

    def _hear(self, message: Message) -> None:
        match message["ev"]:
            case "state":
                self._hear_state(message)
            case "spawned":
                # A status that is still kept under this number is that of a former process.
                self._statuses.pop(message["pid"], None)
                self._resolve(message["id"], message["pid"])
            case "refused":
                self._refuse(message["id"], message["why"])
            case "exit":
                self._exited(message["pid"], message["status"])
            case "warm":
                self.zygote_warm = True

    def _hear_state(self, message: Message) -> None:
        self.pid = message["pid"]
        self.zygote_warm = message["warm"]
        pids = {p["id"]: p["pid"] for p in message["procs"]}
        for ended in message["exits"]:
            pids.setdefault(ended["id"], ended["pid"])
            self._exited(ended["pid"], ended["status"])
        queued = set(message["queued"])
        for name, request in list(self._requests.items()):
            if name in pids:
                self._resolve(name, pids[name])
            elif name not in queued:
                self._send(request)
        self.on_state(pids, queued)
        self._told.set()

    def _resolve(self, name: str, pid: int) -> None:
        self.on_started(name, pid)
        future = self._waiters.get(name)
        if future is not None and not future.done():
            future.set_result(pid)
        self._forget(name)

    def _refuse(self, name: str, why: str) -> None:
        self.on_refused(name, why)
        future = self._waiters.get(name)
        if future is not None and not future.done():
            future.set_exception(SpawnRefused(why))
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._waiters.pop(name, None)
        self._requests.pop(name, None)

    def _exited(self, pid: int, status: int) -> None:
        self._statuses[pid] = status
        while len(self._statuses) > KEPT_STATUS:
            del self._statuses[next(iter(self._statuses))]
        if (event := self._heard.get(pid)) is not None:
            event.set()

    def _own_status(self, pid: int) -> int | None:
        """Collect it ourselves where the process has become our child because its shim is gone."""
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return status if found else None
