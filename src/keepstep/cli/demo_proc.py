"""Processes and sockets of this machine as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
from pathlib import Path

from keepstep.checkpoint.process import started


def memory_root() -> Path:
    """A short path in memory where there is one: sockets in it must stay below 108 bytes."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="ks", dir=base))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def send(pid: int, number: signal.Signals) -> None:
    """A process that was quicker is fine: the caller wanted it gone, or will look again."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return started(pid) != ""


def listening_inode(port: int) -> str | None:
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(wanted) and fields[3] == "0A":
                return fields[9]
    return None


def holds_socket(pid: int, inode: str) -> bool:
    try:
        return any(os.readlink(fd) == f"socket:[{inode}]" for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
