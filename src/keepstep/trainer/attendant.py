"""Attendant: where there is no agent, it keeps a node's keeper and archiver running, and cleans up behind them.

One per node and job, started by a rank and detached from it, so that neither the rank's death nor torchrun's restart
of all ranks touches it. Each rank holds a connection for as long as it lives: the kernel closes it, however the rank
ends. When nobody has been connected for ``--linger-s`` the archiver may finish, everything ends, and the memory is
given back.

    python -m keepstep.trainer.attendant --node-dir D --host H --linger-s N
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from keepstep.checkpoint import config as checkpoint_config
from keepstep.checkpoint import nodedir, notes
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.files import read_int, write_atomic
from keepstep.checkpoint.limiter import Limiter
from keepstep.model import env
from keepstep.trainer.helper import Helper, Role

SOCKET = "level1.sock"
TOKEN = "token"
"""File of the node directory: what keepers of this job show each other."""
LOG = "attendant.log"
LINGER_S = 300.0
"""How long memory and its keeper outlive the last rank: torchrun needs seconds to start all ranks anew."""
DONE_LINGER_S = 20.0
"""The same where every rank had completed its loop."""
FINISH_S = 120.0
"""How long the archiver may take for the last checkpoint."""
LOCK_S = 10.0
"""How long a predecessor that is on its way out may hold the node directory."""
KEEPER_START_S = 20.0
"""How long ranks wait for the keeper's port; without it they only have no copies on other nodes."""
TOUCH_S = 60.0
"""How often the node directory is marked as in use; see ``nodedir.LOST_S``."""
LINE_BYTES = 64 * 1024
BACKLOG_BYTES = 256 * 1024
"""A rank that lets this many bytes of notes pile up hears no more of them."""
TELLING = ("skipped", "damaged", "gap", "closed")
"""Notes that people see at the terminal."""
_POLL_S = 0.02


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """A rank begins to train here. Answered with ``Ready``.

    Attributes:
        config, token: from the first rank of a node, for the node directory; keeper and archiver that go by other ones
            are started again.
    """

    rank: int
    config: CheckpointConfig | None = None
    token: str = ""


class Finish(Struct, frozen=True, kw_only=True, tag="finish"):
    """This rank's loop is complete. Answered with ``Finished`` when the archiver has nothing more to do."""


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    keeper_port: int


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    whole: bool


class Say(Struct, frozen=True, kw_only=True, tag="say"):
    """Something that people should read."""

    text: str


FromRank = Hello | Finish
ToRank = Ready | Finished | Say


class Attendant:
    """One node's."""

    def __init__(self, node_dir: Path, host: str, linger_s: float) -> None:
        self._dir, self._host, self._linger_s = node_dir, host, linger_s
        self._helpers: dict[Role, Helper] = {}
        self._under: tuple[CheckpointConfig, str] | None = None
        """Settings and token that the helpers were started under."""
        self._configuring = asyncio.Lock()
        self._ranks: dict[asyncio.StreamWriter, int] = {}
        self._done: set[asyncio.StreamWriter] = set()
        self._clean = False
        """Every rank of the last start had completed its loop when it left."""
        self._changed = asyncio.Event()
        self._finishing: asyncio.Task[bool] | None = None
        self._limiter = Limiter()

    async def run(self) -> None:
        """Until nobody has needed us for long enough."""
        lock = await self._lock()
        if lock is None:
            print(f"{self._dir} is held by another process", flush=True)
            return
        path = str(self._dir / SOCKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        bell = self._open_notes()
        server = await asyncio.start_unix_server(self._converse, path=path, limit=LINE_BYTES)
        os.chmod(path, 0o600)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        touching = asyncio.get_running_loop().create_task(self._touch())
        try:
            await self._until_unneeded()
        finally:
            server.close()
            touching.cancel()
            if bell is not None:
                asyncio.get_running_loop().remove_reader(bell)
            await self._finish()
            for helper in list(self._helpers.values()):
                await helper.end()
            nodedir.remove_node_dir(self._dir, self._dir.parent.parent)
            os.close(lock)

    # ------------------------------------------------------------ when to end

    async def _until_unneeded(self) -> None:
        while True:
            self._changed.clear()
            limit = None if self._ranks else min(self._linger_s, DONE_LINGER_S) if self._clean else self._linger_s
            try:
                await asyncio.wait_for(self._changed.wait(), limit)
            except TimeoutError:
                return
            if self._linger_s < 0:
                return

    def _stop(self) -> None:
        self._linger_s = -1.0
        self._changed.set()

    async def _lock(self) -> int | None:
        deadline = time.monotonic() + LOCK_S
        while True:
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if (fd := nodedir.lock(self._dir / nodedir.OWNER)) is not None:
                    # A predecessor may have removed the directory while we waited for its lock.
                    if (self._dir / nodedir.OWNER).exists() and os.fstat(fd).st_nlink:
                        return fd
                    os.close(fd)
                    continue
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_POLL_S)

    async def _touch(self) -> None:
        """Mark the directory as in use: should we be killed, another one can be started before it counts as lost."""
        root = self._dir.parent.parent
        while True:
            with contextlib.suppress(OSError):
                os.utime(self._dir / nodedir.OWNER)
            nodedir.remove_lost_memory(root)
            await asyncio.sleep(TOUCH_S)

    # ------------------------------------------------------------ helpers

    async def _configure(self, config: CheckpointConfig, token: str) -> None:
        """Have keeper and archiver run under these settings."""
        async with self._configuring:
            if (config, token) != self._under:
                for helper in list(self._helpers.values()):
                    await helper.end()
                self._helpers.clear()
                checkpoint_config.write(self._dir, config)
                write_atomic(self._dir / TOKEN, token.encode())
                os.chmod(self._dir / TOKEN, 0o600)
                self._under = config, token
            place = ["--node-dir", str(self._dir)]
            keeper = [*place, "--host", self._host, "--token-file", str(self._dir / TOKEN)]
            self._start("keeper", "keepstep.checkpoint.keeper", keeper)
            if config.durable:
                self._start("archiver", "keepstep.checkpoint.archiver", place)

    def _start(self, role: Role, module: str, args: list[str]) -> None:
        if role not in self._helpers:
            self._helpers[role] = Helper(role, [sys.executable, "-m", module, *args], self._dir / f"{role}.log")

    async def _keeper_port(self) -> int:
        deadline = time.monotonic() + KEEPER_START_S
        while time.monotonic() < deadline:
            if port := read_int(self._dir / env.KEEPER_PORT_FILE):
                return port
            await asyncio.sleep(_POLL_S)
        return 0

    async def _finish(self) -> bool:
        """Let the archiver write what is pinned and end; false when it took too long."""
        archiver = self._helpers.pop("archiver", None)
        if archiver is None:
            return True
        archiver.retire()
        telling = asyncio.get_running_loop().create_task(self._tell_archiver(archiver))
        try:
            await asyncio.wait_for(archiver.gone.wait(), FINISH_S)
        except TimeoutError:
            telling.cancel()
            await archiver.end()
            return False
        return True

    async def _tell_archiver(self, archiver: Helper) -> None:
        """Until it has heard: it may still be starting, or have its queue full of bells."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            while not archiver.gone.is_set():
                try:
                    sock.sendto(env.ARCHIVER_FINISH, str(self._dir / env.ARCHIVER_SOCKET))
                    return
                except OSError:
                    await asyncio.sleep(_POLL_S)

    # ------------------------------------------------------------ ranks

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                try:
                    message = msgspec.json.decode(line, type=FromRank)
                except msgspec.DecodeError:
                    return
                match message:
                    case Hello(rank=rank):
                        self._ranks[writer], self._clean = rank, True
                        self._changed.set()
                        if message.config is not None:
                            await self._configure(message.config, message.token)
                        _send(writer, Ready(keeper_port=await self._keeper_port()))
                    case Finish():
                        self._done.add(writer)
                        await self._finish_together(writer)
        except (OSError, ValueError):
            pass
        finally:
            if writer in self._ranks:
                del self._ranks[writer]
                self._clean = self._clean and writer in self._done
            self._done.discard(writer)
            self._changed.set()
            writer.close()

    def _all_done(self) -> bool:
        return all(writer in self._done for writer in self._ranks)

    async def _finish_together(self, writer: asyncio.StreamWriter) -> None:
        """The last rank that completes its loop lets the archiver finish; all of them hear of it."""
        if not self._all_done():
            return
        whole = await self._finish()
        for other in self._done:
            _send(other, Finished(whole=whole))

    # ------------------------------------------------------------ notes

    def _open_notes(self) -> socket.socket | None:
        path = self._dir / env.NOTES_SOCKET
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bell.bind(str(path))
        except OSError as error:
            print(f"{path}: {error.strerror}", flush=True)
            bell.close()
            return None
        bell.setblocking(False)
        asyncio.get_running_loop().add_reader(bell, self._hear_notes, bell)
        return bell

    def _hear_notes(self, bell: socket.socket) -> None:
        now = time.monotonic()
        with contextlib.suppress(OSError):
            while True:
                note = notes.read(bell.recv(notes.MAX_NOTE))
                if note is not None and (passed := self._limiter.offer(note, now)) is not None:
                    self._tell(passed)
        for kept in self._limiter.due(now):
            self._tell(kept)

    def _tell(self, note: notes.Note) -> None:
        who = "" if note.rank is None else f"rank {note.rank}: "
        text = f"{who}step {note.step} {note.what} ({note.tier} tier)" + (f": {note.why}" if note.why else "")
        print(text, flush=True)
        if note.what in TELLING:
            self._say(text)

    def _say(self, text: str) -> None:
        """Through one rank, as we have no terminal."""
        print(text, flush=True)
        if self._ranks:
            writer = min(self._ranks, key=lambda one: self._ranks[one])
            if writer.transport.get_write_buffer_size() < BACKLOG_BYTES:
                _send(writer, Say(text=text))


def _send(writer: asyncio.StreamWriter, message: ToRank) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(message) + b"\n")


async def _main(arguments: argparse.Namespace) -> None:
    await Attendant(arguments.node_dir, arguments.host, arguments.linger_s).run()


def main(argv: list[str] | None = None) -> None:
    ask = argparse.ArgumentParser(prog="keepstep-attendant", description="Keeps a node's checkpoints without an agent.")
    ask.add_argument("--node-dir", required=True, type=Path)
    ask.add_argument("--host", required=True)
    ask.add_argument("--linger-s", type=float, default=LINGER_S)
    asyncio.run(_main(ask.parse_args(argv)))


if __name__ == "__main__":
    main()
