"""What the kernel says about processes, and the few requests an agent has for it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass

from keepstep.checkpoint.process import stat_fields

_PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """The part of ``/proc/<pid>/stat`` that matters here (see proc_pid_stat(5))."""

    state: str
    parent: int
    session: int
    cpu_ticks: int
    start: int
    """Clock ticks since boot: together with the pid it names one process for ever."""


def stat(pid: int) -> Stat | None:
    """``None`` when there is no such process."""
    fields = stat_fields(pid)
    if not fields:
        return None
    return Stat(
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start=int(fields[19]),
    )


def waited_for_cpu_ns(pid: int) -> int:
    """How long the main thread has been ready to run in sum while no processor was free for it; 0 where unknown."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def is_alive(pid: int, start: int) -> bool:
    """Is this very process (not a later one with its number) still running?"""
    now = stat(pid)
    return now is not None and now.start == start and now.state not in "ZX"


def become_subreaper() -> None:
    """Orphans below this process get it as their parent, so that their exit status is not lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def send_signal(pid: int, start: int, number: int) -> bool:
    """Signal this very process; ``False`` when it is gone already."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        now = stat(pid)
        if now is None or now.start != start:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def kill_group(leader: int) -> None:
    """SIGKILL a process group, the leader of which is one of ours (data loader workers included)."""
    if leader > 1:
        with contextlib.suppress(PermissionError):
            try:
                os.killpg(leader, signal.SIGKILL)
            except ProcessLookupError:
                # Just forked, it may not have made its group yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(leader, signal.SIGKILL)


def split_status(status: int | None) -> tuple[int | None, int | None]:
    """``(code, signal)`` of a wait status; both ``None`` when nobody could collect it."""
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
