"""Room: whether the memory for snapshots is there, worked out before the run instead of found out during it."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.checkpoint.exceptions import NotEnoughMemory

VERSIONS = 2
SPARE = 0.05
"""Share of the free memory that stays free."""


def copies(*, has_buddy: bool, durable: bool = False, full_every: int = 1) -> dict[str, int]:
    """Versions kept in a node's memory for each of its ranks, by what they are for.

    Args:
        durable: one more may be held for the durable tiers while two go on alternating.
        full_every: from 2 on, the archiver keeps what it wrote last, to write differences from it.
    """
    found = {"versions": VERSIONS}
    if durable:
        found["held for the durable tiers"] = 1
    if has_buddy:
        found["replicas of another node's ranks"] = VERSIONS
    if durable and full_every > 1:
        found["to take differences from (--ckpt-full-every 1 does without)"] = 1
    return found


def need(version_bytes: int, ranks: int, *, has_buddy: bool, durable: bool = False, full_every: int = 1) -> int:
    """Bytes on one node."""
    return version_bytes * ranks * sum(copies(has_buddy=has_buddy, durable=durable, full_every=full_every).values())


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


def check(
    *, version_bytes: int, ranks: int, has_buddy: bool, room: int, durable: bool = False, full_every: int = 1
) -> None:
    """Raises ``NotEnoughMemory`` with the whole sum when ``room`` bytes do not suffice."""
    wanted = need(version_bytes, ranks, has_buddy=has_buddy, durable=durable, full_every=full_every)
    if wanted <= room:
        return
    kept = copies(has_buddy=has_buddy, durable=durable, full_every=full_every)
    listed = " + ".join(f"{number} {name}" for name, number in kept.items())
    raise NotEnoughMemory(
        f"snapshots need {show(wanted)} of memory on this node: {show(version_bytes)} per version x {ranks} ranks x "
        f"({listed}), but {show(room)} can be had. Free memory, put KEEPSTEP_RUNTIME_DIR on a larger tmpfs, or run "
        f"with --snapshot-every 0 (replicated models recover from a live replica then)"
    )


def show(size: int) -> str:
    """``3.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
