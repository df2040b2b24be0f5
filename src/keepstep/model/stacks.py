"""Stacks: what every thread of a training process was doing at one instant, and what the kernel said of the process."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from keepstep.model.ids import Rank, SlotId

MAX_FRAMES = 48
"""Per thread: the innermost ones, and the outermost one. The middle of a deep recursion tells nothing."""
MAX_THREADS = 16
"""Per process; the main thread is always among them."""
MAX_PROCESSES = 12
"""Per rank: the trainer, and what it has started."""

How = Literal["py-spy", "faulthandler", "none"]


class Frame(Struct, frozen=True, array_like=True):
    """One call. ``file`` as the interpreter knows it; ``line`` 0 where it is not known."""

    function: str
    file: str = ""
    line: int = 0


class ThreadStack(Struct, frozen=True, kw_only=True):
    """One thread.

    Attributes:
        frames: innermost call first.
        busy: on a processor, as far as the sampler can tell.
        cut: how many frames in the middle were left out.
    """

    name: str
    frames: tuple[Frame, ...]
    main: bool = False
    busy: bool = False
    cut: int = 0


class ProcessStacks(Struct, frozen=True, kw_only=True):
    """One process of a rank's tree.

    Attributes:
        role: ``trainer`` for the process that holds the rank, ``child`` for what it has started (data loaders...).
        name: short name, from the kernel.
        state: letter of proc_pid_stat(5): R running, S sleeping, D waiting for a device, T stopped, Z ended.
        wchan: kernel function in which the main thread sleeps; empty where that is not told.
        cpu_s, read_bytes, written_bytes: in its life so far.
        how: where the stacks came from.
        why: why there are none, or only from the fall-back.
    """

    rank: Rank
    slot: SlotId
    pid: int
    role: Literal["trainer", "child"]
    name: str
    state: str
    wchan: str = ""
    cpu_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    how: How = "none"
    why: str = ""
    threads: tuple[ThreadStack, ...] = ()

    @property
    def main(self) -> ThreadStack | None:
        """The main thread, in which user code trains."""
        return next((thread for thread in self.threads if thread.main), self.threads[0] if self.threads else None)


def shorten(frames: tuple[Frame, ...]) -> tuple[tuple[Frame, ...], int]:
    """At most ``MAX_FRAMES``, and how many were left out."""
    over = len(frames) - MAX_FRAMES
    if over <= 0:
        return frames, 0
    return (*frames[: MAX_FRAMES - 1], frames[-1]), over
