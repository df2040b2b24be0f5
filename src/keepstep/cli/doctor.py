"""``keepstep doctor``: is this machine fit for what the runtime relies on? Each answer comes with what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from keepstep.cli import dirs, preflight
from keepstep.cli.errors import DoorError
from keepstep.model import env

LEAST_TORCH = (2, 6)
LEAST_FILES = 4096
"""Open files per process below which a controller of a large job runs dry."""


class Finding(Struct, frozen=True, kw_only=True):
    check: str
    state: Literal["ok", "warn", "bad"]
    found: str
    help: str = ""


def examine() -> list[Finding]:
    """Run every check; none of them changes anything but the last, which forks a child that leaves at once."""
    return [check() for check in CHECKS]


def _python() -> Finding:
    fit = sys.version_info >= (3, 11)
    return Finding(
        check="python",
        state="ok" if fit else "bad",
        found=platform.python_version(),
        help="" if fit else "3.11 or newer is needed",
    )


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            check="torch", state="warn", found="not installed", help="rendezvous and recovery need torch 2.6 or newer"
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    fit = numbers >= LEAST_TORCH
    return Finding(
        check="torch", state="ok" if fit else "bad", found=version, help="" if fit else "2.6 or newer is needed"
    )


def _server() -> Finding:
    missing = []
    for name in ("starlette", "uvicorn", "uvloop", "structlog"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(
            check="server", state="bad", found=f"missing: {', '.join(missing)}", help="install keepstep[server]"
        )
    return Finding(check="server", state="ok", found="controller's dependencies are installed")


def _memory() -> Finding:
    root = dirs.runtime_root()
    base = next(one for one in (root, *root.parents) if one.exists())
    room = os.statvfs(base)
    free = room.f_bavail * room.f_frsize
    found = f"{free / (1 << 30):.1f} GiB free in {root}"
    if free < preflight.MIN_RUNTIME_BYTES:
        return Finding(
            check="shared memory", state="bad", found=found, help=f"enlarge /dev/shm or set {env.RUNTIME_DIR}"
        )
    if free < preflight.LOW_RUNTIME_BYTES:
        return Finding(check="shared memory", state="warn", found=found, help="two snapshots of every rank must fit")
    return Finding(check="shared memory", state="ok", found=found)


def _state() -> Finding:
    state = dirs.state_dir()
    try:
        preflight.check_state(state)
    except DoorError as error:
        return Finding(check="state directory", state="bad", found=str(error), help=error.help)
    return Finding(check="state directory", state="ok", found=str(state))


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding(
            check="pidfd", state="bad", found=str(error), help="Linux 5.3 or newer is needed to see deaths at once"
        )
    return Finding(check="pidfd", state="ok", found=f"kernel {platform.release()}")


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= LEAST_FILES
    return Finding(
        check="open files",
        state="ok" if enough else "warn",
        found=str(soft),
        help="" if enough else f"ulimit -n {LEAST_FILES}",
    )


def _fork() -> Finding:
    """Warm starts fork a process that has imported torch; some sandboxes forbid it."""
    try:
        pid = os.fork()
    except OSError as error:
        return Finding(check="fork start", state="bad", found=str(error), help="start jobs with --start spawn")
    if pid == 0:
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        return Finding(
            check="fork start", state="bad", found=f"child ended with {status}", help="start jobs with --start spawn"
        )
    return Finding(check="fork start", state="ok", found="works")


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _torch, _server, _pidfd, _memory, _state, _files, _fork)
