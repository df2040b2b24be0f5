"""Helper: one of our own modules as a process that is kept running, and that never outlives who started it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import time
from pathlib import Path
from typing import Literal

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 10.0
END_S = 5.0
"""From SIGTERM to SIGKILL."""
_PR_SET_PDEATHSIG = 1

Role = Literal["keeper", "archiver"]


class Helper:
    """One of our own modules, started again when it dies, ended when we die."""

    def __init__(self, role: Role, argv: list[str], log: Path) -> None:
        self.role, self.argv, self._log = role, argv, log
        self._process: asyncio.subprocess.Process | None = None
        self._asked = asyncio.Event()
        self.gone = asyncio.Event()
        """There is no process, and none will be started."""
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        try:
            await self._keep_running()
        finally:
            self.gone.set()

    async def _keep_running(self) -> None:
        delay = 0.0
        while not self._asked.is_set():
            began = time.monotonic()
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_die_with_parent,
                )
            if self._asked.is_set():  # asked to end while it was being started: nobody else knows of this process
                self._signal(signal.SIGTERM)
            code = await self._process.wait()
            if self._asked.is_set():
                return
            lived = time.monotonic() - began
            delay = FIRST_RETRY_S if lived > LAST_RETRY_S else min(LAST_RETRY_S, max(FIRST_RETRY_S, delay * 2))
            print(f"the {self.role} ended with {code}; next start in {delay:g} s", flush=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), delay)

    def retire(self) -> None:
        """It may end when it has nothing more to do, and is not started again."""
        self._asked.set()

    async def end(self) -> None:
        """SIGTERM, then SIGKILL; back when there is no process, also of a start that was under way."""
        self.retire()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), END_S)
                break
        await asyncio.wait([self._task])

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _die_with_parent() -> None:
    """In the child, before its program: nobody but us would ever end it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
