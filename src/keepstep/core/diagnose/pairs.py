"""Which machine is slow, from measurements of pairs: the one that all slow pairs share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_PAIR = re.compile(
    r"(?<![\w.-])([\w.-]{0,60}\d[\w.-]{0,60}) ?(?:<->|->|<=>|\u2194|--) ?([\w.-]{0,60}\d[\w.-]{0,60})[ :=]{1,3}(\d+(?:\.\d+)?) ?([GM])i?[Bb]"
)
SLOW_SHARE = 0.6
"""Of the fastest pair; a pair below it is slow."""
LEAST_SLOW = 2
"""Slow pairs that have to share a machine, before it is named."""


def slow_end(texts: Iterable[str]) -> str:
    """The machine of every slow pair and of no fast one; nothing when there is none, or more than one."""
    found = [
        (one, other, float(value) * (1000 if unit == "G" else 1))
        for text in texts
        for one, other, value, unit in _PAIR.findall(text)
    ]
    if not found:
        return ""
    fastest = max(value for _, _, value in found)
    slow: Counter[str] = Counter()
    fast: set[str] = set()
    count = 0
    for one, other, value in found:
        if value < fastest * SLOW_SHARE:
            slow.update((one, other))
            count += 1
        else:
            fast.update((one, other))
    shared = [name for name, times in slow.items() if times == count and count >= LEAST_SLOW and name not in fast]
    return shared[0] if len(shared) == 1 else ""
