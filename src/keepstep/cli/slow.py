"""Slow: in a line each, who holds up a job, why, and what it costs."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

SHOWN = 5
"""Lines on a page; ``-o json`` has all of them."""


def slow_lines(job: Mapping[str, Any]) -> list[str]:
    """``slow: rank 5 on n2 is 1.3x slow since 12:01: clock 1.2 of 2.9 GHz; costs 18 % of the job``.

    Args:
        job: the controller's answer; without stragglers where it is an older one.
    """
    rows = job.get("stragglers") or ()
    lines = [f"slow: {_since(row)}" for row in rows[:SHOWN]]
    if len(rows) > SHOWN:
        lines.append(f"slow: {len(rows) - SHOWN} more; -o json has them all")
    return lines


def _since(row: Mapping[str, Any]) -> str:
    """The sentence with the time of the day in it, by this terminal's clock."""
    who, colon, rest = str(row["why"]).partition(":")
    try:
        at = datetime.datetime.fromisoformat(row["since"]).astimezone()
    except (TypeError, ValueError):
        return str(row["why"])
    return f"{who} since {at:%H:%M}{colon}{rest}"
