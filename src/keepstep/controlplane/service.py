"""A running controller: log, mind, writer, agents and HTTP put together, started in order and stopped in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import structlog
import uvicorn
from msgspec import structs
from starlette.types import ASGIApp

from keepstep import __version__
from keepstep.controlplane.address import ADDRESS_FILE, Address, listen, read_address, write_address
from keepstep.controlplane.agents import AgentDesk
from keepstep.controlplane.api import make_app
from keepstep.controlplane.book import DurableBook, known_nodes
from keepstep.controlplane.clock import AnchoredClock
from keepstep.controlplane.config import ControllerConfig
from keepstep.controlplane.connection import AgentConnection
from keepstep.controlplane.desk import Desk
from keepstep.controlplane.exceptions import PreflightFailed
from keepstep.controlplane.folding import LOG_FILE, Folded, fold
from keepstep.controlplane.leases import LeaseTable
from keepstep.controlplane.news import News
from keepstep.controlplane.writer import Writer
from keepstep.core.controller import Controller
from keepstep.core.locate.told import warm
from keepstep.model.facts import InjectRequested
from keepstep.model.records import Observed
from keepstep.ports import Entry
from keepstep.store.sqlite import SqliteLog, open_log

HTTP_CONNECTIONS = 512
LAST_WORDS_S = 2.0
"""After the launcher is gone: how long its agent may take to say goodbye."""
DRAIN_S = 5.0
"""How long leaving may take: what waits is written, then HTTP requests are cut off."""
KILL_AFTER_S = 0.05
"""From an injected controller-loss being durable to SIGKILL: time for the answer to leave."""
WARM_AFTER_S = 1.0
"""After the start, which needs the processor itself: when the rules of diagnosis are loaded for the first incident."""

log = structlog.get_logger(__name__)


async def serve(config: ControllerConfig, run_dir: Path, token: str) -> None:
    """Run one controller until SIGTERM or the end of its launcher.

    Raises:
        StoreError, ControllerError: it cannot start or go on; the message says why.
    """
    last = read_address(run_dir) or Address(host="", agent_port=0, http_port=0, pid=0)
    event_log = open_log(run_dir / LOG_FILE)
    try:
        folded = fold(event_log, config.policy)
        seed = str(run_dir)
        agents_socket = listen(config.host, config.agent_port, what="agents", last=last.agent_port, seed=seed)
        http_socket = listen(config.host, config.http_port, what="HTTP", last=last.http_port, seed=seed)
        address = Address(
            host=config.host,
            agent_port=agents_socket.getsockname()[1],
            http_port=http_socket.getsockname()[1],
            pid=os.getpid(),
            token_file=config.token_file,
            version=__version__,
        )
        log.info("controller starts", seq=folded.seq, snapshot=folded.snapshot_seq, **structs.asdict(address))
        service = _Service(config, event_log, folded, token)
        await service.run(agents_socket, http_socket, lambda: _announce(run_dir, address))
        log.info("controller leaves", seq=service.writer.seq)
    finally:
        event_log.close()


class _Service:
    def __init__(self, config: ControllerConfig, event_log: SqliteLog, folded: Folded, token: str) -> None:
        self._config = config
        clock = AnchoredClock(not_before=folded.newest_at)
        leases = LeaseTable(config.policy.lease_s)
        news = News()
        self.writer: Writer[Controller] = Writer(
            event_log=event_log,
            durable=folded.mind,
            seq=folded.seq,
            snapshot_seq=folded.snapshot_seq,
            load=lambda state: Controller.load(state, config.policy),
            clock=clock,
            publish=self._publish,
            wake=news.wake,
        )
        self._agents = AgentDesk(
            inbox=self.writer,
            book=DurableBook(lambda: self.writer.durable),
            leases=leases,
            clock=clock,
            token=token,
            lease_s=config.policy.lease_s,
            pace_window_s=config.policy.pace_window_s,
            heartbeat_s=config.heartbeat_s,
            monotonic=time.monotonic,
        )
        self._app = make_app(
            Desk(
                writer=self.writer,
                event_log=event_log,
                clock=clock,
                news=news,
                connected=lambda: len(self._agents.connected),
                token=token,
            )
        )
        self._told_to_leave = asyncio.Event()
        self._launcher_gone = False

    async def run(self, agents_socket: socket.socket, http_socket: socket.socket, announce: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        with self._watch(loop):
            agents = await loop.create_server(lambda: AgentConnection(self._agents), sock=agents_socket)
            http = _HttpServer(_http_config(self._app))
            http_task = loop.create_task(http.serve(sockets=[http_socket]))
            writer_task = loop.create_task(self.writer.run())
            told = loop.create_task(self._told_to_leave.wait())
            self._agents.take_over(known_nodes(self.writer.durable))
            announce()
            loop.call_later(WARM_AFTER_S, lambda: loop.run_in_executor(None, warm))
            try:
                await asyncio.wait({told, writer_task, http_task}, return_when=asyncio.FIRST_COMPLETED)
                if self._launcher_gone:
                    await self._agents.changed.wait(lambda: not self._agents.connected, LAST_WORDS_S)
            finally:
                agents.close()
                told.cancel()
                self.writer.close()
                await _within(DRAIN_S, writer_task)
                self._agents.close()
                http.should_exit = True
                await _within(DRAIN_S, http_task)
        for task in (writer_task, http_task):
            if task.done() and not task.cancelled():
                task.result()  # raises what ended it, if it was not we

    def _publish(self, entries: Sequence[Entry]) -> None:
        self._agents.publish(entries)
        for entry in entries:
            match entry.record:
                case Observed(fact=InjectRequested(fault="controller-loss", job=job)):
                    found = self.writer.durable.job(job)
                    if found is not None and found.spec.allow_inject:
                        log.warning("controller-loss was asked for: killing this process", job=job)
                        asyncio.get_running_loop().call_later(KILL_AFTER_S, os.kill, os.getpid(), signal.SIGKILL)
                case _:
                    pass

    @contextlib.contextmanager
    def _watch(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Signals, and the launcher's life. A launcher's controller leaves ctrl-C to the launcher."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_leave.set)
        pid = self._config.launcher_pid
        if not pid:
            loop.add_signal_handler(signal.SIGINT, self._told_to_leave.set)
            yield
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            launcher = os.pidfd_open(pid)
        except ProcessLookupError:
            self._launcher_left(pid)
            yield
            return
        loop.add_reader(launcher, self._launcher_left, pid)
        try:
            yield
        finally:
            loop.remove_reader(launcher)
            os.close(launcher)

    def _launcher_left(self, pid: int) -> None:
        if not self._launcher_gone:
            log.info("the launcher is gone, so this controller leaves", launcher_pid=pid)
        self._launcher_gone = True
        self._told_to_leave.set()


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield


def _http_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=HTTP_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )


def _announce(run_dir: Path, address: Address) -> None:
    """Say where we listen. On a full disk the old file stays: its ports are ours again if they were still free."""
    try:
        write_address(run_dir, address)
    except OSError as error:
        if read_address(run_dir) is None:
            raise PreflightFailed(
                f"cannot write {run_dir / ADDRESS_FILE}: {error.strerror}; make room there"
            ) from error
        log.error("controller.json not updated", error=str(error))


async def _within(seconds: float, task: asyncio.Task[None]) -> None:
    """Wait for a task, then cancel it; what it raised stays in it."""
    _, late = await asyncio.wait({task}, timeout=seconds)
    for one in late:
        one.cancel()
        await asyncio.wait({one}, timeout=seconds)
