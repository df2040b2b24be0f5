"""Exits are heard once, and not any more when the node's part is over."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any, cast

from keepstep.agent import proc
from keepstep.agent.shimlink import ShimLink
from keepstep.agent.slots import Slot
from keepstep.agent.watch import Watch
from keepstep.model.ids import SlotId


class Link:
    """A shim that knows an exit only when it is let."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def status(self, pid: int, within_s: float) -> int | None:
        self.asked.set()
        await self.may_answer.wait()
        return 0

    def settle(self, pid: int) -> None:
        """Nothing to forget."""


def started() -> tuple[subprocess.Popen[bytes], Slot]:
    process = subprocess.Popen(["sleep", "60"])
    now = proc.stat(process.pid)
    assert now is not None
    return process, Slot(id=SlotId(f"s{process.pid}"), role="worker", pid=process.pid, start=now.start, out="", err="")


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_an_exit_that_comes_when_the_node_has_left_is_not_written_anywhere() -> None:
    """Neither one whose status is still asked for nor one that comes later: the table has been removed by then."""

    async def story() -> None:
        link, heard = Link(), list[SlotId]()
        watch = Watch(cast(ShimLink, cast(Any, link)), lambda slot, status: heard.append(slot.id))
        (first, one), (second, two) = started(), started()
        try:
            watch.watch(one)
            watch.watch(two)
            end(first)
            await link.asked.wait()
            watch.close()
            end(second)
            link.may_answer.set()
            await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()),
                                 return_exceptions=True)  # fmt: skip
            assert heard == []
            assert watch._fds == {}
        finally:
            end(first)
            end(second)

    asyncio.run(story())


def test_an_exit_is_heard_once_with_its_status() -> None:
    async def story() -> None:
        link, heard = Link(), asyncio.Queue[tuple[SlotId, int | None]]()
        link.may_answer.set()
        watch = Watch(cast(ShimLink, cast(Any, link)), lambda slot, status: heard.put_nowait((slot.id, status)))
        process, slot = started()
        watch.watch(slot)
        watch.watch(slot)
        end(process)
        assert await heard.get() == (slot.id, 0)
        watch.close()
        assert heard.empty()

    asyncio.run(story())
