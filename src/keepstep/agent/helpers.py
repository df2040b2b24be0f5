"""The node's helpers: keeper, archiver and rendezvous store, started, found again, and started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable

from keepstep.agent import proc
from keepstep.agent.exceptions import SpawnRefused
from keepstep.agent.node import Node
from keepstep.agent.programs import Programs
from keepstep.agent.slots import Role, Slot
from keepstep.model import env as names
from keepstep.model.env import KEEPER_PORT_FILE
from keepstep.model.facts import StoreLost, StoreReady
from keepstep.model.topology import Roster

STORE_SOCKET = "store.sock"
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 10.0
CONNECT_RETRY_S = 0.02
STORE_START_S = 120.0
"""Importing torch on a loaded machine takes this long at worst."""
STORE_ANSWER_S = 30.0
"""A store that does not answer its agent for so long is frozen."""
KEEPER_START_S = 10.0
"""How long the first word to the controller waits for the keeper's port."""
FINISH_S = 120.0
"""How long the archiver may take for the last checkpoint when the job is done; what is pinned later is not written."""
FINISH_STOPPED_S = 20.0
"""The same where the job is stopped or fails: the launcher and the scheduler behind it have less patience."""
FINISH_SAY_S = 2.0
"""Waiting longer than this is said."""


class Helpers:
    def __init__(self, node: Node, programs: Programs) -> None:
        self._node = node
        self._programs = programs
        self._delays: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store_writer: asyncio.StreamWriter | None = None
        self._store_task: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        """Runs while the store owes us a word."""
        self._unused = 0
        self.stopping = False
        self._finishing = False
        self._archived = asyncio.Event()
        """There is no archiver any more, or nobody waits for it any more."""
        self.on_keeper_port: Callable[[], None] = lambda: None
        programs.on_helper_gone = self._gone

    def start(self) -> None:
        """Start what this node shall run and does not yet (a former agent may have left it running)."""
        for role in self._roles():
            found = self._slot_of(role)
            if found is None:
                self._start_later(role, 0.0)
            elif role == "store":
                self._attach_store()
        if self._slot_of("store") is None:
            self._store_lost("the store process is gone")

    def _roles(self) -> tuple[Role, ...]:
        """Generations are written where the memory is kept that they are written from."""
        services = self._node.config.services
        policy = self._node.spec.ckpt
        durable = bool(policy.dir or policy.local_dir)
        return (*services, "archiver") if durable and "keeper" in services else services

    async def finish(self, limit_s: float) -> None:
        """Let the archiver write the last checkpoint: no rank trains any more. Bounded."""
        slot = self._slot_of("archiver")
        if slot is None or not slot.alive():
            return
        self._finishing = True
        telling = asyncio.get_running_loop().create_task(self._tell_archiver())
        say = asyncio.get_running_loop().call_later(
            FINISH_SAY_S, self._node.say, f"the last checkpoint is being written; waiting for it up to {limit_s:g} s"
        )
        try:
            await asyncio.wait_for(self._archived.wait(), limit_s)
        except TimeoutError:
            self._node.say(
                f"the archiver has not finished within {limit_s:g} s and is ended; what it has completed stays, its "
                f"output is in {slot.err}"
            )
        finally:
            say.cancel()
            telling.cancel()

    async def _tell_archiver(self) -> None:
        """Until it has heard: it may still be starting, or have its queue full of bells."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            while True:
                try:
                    sock.sendto(names.ARCHIVER_FINISH, str(self._node.dir / names.ARCHIVER_SOCKET))
                    return
                except OSError:
                    await asyncio.sleep(CONNECT_RETRY_S)

    def hurry(self) -> None:
        """Whoever insists that the node leaves does not want to wait for a checkpoint."""
        self._archived.set()

    async def keeper_ready(self, before: int = 0) -> None:
        """Wait for the keeper's port, bounded: without it this node only cannot hold replicas for others.

        Args:
            before: ``port_written`` of a keeper that is gone; its successor writes the file anew.
        """
        if "keeper" not in self._node.config.services:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEPER_START_S):
                while not self._node.keeper_port or self._port_written() == before:
                    await asyncio.sleep(CONNECT_RETRY_S)

    def _port_written(self) -> int:
        """Names the file that a keeper has left; 0 while there is none."""
        try:
            return (self._node.dir / KEEPER_PORT_FILE).stat().st_ino
        except OSError:
            return 0

    @property
    def unused_store(self) -> int:
        """Port of a store that no epoch has used; 0 while there is none."""
        return self._unused

    def used(self, roster: Roster) -> None:
        """If the roster's store is ours, have the next one made."""
        if roster.store_host == self._node.config.host and roster.store_port == self._unused:
            self._unused = 0
            self._node.table.used_store = roster.store_port
            self._node.table.stores = []
            self._tell_store({"op": "use", "port": roster.store_port})

    # ------------------------------------------------------------ starting

    def _gone(self, slot: Slot) -> None:
        if slot.role == "archiver" and self._finishing:
            self._archived.set()
            return
        if self.stopping:
            return
        if slot.role == "store":
            self._heard_store()
            self._store_lost("the store process ended")
        delay = self._delays.get(slot.role, 0.0)
        if delay:
            self._node.say(f"the {slot.role} ended again; next start in {delay:g} s; its output is in {slot.err}")
        self._start_later(slot.role, delay)

    def _start_later(self, role: Role, delay: float) -> None:
        self._delays[role] = min(LAST_RETRY_S, max(FIRST_RETRY_S, delay * 2))
        task = asyncio.get_running_loop().create_task(self._start(role, delay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, role: Role, delay: float) -> None:
        await asyncio.sleep(delay)
        if self.stopping:
            return
        config = self._node.config
        place = ["--node-dir", config.node_dir, "--host", config.host]
        try:
            if role == "store":
                await self._programs.start_helper(role, "keepstep.agent.rendezvous_torch", place, fork=True)
                self._attach_store()
            elif role == "archiver":
                place = ["--node-dir", config.node_dir]
                await self._programs.start_helper(role, "keepstep.checkpoint.archiver", place, fork=False)
            else:
                place += ["--token-file", config.token_file]
                before = self._port_written()
                await self._programs.start_helper(role, "keepstep.checkpoint.keeper", place, fork=False)
                await self.keeper_ready(before)
                self.on_keeper_port()
        except SpawnRefused as error:
            self._node.say(f"the {role} could not be started: {error}")
            self._start_later(role, self._delays[role])

    # ------------------------------------------------------------ store

    def _attach_store(self) -> None:
        if self._store_task is None or self._store_task.done():
            self._store_task = asyncio.get_running_loop().create_task(self._listen_to_store())

    async def _listen_to_store(self) -> None:
        """Follow the store for as long as it lives; a line that breaks is opened again."""
        path = str(self._node.dir / STORE_SOCKET)
        clock, pause = asyncio.get_running_loop().time, CONNECT_RETRY_S
        while self._store_slot() is not None and not self.stopping:
            self._expect_word(STORE_START_S)
            try:
                reader, self._store_writer = await asyncio.open_unix_connection(path)
            except OSError:
                await asyncio.sleep(CONNECT_RETRY_S)
                continue
            since = clock()
            self._tell_store({"op": "list"})
            with contextlib.suppress(OSError, ValueError, KeyError):
                while line := await reader.readline():
                    self._store_ready(json.loads(line)["unused"])
                    self._delays["store"] = 0.0
            self._store_writer.close()
            self._store_writer = None
            pause = CONNECT_RETRY_S if clock() - since > LAST_RETRY_S else min(LAST_RETRY_S, pause * 2)
            await asyncio.sleep(pause)

    def _store_slot(self) -> Slot | None:
        return self._slot_of("store")

    def _slot_of(self, role: Role) -> Slot | None:
        return next((s for s in self._node.table if s.role == role), None)

    def _expect_word(self, within_s: float) -> None:
        """The store has to say something by then; an earlier limit that runs already stays."""
        if self._silence is None:
            self._silence = asyncio.get_running_loop().call_later(within_s, self._store_silent, within_s)

    def _heard_store(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _store_silent(self, within_s: float) -> None:
        """A store that does not answer serves no rank either: end it, so that another is started in its place."""
        self._silence = None
        slot = self._store_slot()
        if slot is None or self.stopping:
            return
        if not slot.pid:
            self._expect_word(within_s)  # it is not born yet; starting it has a limit of its own
            return
        self._node.say(f"the store has not answered for {within_s:g} s; ending it and starting another")
        if slot.alive():
            proc.kill_group(slot.pid)

    def _store_ready(self, port: int) -> None:
        self._heard_store()
        roster = self._node.roster
        if roster is not None and roster.store_host == self._node.config.host and roster.store_port == port:
            self._node.table.used_store = port
            self._tell_store({"op": "use", "port": port})
            return
        self._unused = port
        if port not in self._node.table.stores:
            self._node.table.stores = [port]
            self._node.report(StoreReady, host=self._node.config.host, port=port)

    def _store_lost(self, why: str) -> None:
        """Also where no unused store is left with it: ranks may be building communicators over the used one."""
        self._unused = 0
        roster, used = self._node.roster, self._node.table.used_store
        if self._node.table.stores or (used and roster is not None and roster.store_port == used):
            self._node.report(StoreLost, why=why)
        self._node.table.stores, self._node.table.used_store = [], 0

    def _tell_store(self, message: dict[str, object]) -> None:
        """Each question is answered with the unused store there is after it."""
        if self._store_writer is not None:
            self._store_writer.write(json.dumps(message).encode() + b"\n")
            self._expect_word(STORE_ANSWER_S)
