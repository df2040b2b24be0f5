"""What a command makes: taken away again when it fails or is told to end, so that nothing looks whole that is not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from keepstep.checkpoint import lease
from keepstep.checkpoint.exceptions import TierHeld
from keepstep.checkpoint.staging import make_folders, remove_folders
from keepstep.checkpoint.tiers.directory import MARKER
from keepstep.checkpoint.tiers.open import directory, is_directory, open_tier
from keepstep.cli.errors import DoorError
from keepstep.ports.tier import Tier

END = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as Ctrl-C does: in order."""


@contextlib.contextmanager
def endable() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block as an exception, so that what was made is taken away on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: list[tuple[signal.Signals, Any]] = []
    try:
        for one in END:
            if signal.getsignal(one) is not signal.SIG_IGN:  # nohup means it
                before.append((one, signal.signal(one, _leave)))
        yield
    finally:
        for one, handler in before:
            signal.signal(one, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def target(url: str, what: str, patience_s: float) -> Iterator[Tier]:
    """The tier that a command writes to, held against jobs and other commands while the block lasts.

    Folders and the marker that were made for it go again when the block fails, unless something else is in them.

    Raises:
        DoorError: a job is at work there.
        TierError: it cannot be used.
    """
    root = directory(url).absolute() if is_directory(url) and url else None
    fresh = make_folders(root) if root else []
    bare = root is not None and not os.path.exists(root / MARKER)
    try:
        with endable():
            tier = open_tier(url, "remote", create=True, budget_s=patience_s)
            with held(tier, what):
                yield tier
    except BaseException:
        with contextlib.suppress(OSError):
            if root is not None and bare and not any(name.startswith("step-") for name in os.listdir(root)):
                (root / MARKER).unlink(missing_ok=True)
        remove_folders(fresh)
        raise


@contextlib.contextmanager
def held(tier: Tier, what: str) -> Iterator[Callable[[], None]]:
    """A claim on a tier, as of ``lease.held``.

    Raises:
        DoorError: a job, or another command, is at work there.
    """
    try:
        with lease.held(tier, what) as check:
            yield check
    except TierHeld as error:
        raise DoorError(f"{what}: {error}", help="wait until it has ended, or name another place") from error
