"""Title: what ``ps`` and ``top`` show for a process that was forked, and would else go by its warm parent's command.

Linux shows the bytes between ``arg_start`` and ``arg_end`` of a process's memory as its command line, and a process may
write other ones there (proc_pid_cmdline(5), "may modify it"; PostgreSQL's ``ps_status.c`` lives by it). Where these
bytes are, ``/proc/self/stat`` says. They are as many as the parent's command line had; a longer title is cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from keepstep.checkpoint.process import stat_fields

COMM_BYTES = 15
"""Of the short name that ``top`` and the kernel's own messages show (PR_SET_NAME(2const)); the kernel cuts the rest."""
_ARG_START, _ARG_END = 45, 46
"""Of ``stat_fields``: addresses; 0 where the kernel does not tell."""

_ours = False


def claim() -> None:
    """This process has been forked: the command line that it shows is its parent's, and it may show another one.

    A process that was executed keeps what its user has written.
    """
    global _ours
    _ours = True


def show(who: str, short: str, *, job: str, program: str = "") -> None:
    """Go by ``keepstep: WHO of job JOB (PROGRAM)``, and by ``keepstep-SHORT`` where there is little room.

    Without a ``claim`` before, nothing is changed. Nothing depends on a title, so a failure is silent.
    """
    if not _ours:
        return
    file = os.path.basename(program)
    _write(f"keepstep: {who} of job {job}{f' ({file})' if file else ''}".encode())
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(f"keepstep-{short}".encode()[:COMM_BYTES])


def _write(words: bytes) -> None:
    fields = stat_fields(os.getpid())
    if len(fields) <= _ARG_END:
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if 0 < start < end - 1:
        # The last byte stays NUL: by that the kernel knows that the environment behind it is not part of the title.
        ctypes.memmove(start, words[: end - start - 1].ljust(end - start, b"\0"), end - start)
