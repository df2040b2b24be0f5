"""Ending: at level 1 the ranks leave when the last generation is complete, or when it is known that it never will be.

The node of rank 0 completes a generation when the parts of all nodes are there. A part that another node could not
write never comes, and only that node knows. So each node, once its own archiver has ended, looks whether its parts are
there, and says so to all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from keepstep.checkpoint import catalog
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.model.topology import fold_ranks
from keepstep.trainer.exchange_torch import gather

ASK_EVERY_S = 0.5
SAY_EVERY_S = 5.0
"""How often the terminal hears what the end of the run waits for."""


class Ending:
    """One rank's part in the end of a run.

    Args:
        finish: hands over the last step and waits until this node's archiver has ended; as ``Attended.finish``.
        lost: ranks of this node whose part is known never to come, once ``finish`` is over.
        say: told what is waited for; silent on all ranks but one.
    """

    def __init__(
        self,
        finish: Callable[[], bool | None],
        lost: Callable[[], Sequence[int]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finish, self._lost, self._say, self._clock = finish, lost, say, clock
        self._done = threading.Event()
        self._whole: bool | None = None

    def run(self) -> tuple[bool | None, tuple[int, ...]]:
        """Until all nodes are through, or one has said that it cannot be. Collective.

        Returns:
            What ``finish`` came to, ``None`` where it was not waited for to the end; and the ranks without a part.
        """
        threading.Thread(target=self._work, name="keepstep-ending", daemon=True).start()
        began = said = self._clock()
        while True:
            over = self._done.wait(ASK_EVERY_S)
            rows = gather([over, list(self._lost()) if over else []])
            lost = tuple(sorted(rank for _, ranks in rows for rank in ranks))
            waiting = [rank for rank, (done, _) in enumerate(rows) if not done]
            if lost or not waiting:
                return (self._whole if over else None), lost
            now = self._clock()
            if now - said >= SAY_EVERY_S:
                said = now
                self._say(f"{now - began:.0f} s so far; rank {fold_ranks(waiting)} not through yet")

    def _work(self) -> None:
        try:
            self._whole = self._finish()
        finally:
            self._done.set()


def lost_parts(url: str, version: Version, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` whose part of the shared tier is not there, as far as this node can see."""
    try:
        found = catalog.look(open_tier(url, "remote", budget_s=0), version)
    except CheckpointError:
        return list(ranks)
    return [] if found.complete else sorted(set(ranks) - set(found.ranks))
