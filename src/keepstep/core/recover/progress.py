"""Progress: ranks resume, advance and finish; the incident closes when all of them have."""

from __future__ import annotations

from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft
from keepstep.core.recover.end import finish
from keepstep.core.recover.measure import resolve
from keepstep.core.standby.pool import arrived, order_standbys
from keepstep.core.state import seat_key
from keepstep.model.ids import Rank


def rank_resumed(draft: Draft, rank: Rank) -> None:
    job = draft.job
    if job.roster is not None and rank < job.roster.world_size:
        seat = job.seat_of(rank)
        arrived(draft, seat_key(seat.node, seat.slot))
    check_progress(draft)


def check_progress(draft: Draft) -> None:
    """Take every step that the ranks' reports allow by now."""
    job = draft.job
    roster = job.roster
    if roster is None or job.over:
        return
    if job.clean == roster.world_size:
        finish(draft)
        return
    if job.level == 0:
        _level_0(draft, len(roster.places))
        return
    if job.resumed == roster.world_size:
        draft.clear(deadlines.REBUILD, deadlines.SETTLE)
        incident = job.incident
        if incident is None:
            if job.state == "STARTING":
                draft.move_job("RUNNING", "every rank trains")
        elif incident.state == "RECOVERING":
            draft.move_incident("VERIFYING", "every rank has resumed")
            draft.wake(deadlines.VERIFY, draft.policy.verify_s)
    if job.advanced == roster.world_size and job.incident is not None and job.incident.state == "VERIFYING":
        _resolve(draft, "every rank has done a new step")


def _level_0(draft: Draft, nodes: int) -> None:
    """Without the SDK a process that runs is all there is to see."""
    job = draft.job
    if len(job.started) < nodes:
        return
    if job.incident is None:
        if job.state == "STARTING":
            draft.move_job("RUNNING", "every process runs")
    elif job.incident.state == "RECOVERING":
        draft.move_incident("VERIFYING", "every process runs")
        draft.wake(deadlines.SETTLE, draft.policy.settle_s)


def settled(draft: Draft) -> None:
    """``settle_s`` after a restart without the SDK. If it attached meanwhile, its own reports decide."""
    job = draft.job
    if job.level == 0 and job.incident is not None and job.incident.state == "VERIFYING":
        _resolve(draft, f"every process has lived for {draft.policy.settle_s:g} s")


def _resolve(draft: Draft, why: str) -> None:
    job = draft.job
    resolve(draft, why)
    draft.clear(deadlines.VERIFY, deadlines.SETTLE)
    draft.move_job("RUNNING", why)
    for node in list(job.nodes.values()):
        if node.health == "PROBATION" and job.in_roster(node.node):
            draft.move_node(node.node, "HEALTHY", "ranks on it have trained since")
    order_standbys(draft)
