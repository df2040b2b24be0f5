"""Exits, at once: one pidfd per process, in the agent's event loop.

The pidfd fires in the same instant in which the shim gets SIGCHLD; the shim's word about the exit status is waited
for. Where others wait in a collective only for ``STATUS_S``: that somebody is gone matters more than how. Where nobody
does (no SDK, or the loop is complete) how matters more: an end in good order without its code would pass for a fault.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from keepstep.agent import proc
from keepstep.agent.shimlink import ShimLink
from keepstep.agent.slots import Slot

STATUS_S = 0.02
PATIENT_STATUS_S = 1.0

OnExit = Callable[[Slot, int | None], None]


class Watch:
    """Calls ``on_exit(slot, wait_status)`` once for each watched process."""

    def __init__(self, link: ShimLink, on_exit: OnExit) -> None:
        self._link = link
        self._on_exit = on_exit
        self._fds: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, slot: Slot) -> None:
        """From now on; a process that is gone already is reported at once."""
        if slot.id in self._fds:
            return
        try:
            fd = os.pidfd_open(slot.pid)
        except OSError:
            self._collect(slot)
            return
        now = proc.stat(slot.pid)
        if now is None or now.start != slot.start:
            # The number belongs to somebody else by now.
            os.close(fd)
            self._collect(slot)
            return
        self._fds[slot.id] = fd
        asyncio.get_running_loop().add_reader(fd, self._fired, slot)

    def _fired(self, slot: Slot) -> None:
        fd = self._fds.pop(slot.id)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._collect(slot)

    def _collect(self, slot: Slot) -> None:
        task = asyncio.get_running_loop().create_task(self._finish(slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Nobody wants to hear of exits any more: where they would be written down is about to be removed."""
        for fd in self._fds.values():
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._fds.clear()
        for task in self._tasks:
            task.cancel()

    async def _finish(self, slot: Slot) -> None:
        hurry = slot.attached and not slot.done
        status = await self._link.status(slot.pid, STATUS_S if hurry else PATIENT_STATUS_S)
        self._on_exit(slot, status)
        self._link.settle(slot.pid)
