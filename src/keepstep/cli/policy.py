"""Policy: what the flags about checkpoints mean, and what can be known to be wrong with them before a run.

``make`` and ``layout`` judge the words alone; ``fit`` and ``check`` need the world's size and a look at the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from keepstep.checkpoint import lease, mounts, words
from keepstep.checkpoint.exceptions import BadSetting, TierError
from keepstep.checkpoint.tiers.open import is_directory, open_tier
from keepstep.cli import places
from keepstep.cli.errors import DoorError, PreflightError, UsageError
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout

EXTRA = "pip install 'keepstep[checkpoint]'"


def make(args: argparse.Namespace) -> CheckpointPolicy:
    """The policy that the flags mean.

    Raises:
        UsageError: names the flag, its value and the way out.
    """
    said = {name: getattr(args, f"ckpt_{name}") for name in words.DEFAULTS}
    with _as(UsageError):
        return words.policy(said, _flag, resume=not args.no_resume)


def layout(text: str) -> Layout | None:
    """As ``words.layout``; raises ``UsageError``."""
    with _as(UsageError):
        return words.layout(text, "--layout")


def fit(wanted: Layout | None, world: int) -> Layout:
    """As ``words.fit``; raises ``PreflightError``."""
    with _as(PreflightError):
        return words.fit(wanted, world, "--layout")


def idle_flags(policy: CheckpointPolicy, given: frozenset[str]) -> list[str]:
    """Remarks on flags that have nothing to act upon."""
    need_any = ("every", "full_every", "keep", "keep_every", "keep_for", "sdc_window")
    remarks = []
    for names, there, need in (
        (need_any, policy.dir or policy.local_dir, "--ckpt-dir or --ckpt-local-dir"),
        (("rate_remote",), policy.dir, "--ckpt-dir"),
        (("rate_local",), policy.local_dir, "--ckpt-local-dir"),
    ):
        idle = [_flag(name) for name in names if f"ckpt_{name}" in given]
        if idle and not there:
            remarks.append(f"{', '.join(idle)} without effect: there is no {need}")
    return remarks


def check(policy: CheckpointPolicy, state: Path) -> None:
    """Extras are installed, and directories lie where they should and can be written: made, written, fsynced, removed.

    Args:
        state: the state directory, which remembers where ``--ckpt-dir`` has been.

    Raises:
        PreflightError: with the first thing that cannot work.
    """
    if "://" in policy.dir and not _installed("obstore"):
        raise PreflightError(f"--ckpt-dir {policy.dir} needs obstore, which is not installed", help=EXTRA)
    if policy.full_every > 1 and not (_installed("zstandard") and _installed("numpy")):
        raise PreflightError(f"--ckpt-full-every {policy.full_every} needs zstandard and numpy", help=EXTRA)
    for flag, where in (("--ckpt-dir", policy.dir), ("--ckpt-local-dir", policy.local_dir)):
        if where and "://" not in where:
            path = Path(where)
            if why := mounts.missing(path) or (places.lost(path, state) if where == policy.dir else ""):
                raise PreflightError(
                    f"{flag} {path} is not what it should be: {why}",
                    help=f"mount it, or set {flag} to another directory",
                )
            check_directory(path, flag)
            if where == policy.dir:
                places.remember(path, state)


def check_directory(path: Path, flag: str) -> None:
    """Raises ``PreflightError`` where generations could not be written."""
    probe = path / f".keepstep-probe.{socket.gethostname()}.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"keepstep")
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise PreflightError(
            f"{flag} {path} cannot be written: {why}",
            help=f"set {flag} to a directory of yours that has room",
        ) from error


def taken(policy: CheckpointPolicy, job: str) -> list[str]:
    """A remark for every directory that a running job of another name writes to.

    Object stores are left to the archiver, which looks before it writes: an answer from there may take long.
    """
    remarks = []
    for flag, where in (("--ckpt-dir", policy.dir), ("--ckpt-local-dir", policy.local_dir)):
        if not where or not is_directory(where):
            continue
        with contextlib.suppress(TierError):  # no such directory yet, or one that the archiver will have to tell of
            found, now_ns = lease.read(open_tier(where, budget_s=0.0)), time.time_ns()
            if found is not None and found.job != job and lease.living(found, now_ns):
                why = lease.explain(found, where, now_ns)
                remarks.append(f"{flag} {why}; until then job {job} writes no generation there")
    return remarks


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _flag(name: str) -> str:
    return f"--ckpt-{name.replace('_', '-')}"


@contextlib.contextmanager
def _as(kind: type[DoorError]) -> Iterator[None]:
    try:
        yield
    except BadSetting as error:
        raise kind(error.args[0], help=error.help) from error
