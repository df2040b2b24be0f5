"""Small file manners that several processes share: replace whole, read a number that may not be there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Readers see the old content or the new, never half of it; ``durable`` survives a power cut, too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        with contextlib.suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def read_int(path: Path) -> int | None:
    """A number in a small file, or ``None`` while it is not there."""
    try:
        return int(path.read_text().strip() or 0)
    except (OSError, ValueError):
        return None
