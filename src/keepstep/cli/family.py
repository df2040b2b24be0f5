"""The launcher's descendants: adopted when their parents die, counted, and in the end all gone.

As a *child subreaper* (``proc.become_subreaper``) the launcher becomes the parent of every orphan below it, whatever
sessions and groups they have made. So the processes of this node can always be found by walking down from here,
without any list.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from keepstep.agent import proc

GONE_S = 5.0
"""How long killed processes may take to disappear before they are given up as unkillable (state D)."""


def descendants(root: int | None = None) -> list[int]:
    """Every process below ``root`` (this one by default), parents before children; zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := proc.stat(int(entry))) is not None and found.state not in "ZX":
            children.setdefault(found.parent, []).append(int(entry))
    found_pids: list[int] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        for pid in children.get(todo.pop(0), []):
            found_pids.append(pid)
            todo.append(pid)
    return found_pids


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
