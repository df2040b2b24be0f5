"""What can go wrong in an agent, each with the exit code a scheduler shall see."""

from __future__ import annotations

from keepstep.model import exits


class AgentError(Exception):
    """The agent cannot go on; the message is one paragraph for a person."""

    code = 1

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class BadConfig(AgentError):
    """The configuration file is missing, unreadable or contradicts itself."""

    code = exits.BAD_CONFIG


class ShimUnavailable(AgentError):
    """The process parent did not start or did not answer in time."""


class SpawnRefused(AgentError):
    """The process parent could not start a program (not found, not executable, queue full)."""


class Superseded(Exception):
    """A newer roster arrived while an older one was being carried out."""
