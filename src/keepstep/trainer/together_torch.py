"""Together: work that takes each rank as long as it takes, while all wait for the slowest.

A rank that has nothing to bring would wait in one collective for as long as another one reads, and collectives have
limits of their own (half an hour by default). So the ranks ask each other again and again whether all are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keepstep.trainer.exchange_torch import everybody

ASK_EVERY_S = 20.0
"""How long a rank that still works lets the others wait for its answer; far below any collective's limit."""

T = TypeVar("T")


class Together:
    """Carries out one rank's share beside the questions.

    Args:
        stop: true when the epoch is over.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._broken = False

    def in_vain(self) -> bool:
        """What the work has to ask now and then: nobody waits for it any more."""
        return self._broken or self._stop()

    def run(self, work: Callable[[], T]) -> T:
        """The outcome of ``work``, once all ranks have one. Collective; ``work`` runs in a thread of its own.

        Raises:
            Exception: what the ranks' collective raised, after the work has ended, or what ``work`` itself raised.
        """
        self._broken = False
        share = _Share(work)
        share.start()
        try:
            while not everybody(share.over(ASK_EVERY_S)):
                pass
        except BaseException:
            self._broken = True
            share.join()
            raise
        return share.outcome()


class _Share(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="keepstep-restore", daemon=True)
        self._work = work
        self._found: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error

    def over(self, limit_s: float) -> bool:
        self.join(limit_s)
        return not self.is_alive()

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found[0]
