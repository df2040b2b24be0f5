"""A controller that answers over HTTP about a job with a past: the fleet of the core's tests, its log, the real API."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from tests.core.fleet import Fleet, replay

from keepstep.controlplane.api import make_app
from keepstep.controlplane.clock import AnchoredClock
from keepstep.controlplane.desk import Desk
from keepstep.controlplane.folding import LOG_FILE
from keepstep.controlplane.news import News
from keepstep.controlplane.writer import Writer
from keepstep.core.controller import Controller
from keepstep.store.sqlite import open_log


def write_log(fleet: Fleet, run_dir: Path) -> None:
    """Leave the fleet's log where a controller would have left it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    event_log = open_log(run_dir / LOG_FILE)
    event_log.append(fleet.log, expected=0)
    event_log.close()


@contextmanager
def serving(fleet: Fleet, path: Path) -> Iterator[str]:
    """``HOST:PORT`` of a controller that goes on from the fleet's log."""
    event_log = open_log(path)
    event_log.append(fleet.log, expected=0)
    policy = fleet.mind.policy
    clock = AnchoredClock(wall=lambda: fleet.now)  # the log's own time goes on: nothing in it is overdue
    news = News()
    writer: Writer[Controller] = Writer(
        event_log=event_log,
        durable=replay(fleet.log, policy),
        seq=len(fleet.log),
        load=lambda state: Controller.load(state, policy),
        clock=clock,
        publish=lambda entries: None,
        wake=news.wake,
    )
    app = make_app(Desk(writer, event_log, clock, news, lambda: 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(writer.run())
        web = asyncio.create_task(server.serve(sockets=[listener]))
        ready.set()
        await web
        writer.close()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        event_log.close()
