"""Mounts: whether a directory lies on the file system that it is meant to lie on.

A mount that is missing leaves an empty directory behind, which looks like a new store: a run would begin anew there and
fill the wrong disk. What should be mounted is told by the system's own table (``fstab(5)``) and by what an earlier run
has seen; what is mounted, by ``/proc/self/mountinfo`` (``proc_pid_mountinfo(5)``). Where neither says anything, nothing
is known and nothing is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

FSTAB = Path("/etc/fstab")
MOUNTINFO = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that hold nothing after a start; containers often go without those that their image's table names."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(Struct, frozen=True):
    """A file system at its place. ``source``: a device, or ``server:/export``."""

    point: str
    source: str
    kind: str


def covering(path: Path) -> Mount | None:
    """The mounted file system on which a path lies, whether it exists or not; ``None`` where that is not known."""
    return _longest(path, _mounted())


def missing(path: Path) -> str:
    """Why a path does not lie where the system's table says; empty where it does, or the table says nothing."""
    meant = _longest(path, _meant())
    if meant is None:
        return ""
    there = covering(path)
    if there is None or not lies_above(there, meant):
        return ""
    return f"{FSTAB} has {meant.source} ({meant.kind}) at {meant.point}, and nothing is mounted there"


def lies_above(there: Mount, meant: Mount) -> bool:
    """Whether only a file system further up is mounted. One at the place itself, or below it, will do."""
    return len(there.point) < len(meant.point)


def _longest(path: Path, mounts: Iterator[Mount]) -> Mount | None:
    real = os.path.realpath(path)
    fit = [one for one in mounts if real == one.point or real.startswith(one.point.rstrip("/") + "/")]
    return max(fit, key=lambda one: len(one.point), default=None)


def _mounted() -> Iterator[Mount]:
    for line in _lines(MOUNTINFO):
        left, dash, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if dash and len(fields) >= 5 and len(more) >= 2:
            yield Mount(_plain(fields[4]), _plain(more[1]), more[0])


def _meant() -> Iterator[Mount]:
    """Entries that the system mounts by itself and that outlive it. ``noauto`` may be left unmounted on purpose."""
    for line in _lines(FSTAB):
        fields = [] if line.lstrip().startswith("#") else line.split()
        options = fields[3].split(",") if len(fields) > 3 else []
        if len(fields) >= 3 and fields[1].startswith("/") and "noauto" not in options and fields[2] not in IN_MEMORY:
            yield Mount(_plain(fields[1]).rstrip("/") or "/", _plain(fields[0]), fields[2])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _plain(text: str) -> str:
    """Blanks are written as octal numbers."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)
