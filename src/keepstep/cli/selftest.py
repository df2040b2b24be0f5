"""``keepstep selftest``: examine this machine now, offline, in a process of its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import msgspec

from keepstep.cli.errors import DoorError, UsageError
from keepstep.cli.render import check_form, paint
from keepstep.cli.say import say

SLACK_S = 120.0
"""Beyond the budget: imports, memory patterns, and the round that has begun."""


def examine(test: str, *, seconds: float, seed: int, share: float, output: str) -> int:
    """0 when all is as it must be, 1 when not, or when the test could not be made."""
    form = check_form(output)
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds {seconds:g} is no time to examine for", help="say a number above 0: --seconds 10")
    if not 0 < share <= 1:
        raise UsageError(
            f"--share {share:g} is no share of the processors", help="say a number above 0 and up to 1: --share 0.1"
        )
    words = [sys.executable, "-P", "-m", "keepstep.probes.selftest", "--until-eof", "--test", test]
    words += ["--seed", str(seed)]
    words += ["--seconds", str(seconds), "--share", str(share)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    say(f"examining this machine for {seconds:g} s ...")
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    limit = (seconds + SLACK_S) / max(min(share, 1.0), 0.01)
    try:
        said, trouble = _read(process, limit)
    finally:
        process.kill()
        process.wait()
    try:
        report: dict[str, Any] = msgspec.json.decode(said)
    except msgspec.DecodeError:
        last = trouble.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        why = f"the self-test could not be made: {last[0]}"
        raise DoorError(why, help="is torch installed? keepstep doctor") from None
    if form in ("json", "jsonl"):
        print(msgspec.json.encode({"schema": "keepstep.v1/SelfTest", **report}).decode())
    else:
        _page(report)
    return 0 if report["passed"] else 1


def _read(process: subprocess.Popen[bytes], limit: float) -> tuple[bytes, bytes]:
    """All that it says, with its standard input left open until it has ended."""
    held, process.stdin = process.stdin, None  # ``communicate`` would close it
    try:
        return process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()
    finally:
        if held is not None:
            held.close()


def _page(report: dict[str, Any]) -> None:
    if report["passed"] is None:
        print(f"{paint('not made', 'yellow')}: {report['why']}")
        return
    word = paint("passed", "green") if report["passed"] else paint("FAILED", "red")
    print(f"{word}: {report['rounds']} rounds, {report['flop'] / 1e9:.1f} GFLOP checked in {report['seconds']:.1f} s")
    print(f"on {', '.join(report['devices']) or 'memory'}; digest {report['digest'] or '-'} (seed {report['seed']})")
    for line in report["failed"]:
        print(f"  {line}")
    if report["why"]:
        print(f"not all was examined: {report['why']}")
    if report["passed"]:
        print("nothing was wrong in this much work; a machine may still fail with other inputs, heat or voltage")
    else:
        print("take this machine out, and keep it powered: a reboot erases evidence")
