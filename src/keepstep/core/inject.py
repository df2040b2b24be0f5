"""Inject: faults that a person asked for, only where the job was started with ``--allow-inject``."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.core.state import Job
from keepstep.model.actions import InjectFault
from keepstep.model.facts import InjectRequested
from keepstep.model.ids import NodeId, action_id


def inject(draft: Draft, fact: InjectRequested) -> None:
    """Order the fault, or note why not. The loss of the controller is its shell's to carry out."""
    job = draft.job
    if why := refusal(job, fact):
        draft.note(f"injection of {fact.fault} asked for by {fact.by} is refused: {why}")
        return
    if fact.fault == "controller-loss":
        draft.note(f"{fact.by} asked for the loss of the controller")
        return
    node = target(job, fact)
    assert node is not None
    draft.order(
        InjectFault(
            id=action_id(job.id, f"inject-{fact.fault}-{node}", fact.number or job.order_count),
            job=job.id,
            epoch=job.epoch,
            node=node,
            fault=fact.fault,
            rank=fact.rank,
            seconds=fact.seconds,
        )
    )


def refusal(job: Job, fact: InjectRequested) -> str:
    """Why this request is refused; empty when it is granted."""
    if not job.spec.allow_inject:
        return f"job {job.id} was not started with --allow-inject"
    if job.over or job.roster is None:
        return f"job {job.id} is {job.state}"
    if fact.fault == "controller-loss":
        return ""
    if fact.rank is not None and not 0 <= fact.rank < job.roster.world_size:
        return f"there is no rank {fact.rank}; the world has {job.roster.world_size} ranks"
    if fact.target is not None and fact.target not in job.nodes:
        return f"there is no node {fact.target}; the nodes are {', '.join(job.nodes)}"
    if fact.fault in ("kill", "freeze", "exception", "slow") and fact.rank is None:
        return f"{fact.fault} needs a rank (--rank)"
    if target(job, fact) is None:
        return f"{fact.fault} needs a rank (--rank) or a node (--node)"
    return ""


def target(job: Job, fact: InjectRequested) -> NodeId | None:
    """The node that is to carry it out; a lost store is by default the one of the present epoch."""
    roster = job.roster
    assert roster is not None
    if fact.rank is not None:
        return job.seat_of(fact.rank).node
    if fact.target is not None:
        return fact.target
    if fact.fault == "store-loss":
        return job.store_node
    return None
