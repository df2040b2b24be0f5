"""Moments: times of the log as people and tools read them."""

from __future__ import annotations

import datetime

from keepstep.model.ids import Nanos


def when(at: Nanos | int) -> str | None:
    """RFC 3339 in UTC with microseconds; ``None`` for a time that is not known."""
    if not at:
        return None
    whole, rest = divmod(int(at), 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(whole, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest // 1000:06d}Z"
