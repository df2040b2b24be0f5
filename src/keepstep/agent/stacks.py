"""Stacks: looks into every process of a rank's tree, from outside and without stopping it.

py-spy reads the interpreter's memory (https://github.com/benfred/py-spy). Where it is not installed or the system
forbids it, programs that we have started dump their stacks themselves (``stackdump``). What the kernel says of a
process is told in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keepstep.agent import proc, stackdump
from keepstep.model.ids import Rank, SlotId
from keepstep.model.stacks import MAX_PROCESSES, MAX_THREADS, Frame, How, ProcessStacks, ThreadStack, shorten

TAKE_S = 5.0
"""How long one process may take to be looked into."""
DUMP_S = 1.0
"""How long a process that dumps its own stacks may take."""
DUMP_POLL_S = 0.01
AT_ONCE = 4
"""Processes that are looked into at the same time: it must not take the cores from those that still train."""
TOOL = "py-spy"
_STOPPED = "Tt"


class Tree(msgspec.Struct, frozen=True):
    """A rank's process, to be looked into with all that it has started."""

    rank: Rank
    slot: SlotId
    pid: int


async def take(trees: Sequence[Tree], node_dir: Path, *, native: bool = False) -> list[ProcessStacks]:
    """The stacks of all these trees.

    Args:
        native: frames of C and C++ libraries, too; py-spy has to stop each process for a moment then.
    """
    gate = asyncio.Semaphore(AT_ONCE)
    tool = find_tool()

    async def one(tree: Tree, pid: int) -> ProcessStacks | None:
        async with gate:
            return await _look(tree, pid, node_dir, tool, native)

    found = await asyncio.gather(*(one(tree, pid) for tree in trees for pid in family(tree.pid)))
    return [process for process in found if process is not None]


def find_tool() -> str | None:
    """py-spy beside our own interpreter, or on the path."""
    beside = Path(sys.executable).with_name(TOOL)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(TOOL)


def family(pid: int) -> list[int]:
    """The process and what has come from it, nearest first; at most ``MAX_PROCESSES``."""
    found = [pid]
    for parent in found:
        if len(found) >= MAX_PROCESSES:
            break
        found += _children(parent)
    return found[:MAX_PROCESSES]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


async def _look(tree: Tree, pid: int, node_dir: Path, tool: str | None, native: bool) -> ProcessStacks | None:
    before = proc.stat(pid)
    if before is None:
        return None
    threads, how, why = await _threads(pid, before, node_dir, tool, native)
    read, written = _io(pid)
    return ProcessStacks(
        rank=tree.rank,
        slot=tree.slot,
        pid=pid,
        role="trainer" if pid == tree.pid else "child",
        name=_word(pid, "comm"),
        state=before.state,
        wchan="" if (wchan := _word(pid, "wchan")) == "0" else wchan,
        cpu_s=before.cpu_ticks / proc.TICKS_PER_S,
        read_bytes=read,
        written_bytes=written,
        how=how,
        why=why,
        threads=threads,
    )


async def _threads(
    pid: int, stat: proc.Stat, node_dir: Path, tool: str | None, native: bool
) -> tuple[tuple[ThreadStack, ...], How, str]:
    if stat.state in "ZX":
        return (), "none", "it has ended"
    why = f"{TOOL} is not installed (pip install 'keepstep[diagnose]')"
    if tool is not None:
        # Whoever sleeps in the kernel for a device cannot be stopped: asking for that would hang the asker, too.
        threads, why = await _spy(tool, pid, native=native and stat.state != "D")
        if threads:
            return threads, "py-spy", ""
    if stat.state in _STOPPED:
        return (), "none", f"{why}; it is stopped and cannot dump its stacks itself"
    if not stackdump.answers(pid):
        return (), "none", f"{why}; it was not started by keepstep and cannot dump its stacks itself"
    threads = await _dump(pid, stat.start, node_dir / stackdump.FOLDER / str(pid))
    if threads:
        return threads, "faulthandler", why
    return (), "none", f"{why}; it did not dump its stacks within {DUMP_S:g} s (state {stat.state})"


# -------------------------------------------------------------------- py-spy


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False


_decode = msgspec.json.Decoder(list[_SpyThread]).decode


async def _spy(tool: str, pid: int, *, native: bool) -> tuple[tuple[ThreadStack, ...], str]:
    words = [tool, "dump", "--json", "--pid", str(pid), "--native" if native else "--nonblocking"]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TAKE_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return (), f"{TOOL} took longer than {TAKE_S:g} s"
    if process.returncode:
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        return (), f"{TOOL}: {lines[0].removeprefix('Error: ') if lines else f'exit code {process.returncode}'}"
    try:
        return read_spy(out, pid), ""
    except msgspec.MsgspecError as error:
        return (), f"{TOOL} wrote what this version does not understand: {error}"


def read_spy(out: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Threads as py-spy writes them, the main one first.

    Raises:
        msgspec.MsgspecError: it is something else.
    """
    found = []
    for thread in _decode(out):
        frames, cut = shorten(tuple(Frame(frame.name, frame.filename, frame.line) for frame in thread.frames))
        main = thread.os_thread_id == pid
        name = thread.thread_name or ("MainThread" if main else str(thread.os_thread_id or ""))
        found.append(ThreadStack(name=name, frames=frames, main=main, busy=thread.active, cut=cut))
    return tuple(sorted(found, key=lambda thread: not thread.main)[:MAX_THREADS])


# -------------------------------------------------------------------- the process itself


async def _dump(pid: int, start: int, path: Path) -> tuple[ThreadStack, ...]:
    """Ask the process, and read what it has written since."""
    before = _size(path)
    if not proc.send_signal(pid, start, stackdump.SIGNAL):
        return ()
    waited, seen = 0.0, before
    while waited < DUMP_S:
        await asyncio.sleep(DUMP_POLL_S)  # it writes a line at a time and tells nobody when it is done
        waited += DUMP_POLL_S
        size = _size(path)
        if size > before and size == seen:
            break
        seen = size
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(before)
        return stackdump.parse(file.read(stackdump.MAX_BYTES).decode(errors="replace"))
    return ()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# -------------------------------------------------------------------- the kernel


def _word(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    except OSError:
        return ""


def _io(pid: int) -> tuple[int, int]:
    """Bytes read and written through system calls; 0 where we may not know."""
    try:
        rows = dict(line.split(": ", 1) for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(rows["rchar"]), int(rows["wchar"])
    except (OSError, ValueError, KeyError):
        return 0, 0
