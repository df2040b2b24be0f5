"""Orphan: launcher, agent and shim were all killed at once, and nobody is left who would end this process.

Any one of them that lives or is started again looks after it, so three things have to come together: the agent has
not answered for long, nobody listens in the shim's place, and this process has another parent than at its start.
"""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_GRACE_S = 60.0
GRACES = 2.0
"""The shim's own grace, so many times: whoever is to come back has come back by then."""

_SOCKETS = Path("/proc/net/unix")
_ACCEPTS = 0x10000
"""``__SO_ACCEPTCON`` in the flags of that table: somebody listens."""


class Orphan:
    """Knows when this process belongs to nobody any more.

    Args:
        shim: the shim's socket. It is looked up and never connected to: the shim would take us for its agent.
        grace_s: how long the shim waits for an agent.
    """

    def __init__(self, shim: Path, grace_s: float = DEFAULT_GRACE_S) -> None:
        self._shim = shim
        self._parent = os.getppid()
        self.limit_s = GRACES * grace_s

    def is_one(self, silent_s: float) -> bool:
        """Whether nobody will come; ``silent_s``: how long no agent has answered."""
        return silent_s > self.limit_s and os.getppid() != self._parent and not listens(self._shim)


def listens(path: Path) -> bool:
    """Whether a process listens at a Unix socket. Where the table cannot be read: yes, so that nobody ends in error."""
    try:
        lines = _SOCKETS.read_text().splitlines()[1:]
    except OSError:
        return True
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7] == str(path) and int(fields[3], 16) & _ACCEPTS:
            return True
    return False
