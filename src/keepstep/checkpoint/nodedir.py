"""Node directories: where a node keeps what lives in memory, whose it is, and when it is given back.

A directory belongs to the process that holds the lock in it. The kernel lets go of the lock when that process dies,
however it dies; memory that nobody holds is removed by whoever comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from keepstep.model import env

OWNER = ".launcher.lock"
"""Held by the launcher, or by the attendant where there is none."""
LOST_S = 180.0
"""Age at which memory without a living owner is given back: well above the grace of processes that may use it."""


def runtime_root(environ: Mapping[str, str] | None = None) -> Path:
    """``$KEEPSTEP_RUNTIME_DIR``, else a directory of ours in shared memory."""
    environ = os.environ if environ is None else environ
    given = environ.get(env.RUNTIME_DIR)
    return Path(given).absolute() if given else Path(f"/dev/shm/keepstep-{os.getuid()}")


def lock(path: Path) -> int | None:
    """Take the lock at once and for as long as this process lives; ``None`` when somebody else holds it.

    The descriptor is not inherited by children: a lock must not outlive its launcher.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def remove_node_dir(path: Path, root: Path) -> None:
    """Give the memory back; the job's directory goes with its last node."""
    shutil.rmtree(path, ignore_errors=True)
    if path.parent != root:
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def remove_lost_memory(root: Path, older_than_s: float = LOST_S) -> list[Path]:
    """Remove what owners that were killed have left in memory."""
    removed: list[Path] = []
    for owner in (*root.glob(f"*/{OWNER}"), *root.glob(f"*/*/{OWNER}")):
        with contextlib.suppress(OSError):
            if time.time() - owner.stat().st_mtime > older_than_s and (fd := lock(owner)) is not None:
                os.close(fd)
                remove_node_dir(owner.parent, root)
                removed.append(owner.parent)
    return removed
