"""What the launcher tells people: short lines on stderr, and never a crash because nobody listens."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """One line on stderr. A closed or full stderr is no reason to stop training."""
    with contextlib.suppress(OSError, ValueError):
        print(f"keepstep: {line}", file=sys.stderr, flush=True)


def plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
