"""Stamps: the time that a line of a log says it was written at."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

LOOK_CHARS = 64
"""A time stands at the beginning of a line, behind a label or two at most; further on it is part of a message."""

_DATED = re.compile(
    r"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6})\d{0,3})?\s?(Z|UTC\b|[+-]\d\d:?\d\d\b)?"
)
"""``logging``'s own form, ISO 8601, and most others."""
_GLOG = re.compile(r"(?<![A-Za-z])[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")
"""torch's C++ side (c10): no year."""


def stamp(line: str, year: int) -> float | None:
    """Seconds since 1970, or ``None`` where the line begins without a time.

    Args:
        year: for forms that leave it out. A time without a zone is one of this machine's.
    """
    head = line[:LOOK_CHARS]
    try:
        if found := _DATED.search(head):
            *date, fraction, zone = found.groups()
            return _seconds([int(part) for part in date], fraction, zone)
        if found := _GLOG.search(head):
            *parts, fraction = found.groups()
            return _seconds([year, *map(int, parts)], fraction, None)
    except (ValueError, OverflowError):
        return None  # the 31st of a month that has none: no time after all
    return None


def _seconds(parts: list[int], fraction: str | None, zone: str | None) -> float:
    year, month, day, hour, minute, second = parts
    micros = int((fraction or "").ljust(6, "0"))
    return datetime(year, month, day, hour, minute, second, micros, tzinfo=_zone(zone)).timestamp()


def _zone(zone: str | None) -> timezone | None:
    if zone is None:
        return None
    if zone[0] not in "+-":
        return UTC
    ahead = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
    return timezone(ahead if zone[0] == "+" else -ahead)
