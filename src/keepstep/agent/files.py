"""Small file manners: replace atomically, read a tail without reading the whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TAIL_BYTES = 16 * 1024
"""No more than this is read from the end of a file for its last lines."""
TAIL_LINE = 500
"""Longer lines are cut here in facts; the file keeps them whole."""


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Readers see the old content or the new, never half of it; ``durable`` survives a power cut, too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    with open(temporary, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        with contextlib.suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def tail_lines(path: str, count: int) -> tuple[str, ...]:
    """The last ``count`` lines of a file; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(line[:TAIL_LINE] for line in text.splitlines()[-count:])


def read_int(path: Path) -> int | None:
    """A number in a small file, or ``None`` while it is not there."""
    try:
        return int(path.read_text().strip() or 0)
    except (OSError, ValueError):
        return None
