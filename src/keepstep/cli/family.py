"""The launcher's descendants: adopted when their parents die, counted, and in the end all gone.

As a *child subreaper* (prctl(2)) the launcher becomes the parent of every orphan below it, whatever sessions and groups
they have made. So the processes of this node can always be found by walking down from here, without any list.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
GONE_S = 5.0
"""How long killed processes may take to disappear before they are given up as unkillable (state D)."""


def adopt_orphans() -> bool:
    """Become the parent of all orphans below this process; False where the kernel does not know how."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def descendants(root: int | None = None) -> list[int]:
    """Every process below ``root`` (this one by default), parents before children; zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := _parent_and_state(int(entry))) is not None and found[1] not in "ZX":
            children.setdefault(found[0], []).append(int(entry))
    found_pids: list[int] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        for pid in children.get(todo.pop(0), []):
            found_pids.append(pid)
            todo.append(pid)
    return found_pids


def _parent_and_state(pid: int) -> tuple[int, str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return int(parent), state


def kill_all(spare: frozenset[int] = frozenset(), *, timeout_s: float = GONE_S) -> int:
    """SIGKILL every descendant that is not to be spared, again and again until none is left.

    Parents first, so that nobody starts anew what was just killed. Returns how many were killed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        left = [pid for pid in descendants() if pid not in spare]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.01)
    reap_orphans(spare)
    return len(killed)


def reap_orphans(known: frozenset[int]) -> None:
    """Collect adopted processes that have ended; the exit statuses of ``known`` children are left to their owners."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)
