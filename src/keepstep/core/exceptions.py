"""What can go wrong in the mind itself; everything else it answers with records."""

from __future__ import annotations


class CoreError(Exception):
    """Base of the mind's errors."""


class IllegalMove(CoreError, AssertionError):
    """A record asks a machine for a transition that its table does not have: a mistake of ours, never of a user."""


class UnreadableState(CoreError, ValueError):
    """A snapshot is not of this version; fold the log from its first record instead."""
