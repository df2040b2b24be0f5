"""Errors at the door: one paragraph that names the thing and the value, one line with the way out, one exit code.

Everything that a user can get wrong ends in a ``DoorError``; ``main`` prints it and leaves. A traceback that
reaches the terminal is therefore always our own mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from keepstep.model import exits


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
    """The known word that was probably meant, if any."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None
