"""Rendezvous stores of a node: a process that holds TCPStore servers, one per epoch, and always one unused.

A store is used by one epoch only, so that no stale key of an older one can be read. It lives outside agent and
trainers: their deaths do not touch it, and between rebuilds nobody needs it.

``python -m keepstep.agent.rendezvous_torch --node-dir D --host H``; on ``store.sock``, JSON lines::

    > {"op": "list"}              < {"unused": PORT}      at once, and again whenever the unused store is a new one
    > {"op": "use", "port": P}    an epoch has taken that store
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

SOCKET = "store.sock"
KEPT = 3
"""Used stores that stay open: the newest epoch's, and those that late processes of the ones before may still ask."""
BACKLOG = 4096
"""Every rank connects at the same moment."""


class Stores:
    def __init__(self, host: str) -> None:
        self._host = host
        self._open: dict[int, TCPStore] = {}
        self.unused = 0
        self._add()

    def use(self, port: int) -> bool:
        """An epoch has taken this store; ``True`` when there is a new unused one."""
        if port != self.unused:
            return False
        self._add()
        for old in list(self._open)[: -(KEPT + 1)]:
            del self._open[old]
        return True

    def _add(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=BACKLOG)
        port: int = listener.getsockname()[1]
        # The store takes over our socket: TCPStore by itself would listen on every interface.
        self._open[port] = TCPStore(
            host_name=self._host,
            port=port,
            is_master=True,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.unused = port


async def serve(node_dir: Path, host: str) -> None:
    stores = Stores(host)
    listeners: set[asyncio.StreamWriter] = set()
    ended = asyncio.Event()

    def tell(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(json.dumps({"unused": stores.unused}).encode() + b"\n")

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listeners.add(writer)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["op"] == "list":
                    tell(writer)
                elif message["op"] == "use" and stores.use(message["port"]):
                    for each in listeners:
                        tell(each)
        except (OSError, ValueError):
            pass
        finally:
            listeners.discard(writer)
            writer.close()

    path = node_dir / SOCKET
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    await asyncio.start_unix_server(converse, path=str(path))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="keepstep-store", description="Rendezvous stores of one node.")
    parser.add_argument("--node-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    # The store looks up the name of each client for its log and serves nobody meanwhile: let a lost query be short.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    asyncio.run(serve(options.node_dir, options.host))


if __name__ == "__main__":
    main()
