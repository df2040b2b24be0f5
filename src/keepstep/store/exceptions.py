"""What can go wrong with a log, each with the way out in its message."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of an event log."""


class SequenceConflict(StoreError):
    """Somebody else has appended since the caller last looked; nothing was written."""


class LogFull(StoreError):
    """No space (or quota, or size limit) for the records; nothing was written. Retry after making room."""


class LogBusy(StoreError):
    """Another process kept the log locked for longer than the busy timeout; nothing was written."""


class LogUnavailable(StoreError):
    """The log cannot be opened, read or written (permissions, a failing disk, a missing directory)."""


class NewerSchema(StoreError):
    """The log was written by a newer keepstep, whose records this one would misread."""


class NotALog(StoreError):
    """The file exists but is not a keepstep log."""


class LogCorrupt(StoreError):
    """An entry is damaged or missing: the log is no longer the sequence that was written."""
