"""Directories of a job: where they are, whose they are, and how long they stay.

A run directory is *live* while a launcher holds the lock of one of its nodes. The kernel lets go of the lock when
the launcher dies, however it dies, so nothing has to be cleaned up before the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.checkpoint.nodedir import OWNER, lock, remove_lost_memory, remove_node_dir, runtime_root
from keepstep.cli.errors import PreflightError
from keepstep.model import env

__all__ = ["lock", "remove_lost_memory", "remove_node_dir", "runtime_root"]

KEPT_RUNS = 20
"""Run directories that stay; older ones are removed at the next start, never a live one."""
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path (sun_path without its final zero)."""
_LONGEST_SOCKET = max(len(name) for name in (env.AGENT_SOCKET, env.SHIM_SOCKET, env.KEEPER_SOCKET)) + 8
"""With some room: a socket is bound under a temporary name first."""
LATEST = "latest"
NODES = "nodes"
"""``<run_dir>/nodes/<node>.json`` is the agent's configuration, ``.lock`` says that its launcher lives."""
_BORN = ".born"
"""Empty file whose time is the beginning of the run."""


def state_dir(override: str | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """``--state-dir``, ``$KEEPSTEP_STATE_DIR``, ``$XDG_STATE_HOME/keepstep``, ``~/.local/state/keepstep``."""
    environ = os.environ if environ is None else environ
    if override or environ.get(env.STATE_DIR):
        return Path(override or environ[env.STATE_DIR]).expanduser().absolute()
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]).absolute() / "keepstep"
    return Path("~/.local/state/keepstep").expanduser()


def runs(state: Path) -> Path:
    return state / "runs"


def node_dir(root: Path, job: str, node: str) -> Path:
    """``<root>/<job>/<node>``, shortened by a hash where a socket's path would become too long.

    Raises:
        PreflightError: the root alone is too long.
    """
    path = root / job / node
    room = MAX_SOCKET_PATH - 1 - _LONGEST_SOCKET
    if len(os.fsencode(path)) > room:
        path = root / hashlib.sha256(f"{job}/{node}".encode()).hexdigest()[:12]
    if len(os.fsencode(path)) > room:
        raise PreflightError(
            f"runtime directory {root} is too long: sockets in it must stay below {MAX_SOCKET_PATH + 1} bytes",
            help=f"set {env.RUNTIME_DIR} to a shorter path on a memory-backed file system",
        )
    return path


@contextlib.contextmanager
def held(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock within the block; yields False when it could not be had in time."""
    deadline = time.monotonic() + timeout_s
    while (fd := lock(path)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def is_live(run_dir: Path) -> bool:
    """Whether any launcher of this run is alive (on this machine, or on a file system that knows about locks)."""
    for path in (run_dir / NODES).glob("*.lock"):
        fd = lock(path)
        if fd is None:
            return True
        os.close(fd)
    return False


def make_run_dir(state: Path, job: str | None, stem: str) -> Path:
    """A new, empty run directory. Without a job name, one is made of the script's name and the time.

    An older run of the same name is kept under its name plus the time it ended.
    """
    home = runs(state)
    home.mkdir(parents=True, exist_ok=True)
    name = job or f"{stem}-{time.strftime('%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        run_dir = home / (name if job or attempt == 1 else f"{name}-{attempt}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            if job:
                set_aside(run_dir)
            continue
        furnish(run_dir)
        return run_dir
    raise PreflightError(f"no free name for a run directory like {home / name}", help="give another --job NAME")


def furnish(run_dir: Path) -> None:
    """Make the rooms that every part expects; harmless where they exist."""
    (run_dir / NODES).mkdir(parents=True, exist_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError), (run_dir / NODES / _BORN).open("x"):
        pass


def set_aside(run_dir: Path) -> None:
    """Rename an earlier run of the same name by the time it ended.

    Raises:
        PreflightError: it has not ended.
    """
    if is_live(run_dir):
        raise PreflightError(
            f"job {run_dir.name} is running here already",
            help=f"`keepstep job {run_dir.name}` shows it; choose another --job NAME (or --rdzv-id)",
        )
    log = run_dir / "log.sqlite"
    ended = time.localtime((log if log.exists() else run_dir).stat().st_mtime)
    aside = run_dir.with_name(f"{run_dir.name}.{time.strftime('%m%d-%H%M%S', ended)}")
    number = 1
    while aside.exists():
        number += 1
        aside = aside.with_name(f"{run_dir.name}.{time.strftime('%m%d-%H%M%S', ended)}-{number}")
    run_dir.rename(aside)


def point_latest(run_dir: Path) -> None:
    """Let ``runs/latest`` name this run; the old link is replaced in one step."""
    link = run_dir.parent / LATEST
    fresh = run_dir.parent / f".{LATEST}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(run_dir.name)
    fresh.replace(link)


def unpoint_latest(gone: Path) -> None:
    """Let ``latest`` name the newest run that is left, where it names one that is gone."""
    link = gone.parent / LATEST
    with contextlib.suppress(OSError):
        if os.readlink(link) == gone.name:
            link.unlink()
            left = all_runs(gone.parent.parent)
            if left:
                point_latest(left[0])


def all_runs(state: Path) -> list[Path]:
    """Run directories, the newest first."""
    home = runs(state)
    if not home.is_dir():
        return []
    found = [
        path for path in home.iterdir() if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
    ]
    return sorted(found, key=_born, reverse=True)


def _born(run_dir: Path) -> float:
    for path in (run_dir / NODES / _BORN, run_dir):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def remove_old_runs(state: Path, keep: int = KEPT_RUNS) -> list[Path]:
    """Remove all but the ``keep`` newest runs; live ones stay and count. Returns what was removed."""
    removed: list[Path] = []
    for run_dir in all_runs(state)[keep:]:
        if not is_live(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)
            removed.append(run_dir)
    return removed


def make_node_dir(path: Path) -> int:
    """Make the memory-backed directory, without what a launcher that is gone has left; return its lock.

    Raises:
        PreflightError: another launcher uses it.
    """
    for _ in range(5):  # a sibling that leaves may remove the job's directory between two of our steps
        with contextlib.suppress(FileNotFoundError):
            _make_private(path)
            fd = lock(path / OWNER)
            if fd is None:
                raise PreflightError(
                    f"runtime directory {path} is in use by another launcher", help="choose another --node-name"
                )
            for left in path.iterdir():
                if left.name != OWNER:
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            return fd
    raise PreflightError(f"runtime directory {path} cannot be made", help=f"set {env.RUNTIME_DIR}")


def _make_private(path: Path) -> None:
    """Make the directory and what is missing above it for us alone, whatever the umask.

    Raises:
        PreflightError: somebody else has made it before us: he could put sockets and memory of his own in there.
    """
    for one in reversed([one for one in (path, *path.parents) if not one.exists()]):
        one.mkdir(mode=0o700, exist_ok=True)
    for one in (path, path.parent):
        if (owner := one.stat().st_uid) != os.getuid():
            raise PreflightError(
                f"runtime directory {one} belongs to another user (uid {owner})",
                help=f"choose another --job NAME, or set {env.RUNTIME_DIR} to a directory of yours",
            )
