"""Boundary: what an agent waits for when nodes are swapped although nothing is broken (``Roster.boundary_s``).

Ranks that leave finish their step first, and its copy goes to the buddy node, where the successor will look for it.
Keepers fence off whoever still speaks for an older roster; so those of nodes that stay hear of the new one only when
its ranks have their state.
"""

from __future__ import annotations

import asyncio
import time

from keepstep.agent.beats import phase_of, read_beat
from keepstep.agent.node import Node
from keepstep.model.beat import Phase, Word
from keepstep.model.ids import SlotId
from keepstep.model.topology import Roster

LOOK_EVERY_S = 0.01
COPY_S = 1.0
"""After the last commit, how long this node's keeper has to bring the copy of it to another node."""
REBUILD_S = 60.0
"""How long ranks may take to enter the epoch before the keeper is told all the same."""


async def committed(node: Node, *, limit_s: float) -> None:
    """Until each worker of this node has committed one more step, or has no other to wait for; and its copy has left.

    Args:
        limit_s: how long that may take; a step that is not done then is given up.
    """
    end = time.monotonic() + limit_s
    before = {slot.id: _step(node, slot.id) for slot in node.table.workers()}
    while time.monotonic() < end:
        if not any(s.alive() and before.get(s.id) == _step(node, s.id) for s in node.table.workers()):
            await asyncio.sleep(min(COPY_S, max(0.0, end - time.monotonic())))
            return
        await asyncio.sleep(LOOK_EVERY_S)


async def entered(node: Node, roster: Roster) -> None:
    """Tell the keeper of the roster as soon as a rank of this node has its state in it, or none ever will."""
    end = time.monotonic() + roster.boundary_s + REBUILD_S
    while time.monotonic() < end and node.roster is roster and roster.seats_on(node.id):
        if any(slot.resumed >= roster.epoch for slot in node.table.workers()):
            break
        await asyncio.sleep(LOOK_EVERY_S)
    node.tell_keeper()


def _step(node: Node, slot: SlotId) -> int:
    """Committed steps; -1 once a collective of it has broken, since the others have left then."""
    words = read_beat(node.dir, slot)
    if words is None:
        return 0
    return -1 if phase_of(words) is Phase.RECOVERING else words[Word.STEP]
