"""Small file manners: replace atomically, read a tail without reading the whole."""

from __future__ import annotations

import os

from keepstep.checkpoint.files import read_int, write_atomic

__all__ = ["read_int", "tail_lines", "write_atomic"]

TAIL_BYTES = 16 * 1024
"""No more than this is read from the end of a file for its last lines."""
TAIL_LINE = 500
"""Longer lines are cut here in facts; the file keeps them whole."""


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
