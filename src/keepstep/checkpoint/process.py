"""Process: which process wrote something, so that whoever finds it can tell whether that one may still be at work.

The lowest floor that reads ``/proc``: what is read of a process here is read the same way everywhere above.
"""

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


def stat_fields(pid: int) -> list[str]:
    """``/proc/<pid>/stat`` from the state on (proc_pid_stat(5), third field); empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return []
    # The command may contain blanks and brackets; the fields start after its last bracket.
    return data.rpartition(b")")[2].decode().split()


def started(pid: int) -> str:
    """When a process started, in ticks: process numbers are used again. Empty where there is none that runs."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""
