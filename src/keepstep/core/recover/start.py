"""Start: gather nodes, then open the first epoch."""

from __future__ import annotations

from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft
from keepstep.core.recover import rosters
from keepstep.core.recover.act import enter
from keepstep.core.recover.end import fail_start, give_up
from keepstep.core.state import Job, Node
from keepstep.model.exits import PREFLIGHT, REQUEUE
from keepstep.model.ids import next_major


def candidates(job: Job) -> list[Node]:
    """Connected nodes that did not ask to be a standby, in the order of their ranks."""
    return rosters.first_order([n for n in job.nodes.values() if n.link == "up" and not n.wants_standby])


def try_start(draft: Draft, *, last_call: bool = False) -> None:
    """Start when enough nodes are there: all that were asked for, or the minimum after the last call."""
    job = draft.job
    if job.state != "PENDING":
        return
    spec = job.spec
    nodes = candidates(job)
    if len(nodes) < spec.min_nodes:
        draft.clear(deadlines.LAST_CALL)
        return
    waited = last_call or deadlines.STORE in job.deadlines  # the last call is over once
    if len(nodes) < spec.max_nodes and not waited:
        draft.wake_once(deadlines.LAST_CALL, spec.last_call_s)
        return
    nodes = nodes[: spec.max_nodes]
    picked = rosters.pick_store(job, [node.node for node in nodes])
    if picked is None:
        draft.clear(deadlines.LAST_CALL)
        draft.wake_once(deadlines.STORE, draft.policy.rebuild_s)
        return
    roster = rosters.anew(job, nodes, picked[1], next_major(job.epoch), mode="fresh", attempt=0)
    draft.clear(deadlines.JOIN, deadlines.LAST_CALL)
    draft.move_job("STARTING", f"{len(nodes)} of {spec.min_nodes} to {spec.max_nodes} nodes are here")
    enter(draft, roster)


def join_time_is_over(draft: Draft) -> None:
    job = draft.job
    here = len(candidates(job))
    if job.state != "PENDING" or here >= job.spec.min_nodes:
        return
    why = (
        f"{here} of at least {job.spec.min_nodes} nodes connected within {job.spec.join_timeout_s:g} s; start the "
        "missing ones, or lower the first number of --nnodes, or raise join_timeout in --rdzv-conf"
    )
    fail_start(draft, PREFLIGHT, why)


def store_time_is_over(draft: Draft) -> None:
    """No store anywhere: the nodes cannot even fork one."""
    job = draft.job
    why = f"no node offered a rendezvous store within {draft.policy.rebuild_s:g} s; see the agents' logs"
    if job.state == "PENDING":
        fail_start(draft, REQUEUE, why)
    elif job.state == "WAITING" and job.incident is not None:
        give_up(draft, REQUEUE, why)
