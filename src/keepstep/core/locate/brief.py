"""The part of a library's error text that an operator wants to read."""

from __future__ import annotations

import re

LIMIT = 160
"""Characters kept of an error text."""

_SOURCE = re.compile(r"\[[^\]\s]+:\d+\]\s*")
_ADVICE = re.compile(r"\.?\s+(This is typically|Check the logs of)\b.*", re.DOTALL)


def brief(error: str) -> str:
    """First line of ``error`` without the source position and the advice that gloo wraps around its message."""
    lines = error.strip().splitlines()
    return _ADVICE.sub("", _SOURCE.sub("", lines[0]))[:LIMIT] if lines else ""
