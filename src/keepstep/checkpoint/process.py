"""Process: which process wrote something, so that whoever finds it can tell whether that one may still be at work."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def place() -> str:
    """What tells this boot of this host, and this name space of processes, from every other.

    Where these are ours, a process number means the same to us. Names of hosts do not tell that: containers and freshly
    installed machines share them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def started(pid: int) -> str:
    """When a process started, in ticks: process numbers are used again. Empty where there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
