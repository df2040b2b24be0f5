"""Blocking work on a thread of its own, so that the one who needs it can walk away.

Connecting to peers blocks in native code for as long as a peer is missing. The main thread therefore sends an
errand and waits for the first of: done, told to stop, out of time. A thread that was walked away from ends when
its native call does; until then it is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_ABANDONED: Final = 32
"""Abandoned threads that may be alive at once; more means that something else is badly wrong."""


class TooManyErrands(RuntimeError):
    """Too many abandoned threads are still stuck in native calls."""


class Errand(Generic[T]):
    """One call on its own daemon thread.

    Args:
        call: what to do; may block.
        bell: notified when the call is over. Whoever rings it for another reason makes the waiter look again.
        discard: what to do with a result that nobody waits for any more.
    """

    _abandoned: Final[list[threading.Thread]] = []

    def __init__(self, call: Callable[[], T], *, bell: threading.Condition, discard: Callable[[T], None]) -> None:
        self._call = call
        self._bell = bell
        self._discard = discard
        self._done = False
        self._left = False
        self._result: T | None = None
        self._error: BaseException | None = None
        if self.abandoned() >= MAX_ABANDONED:
            raise TooManyErrands(
                f"{MAX_ABANDONED} abandoned connection attempts are still stuck in native code; restart the process"
            )
        self._thread = threading.Thread(target=self._run, name="ks-errand", daemon=True)
        self._thread.start()

    @classmethod
    def abandoned(cls) -> int:
        """How many threads that were walked away from are still alive."""
        cls._abandoned[:] = [t for t in cls._abandoned if t.is_alive()]
        return len(cls._abandoned)

    def wait(self, *, limit_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until done (True), or until ``stop()`` or the limit (False: the errand has been abandoned)."""
        deadline = time.monotonic() + limit_s
        with self._bell:
            while not self._done:
                left = deadline - time.monotonic()
                if stop() or left <= 0:
                    self._left = True
                    self._abandoned.append(self._thread)
                    return False
                self._bell.wait(left)
        return True

    def result(self) -> T:
        """What the call returned; raises what it raised."""
        assert self._done
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._call()
        except BaseException as caught:
            error = caught
        with self._bell:
            left = self._left
            if not left:
                self._result, self._error, self._done = result, error, True
            self._bell.notify_all()
        if left and error is None:
            self._discard(result)  # type: ignore[arg-type]
