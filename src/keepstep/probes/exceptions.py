"""What can go wrong with an examination itself; a machine that fails one is an outcome and no error."""

from __future__ import annotations


class ProbeError(Exception):
    """Base of the probes' errors."""


class NothingRan(ProbeError):
    """No group of a round could be started: the command or the way to the machines is wrong."""


class ForeignRecord(ProbeError):
    """The record belongs to another search, or another process is writing it."""


class UnreadableRecord(ProbeError):
    """A line of the record is not what this version writes."""
