"""Exit codes of ``keepstep run``: what schedulers read. ``exit.json`` beside the logs is authoritative."""

from __future__ import annotations

DONE = 0
BAD_USAGE = 64
"""Wrong flags or arguments."""
BAD_CONFIG = 65
"""Wrong configuration, wrong version, or a log of a newer schema."""
PREFLIGHT = 66
"""Refused before anything started: unreadable script, port in use, too little memory, token missing."""
NO_PROGRESS = 93
"""The same fault came back without progress; do not restart."""
REQUEUE = 138
"""Infrastructure fault that needs another allocation, or saved after a preemption notice: please requeue."""


def of_worker(code: int | None, signal: int | None) -> int:
    """The code passed through for a failed worker: its own, or 128+n after signal n (1 when unknown)."""
    if signal:
        return 128 + signal
    return code if code else 1
