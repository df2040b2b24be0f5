"""One of the attendant's own processes: when its end has been asked for, there is none, however the end falls."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.trainer import helper
from keepstep.trainer.helper import Helper

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("turns", range(6))
def test_an_end_that_falls_into_a_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Whether the process is about to be started, is being started or runs: nothing is left of it, and the end is over
    before anybody would have to be killed."""
    started: list[int] = []
    real: Any = asyncio.create_subprocess_exec

    async def slow_start(*argv: str, **how: Any) -> asyncio.subprocess.Process:
        process: asyncio.subprocess.Process = await real(*argv, **how)
        started.append(process.pid)
        for _ in range(3):
            await asyncio.sleep(0)  # a start takes several turns of the loop
        return process

    monkeypatch.setattr(helper.asyncio, "create_subprocess_exec", slow_start)

    async def main() -> None:
        helper = Helper("keeper", SLEEPER, tmp_path / "log")
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 5:
            while not started:
                await asyncio.sleep(0.001)
        await helper.end()
        assert helper.gone.is_set()
        assert not any(alive(pid) for pid in started)

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < helper.END_S


def test_a_deaf_one_is_killed_and_one_that_waits_for_its_next_start_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM that is ignored is followed by SIGKILL; a pause between two starts ends at once."""
    monkeypatch.setattr(helper, "END_S", 0.3)
    monkeypatch.setattr(helper, "FIRST_RETRY_S", 30.0)
    ready = tmp_path / "ready"
    deaf = (
        f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(60)"
    )

    async def main() -> None:
        helper = Helper("keeper", [sys.executable, "-c", deaf], tmp_path / "log")
        while not ready.exists():
            await asyncio.sleep(0.005)
        process = helper._process
        assert process is not None
        await helper.end()
        assert process.returncode == -signal.SIGKILL

        brief = Helper("keeper", [sys.executable, "-c", ""], tmp_path / "log")
        while brief._process is None or brief._process.returncode is None:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        await brief.end()
        assert time.monotonic() - began < 0.25
        assert brief.gone.is_set()

    asyncio.run(main())
