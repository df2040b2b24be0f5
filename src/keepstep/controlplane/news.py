"""Wakes those who wait for the log to grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class News:
    """A condition without a lock: everything happens on one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, come: Callable[[], bool], seconds: float) -> bool:
        """Return when ``come`` holds (True), or after ``seconds`` (False)."""
        try:
            async with asyncio.timeout(seconds):
                while not come():
                    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.add(future)
                    try:
                        await future
                    finally:
                        self._waiting.discard(future)
        except TimeoutError:
            return come()
        return True
