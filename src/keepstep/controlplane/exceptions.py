"""Why a controller does not start or cannot go on; each carries the exit code that ``model.exits`` gives it."""

from __future__ import annotations

from keepstep.model import exits


class ControllerError(Exception):
    """Base: one paragraph for stderr, and the exit code."""

    code = exits.PREFLIGHT


class BadConfig(ControllerError):
    """The configuration, or the log's schema, is not one this controller can work with."""

    code = exits.BAD_CONFIG


class PreflightFailed(ControllerError):
    """Something outside has to change first: a port, a lock, a token, disk space."""


class LostLog(ControllerError):
    """The log is no longer ours or no longer whole; going on would make two histories."""
