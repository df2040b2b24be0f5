"""Stack dump: how a process that nobody may look into from outside says itself where it stands.

Each Python program that an agent starts answers one realtime signal by writing the stacks of all its threads into a
file of its own. The interpreter's ``faulthandler`` does that in C, without its lock: a main thread that is stuck in a
library is no obstacle. https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from keepstep.model.stacks import MAX_THREADS, Frame, ThreadStack, shorten

SIGNAL = signal.SIGRTMIN + 7
"""No program uses it by itself; SIGUSR1 and SIGUSR2 belong to schedulers and users."""
FOLDER = "stacks"
"""Below the node's directory: ``stacks/<pid>``."""
MAX_BYTES = 1024 * 1024
"""Of one dump; what is beyond is not read."""

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_kept: list[object] = []
"""The file must stay open for as long as the handler may write to it."""


def answer(node_dir: str) -> None:
    """In the process itself: from now on, answer ``SIGNAL``. Never raises: a program is to run in any case."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        folder = Path(node_dir) / FOLDER
        folder.mkdir(exist_ok=True)
        file = (folder / str(os.getpid())).open("ab", buffering=0)
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        _kept[:] = [file]


def answers(pid: int) -> bool:
    """Whether the process has a handler for ``SIGNAL``; without one the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def parse(text: str) -> tuple[ThreadStack, ...]:
    """What ``faulthandler`` has written, main thread last there and first here."""
    found = list(_threads(text.splitlines()))
    if not found:
        return ()
    # It writes the newest thread first and the one that began the process last.
    main = len(found) - 1
    threads = [
        ThreadStack(name=name or ("MainThread" if number == main else ""), frames=kept, main=number == main, cut=cut)
        for number, (name, frames) in enumerate(found)
        for kept, cut in [shorten(tuple(frames))]
    ]
    return (threads[main], *threads[:main])[:MAX_THREADS]


def _threads(lines: list[str]) -> Iterator[tuple[str, list[Frame]]]:
    name = ""
    frames: list[Frame] | None = None
    for line in lines:
        if head := _THREAD.match(line):
            if frames is not None:
                yield name, frames
            name, frames = head[3] or "", []
        elif frames is not None and (call := _FRAME.match(line)):
            frames.append(Frame(call[3], call[1], int(call[2]) if call[2].isdigit() else 0))
    if frames is not None:
        yield name, frames
