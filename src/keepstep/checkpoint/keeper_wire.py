"""Wire: the connection on which one rank's versions go to the buddy's keeper, kept open from one to the next.

A connection and a thread at the other end for each version would take a handshake, a window that begins small, and a
quarter of a millisecond of both keepers' processors (measured over loopback; a bulk costs the same either way). Only a
line whose last transfer ended well is kept: on any other one words may be owed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from keepstep.checkpoint.exceptions import PeerUnreachable
from keepstep.checkpoint.line import CONNECT_S, SILENCE_S, Line
from keepstep.checkpoint.peers import Put, hear_answer


class Wire:
    """At most one connection; for one thread."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._where: tuple[str, int] | None = None
        self._stop: Callable[[], bool] = lambda: False

    @contextlib.contextmanager
    def carry(self, where: tuple[str, int], put: Put, stop: Callable[[], bool]) -> Iterator[Line]:
        """A line on which the keeper at ``where`` has agreed to ``put``; whatever goes wrong in the block closes it.

        Args:
            stop: true when there is something more urgent; any wait then ends with ``PeerUnreachable``.

        Raises:
            PeerRefused: the keeper does not want it.
            PeerUnreachable: there is no connection, or it broke.
        """
        self._stop = stop
        try:
            yield self._kept(where, put) or self._fresh(where, put)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = self._where = None

    def _kept(self, where: tuple[str, int], put: Put) -> Line | None:
        """The line of the last transfer, if the other end still listens there: it may have ended or lost us since."""
        if self._line is None:
            return None
        if self._where == where and not self._line.idle(0):
            try:
                self._line.say(put)
                hear_answer(self._line, patience_s=CONNECT_S)
            except PeerUnreachable:
                if self._stop():
                    raise
            else:
                return self._line
        self.close()
        return None

    def _fresh(self, where: tuple[str, int], put: Put) -> Line:
        self._line, self._where = Line.dial(*where, lambda: self._stop()), where
        self._line.say(put)
        hear_answer(self._line, patience_s=SILENCE_S)
        return self._line
