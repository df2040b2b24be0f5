"""Restores: state that arrives is progress, however long it takes; state that has stopped to arrive is none.

How long a restore takes depends on the size of the state and on the storage, so no fixed time fits. The rebuild's
deadline therefore counts from the last bytes that arrived anywhere.
"""

from __future__ import annotations

from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft, nanos
from keepstep.core.state import Job
from keepstep.model.facts import RestoreMoved
from keepstep.model.ids import Rank

AHEAD = 0.25
"""Share of ``rebuild_s`` that is given on top: a thousand nodes that all report their bytes must not set the deadline a
thousand times."""


def restore_moved(draft: Draft, fact: RestoreMoved) -> None:
    """Everybody waits for the slowest: the whole rebuild gets at least ``rebuild_s`` from now."""
    job = draft.job
    due = job.deadlines.get(deadlines.REBUILD)
    if due is None or job.restoring.get(fact.node) is not fact:
        return
    patience_s = draft.policy.rebuild_s
    if draft.now + nanos(patience_s) > due:
        draft.wake(deadlines.REBUILD, patience_s * (1 + AHEAD))


def standing(job: Job) -> list[Rank]:
    """Ranks that had begun to bring their state, by the last word of their nodes, and are still at it."""
    found = {rank for fact in job.restoring.values() for rank in fact.ranks}
    return sorted(rank for rank in found if not ((seen := job.progress.get(rank)) and seen.resumed))
