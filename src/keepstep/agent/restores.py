"""Restores, as the agent sees them: while bytes arrive in a rank's memory, the controller hears of it.

Heartbeats stay in memory and only transitions reach the log, so a node says this every few seconds at most, for all
of its ranks at once, and not at all where a restore is done before the first look.
"""

from __future__ import annotations

import asyncio

from keepstep.agent.beats import phase_of, read_beat
from keepstep.agent.node import Node
from keepstep.model.beat import Phase, Word
from keepstep.model.facts import RestoreMoved
from keepstep.model.ids import Epoch, Rank

LOOK_EVERY_S = 5.0
"""Between two looks at the ranks of this node; far below ``rebuild_s``, which starts again with each report."""


class Restores:
    """Looks whether or not hangs are looked for: without these reports a long restore would end at a deadline."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._told: tuple[Epoch, tuple[Rank, ...], int] | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Report the newest epoch's restores, if anything has moved in them since the last report."""
        epoch, ranks, total = Epoch(0), list[Rank](), 0
        for slot in self._node.table:
            if slot.role != "worker" or not slot.pid or slot.rank is None:
                continue
            words = read_beat(self._node.dir, slot.id)
            if words is None or words[Word.EPOCH] != slot.epoch or phase_of(words) is not Phase.RECOVERING:
                continue
            if slot.epoch > epoch:
                epoch, ranks, total = slot.epoch, [], 0
            if slot.epoch == epoch:
                total += words[Word.ARRIVED]
                if words[Word.RESTORING]:
                    ranks.append(slot.rank)
        seen = epoch, tuple(sorted(ranks)), total
        if total and seen != self._told:
            self._told = seen
            self._node.report(RestoreMoved, epoch=epoch, ranks=seen[1], bytes=total)
