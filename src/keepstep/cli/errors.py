"""Errors at the door: one paragraph that names the thing and the value, one line with the way out, one exit code.

Everything that a user can get wrong ends in a ``DoorError``; ``main`` prints it and leaves. A traceback that
reaches the terminal is therefore always our own mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from keepstep.model import exits

BEGINS_ALIKE = 0.85
"""Share of a wrong word with which the right one must begin, to be suggested before all others."""


class DoorError(Exception):
    """Base of all errors shown to a person.

    Attributes:
        code: exit code of the command.
        help: what to do about it; shown on a line of its own.
    """

    code = 1

    def __init__(self, message: str, *, help: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.help = help
        if code is not None:
            self.code = code

    def paragraph(self) -> str:
        text = f"error: {self}"
        return f"{text}\nhelp: {self.help}" if self.help else text


class UsageError(DoorError):
    """Wrong flags or arguments (exit code 64)."""

    code = exits.BAD_USAGE


class ConfigError(DoorError):
    """Wrong configuration or version (exit code 65)."""

    code = exits.BAD_CONFIG


class PreflightError(DoorError):
    """Refused before anything started (exit code 66)."""

    code = exits.PREFLIGHT


class NotFound(DoorError):
    """No such job, incident or run directory."""

    code = 1


class Unreachable(DoorError):
    """No controller answers, and there is nothing to read instead."""

    code = 1


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if any: one that begins alike, else one that looks alike."""
    words = sorted(known, key=len)
    alike = max(words, key=lambda one: _common(word, one), default="")
    if word and _common(word, alike) >= BEGINS_ALIKE * len(word):
        return alike
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return near[0] if near else None


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
