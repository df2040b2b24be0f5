"""Room: whether the memory for snapshots is there, worked out before the run instead of found out during it."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.checkpoint.exceptions import NotEnoughMemory

VERSIONS = 2
SPARE = 0.05
"""Share of the free memory that stays free."""


def need(version_bytes: int, ranks: int, *, has_buddy: bool) -> int:
    """Bytes on one node: two versions per local rank, and as many again for another node's replicas."""
    return version_bytes * VERSIONS * ranks * (2 if has_buddy else 1)


def free(directory: Path) -> int:
    """Bytes that may still be written below ``directory``: what the file system has, and what memory is left."""
    stat = os.statvfs(directory)
    room = stat.f_bavail * stat.f_frsize
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    room = min(room, int(line.split()[1]) * 1024)
                    break
    except OSError:
        pass
    return int(room * (1 - SPARE))


def used(*directories: Path) -> int:
    """Bytes already taken by snapshots; they are part of what is needed, not in addition to it."""
    files = (path for directory in directories if directory.is_dir() for path in directory.iterdir())
    return sum(path.stat().st_blocks * 512 for path in files)


def check(*, version_bytes: int, ranks: int, has_buddy: bool, room: int) -> None:
    """Raises ``NotEnoughMemory`` with the whole sum when ``room`` bytes do not suffice."""
    wanted = need(version_bytes, ranks, has_buddy=has_buddy)
    if wanted <= room:
        return
    replicas = " + the same for another node's replicas" if has_buddy else ""
    raise NotEnoughMemory(
        f"snapshots need {show(wanted)} of memory on this node: {show(version_bytes)} per version x {VERSIONS} "
        f"versions x {ranks} ranks{replicas}, but {show(room)} can be had. Free memory, put KEEPSTEP_RUNTIME_DIR on "
        f"a larger tmpfs, or run with --snapshot-every 0 (replicated models recover from a live replica then)"
    )


def show(size: int) -> str:
    """``3.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
