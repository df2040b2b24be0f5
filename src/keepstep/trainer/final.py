"""Final: the last state of a run stays in memory until the durable tiers have it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from keepstep.checkpoint.slot import Version

FINAL_WAIT_S = 1800.0
"""How long the end of a run waits for its last state to be durable."""
ABSENT_S = 15.0
"""The same where there is no archiver at all; one that has died is started again sooner than that."""
SAY_AFTER_S = 1.0
SAY_EVERY_S = 5.0
"""How often people hear that the end of a run still waits, after the first time."""
REMIND_S = 1.0
POLL_S = 0.01


class Held(Protocol):
    """What is asked of ``Pins``."""

    def hold(self, version: Version) -> bool: ...

    def held(self) -> list[int]: ...

    def remind(self) -> None: ...


def say_if_over(step: int, total: int, rank: int) -> None:
    """A job that has all its steps behind it when it starts must not look as if it had trained."""
    if rank == 0 and step >= total:
        _say(
            f"nothing is left to do: the state is of step {step}, and ks.steps({total}) ends there or before; ask for "
            f"more steps, or start anew with --no-resume or another directory"
        )


def until_durable(pins: Held, version: Version, *, archiver: Path, rank: int, stop: Callable[[], bool]) -> bool:
    """Hand the last version to the archiver, once it has written what it has, and wait until it has written it.

    Args:
        archiver: its socket.
        stop: true when something else comes first; the caller will be back.

    Returns:
        False when the state is not (known to be) durable.
    """
    began = time.monotonic()
    seen, reminded, say_at, handed = began, began, began + SAY_AFTER_S, False
    while True:
        if not pins.held():
            if handed:
                return True
            if not pins.hold(version):
                _say(f"rank {rank}: step {version.step} has no complete snapshot; the durable tiers do not get it")
                return False
            handed = True
            continue
        now = time.monotonic()
        if stop():
            return False
        if archiver.exists():
            seen = now
        if now - seen > ABSENT_S or now - began > FINAL_WAIT_S:
            why = "there is no archiver" if now - seen > ABSENT_S else f"{FINAL_WAIT_S:g} s have passed"
            _say(f"rank {rank}: step {version.step} is not known to be in the durable tiers: {why}")
            return False
        if now >= say_at:
            say_at = now + SAY_EVERY_S
            steps = ", ".join(str(step) for step in pins.held())
            _say(
                f"rank {rank}: step {version.step} is the last one; waiting until the archiver has taken step {steps} "
                f"({now - began:.0f} s so far)"
            )
        if now - reminded > REMIND_S:
            reminded = now
            pins.remind()
        time.sleep(POLL_S)


def _say(words: str) -> None:
    print(f"keepstep: {words}", file=sys.stderr, flush=True)
