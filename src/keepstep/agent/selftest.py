"""Self-tests of this node: one child process at a time, at the lowest priority, with a deadline of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from keepstep.agent.node import Node
from keepstep.model.actions import SelfTest
from keepstep.model.facts import SelfTestDone
from keepstep.probes.selftest import Report

SLACK_S = 60.0
"""Beyond its budget: imports, and the round that has begun."""
MAX_SLOWER = 20.0
"""A round takes at most so many times longer because of a small share; bounds the deadline."""


class SelfTests:
    """Carries out ``SelfTest`` orders, one after the other."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._turn = asyncio.Lock()

    async def carry_out(self, action: SelfTest) -> str:
        """Examine and report; a sentence when the child could not even be started."""
        async with self._turn:
            try:
                report = await self._run(action)
            except OSError as error:
                return f"the self-test could not be started: {error}"
        self._node.report(
            SelfTestDone,
            request=action.request,
            test=action.test,
            passed=report.passed,
            why=report.why,
            digest=report.digest,
            rounds=report.rounds,
            seconds=report.seconds,
            failed=report.failed,
        )
        return ""

    async def _run(self, action: SelfTest) -> Report:
        words = [
            *(sys.executable, "-m", "keepstep.probes.selftest", "--until-eof"),
            *("--test", action.test, "--seed", str(action.seed)),
            *("--seconds", str(action.seconds), "--share", str(action.share)),
        ]
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,  # it ends when we do
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        limit = action.seconds + SLACK_S * min(MAX_SLOWER, 1 / max(action.share, 0.01))
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(limit):
                said, trouble = await asyncio.gather(process.stdout.read(), process.stderr.read())
                code = await process.wait()
        except TimeoutError:
            return _could_not(action, f"it did not end within {limit:.0f} s")
        finally:
            process.stdin.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        try:
            return msgspec.json.decode(said, type=Report)
        except msgspec.DecodeError:
            last = trouble.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
            return _could_not(action, f"it ended with code {code}: {last[0][:200]}")


def _could_not(action: SelfTest, why: str) -> Report:
    return Report(test=action.test, seed=action.seed, passed=None, why=why)
