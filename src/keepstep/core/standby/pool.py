"""The pool: how many warm processes each node keeps, and the books about them."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.core.health.machine import USABLE
from keepstep.core.state import Job, Node, seat_key
from keepstep.model.actions import KeepStandbys
from keepstep.model.facts import AgentJoined, StandbyGone, StandbyReady, WorkerExited
from keepstep.model.ids import action_id
from keepstep.model.records import StandbyState


def wanted(job: Job, node: Node) -> int:
    """Spares for single processes on the job's nodes, a whole node's worth on the others."""
    if job.in_roster(node.node):
        return job.spec.standbys
    return job.spec.nproc_per_node


def order_standbys(draft: Draft) -> None:
    """Tell each usable node how many standbys to keep, where that differs from what it was told last.

    Never before a worker has called ``keepstep.init``: a standby runs the user's script up to that call, and a
    script without it would run to its end.
    """
    job = draft.job
    if job.level == 0 or job.over or job.roster is None:
        return
    for node in list(job.nodes.values()):
        count = wanted(job, node)
        if node.link == "up" and node.health in USABLE and job.standby_orders.get(node.node, 0) != count:
            id_ = action_id(job.id, f"standbys-{node.node}", job.order_count)
            draft.order(KeepStandbys(id=id_, job=job.id, epoch=job.epoch, node=node.node, count=count))


def standby_ready(draft: Draft, fact: StandbyReady) -> None:
    job = draft.job
    if job.rank_at(fact.node, fact.slot) is None and seat_key(fact.node, fact.slot) not in job.standbys:
        draft.move_standby(fact.node, fact.slot, "SLEEPING", "parked in keepstep.init")


def standby_gone(draft: Draft, fact: StandbyGone | WorkerExited) -> None:
    """A warm process ended; as a worker, when an order that is void by now had given it a rank."""
    why = fact.why if isinstance(fact, StandbyGone) else "its process ended"
    if seat_key(fact.node, fact.slot) in draft.job.standbys:
        draft.move_standby(fact.node, fact.slot, "GONE", why)


def sync_with_agent(draft: Draft, fact: AgentJoined) -> None:
    """Believe the agent about which standbys it has."""
    job = draft.job
    parked = {state.slot for state in fact.slots if state.role == "standby" and state.parked}
    for standby in list(job.standbys.values()):
        if standby.node == fact.node and standby.state == "SLEEPING" and standby.slot not in parked:
            draft.move_standby(fact.node, standby.slot, "GONE", "its agent came back without it")
    for slot in sorted(parked):
        if job.rank_at(fact.node, slot) is None and seat_key(fact.node, slot) not in job.standbys:
            draft.move_standby(fact.node, slot, "SLEEPING", "its agent found it parked")


def seat_standbys(draft: Draft) -> None:
    """After an epoch was opened: standbys that hold a seat wake up, those that lost one are gone."""
    job = draft.job
    for key, standby in list(job.standbys.items()):
        if standby.state == "SLEEPING" and key in job.seats:
            draft.move_standby(standby.node, standby.slot, "WAKING", f"takes rank {job.seats[key]}")
        elif standby.state == "WAKING" and key not in job.seats:
            draft.move_standby(standby.node, standby.slot, "GONE", "its seat went to another process")


def forget_node(draft: Draft, node: Node, why: str) -> None:
    """Standbys of a node that is out of reach are of no use to anybody."""
    for standby in list(draft.job.standbys.values()):
        if standby.node == node.node:
            draft.move_standby(standby.node, standby.slot, "GONE", why)


def retire_standbys(draft: Draft, node: Node) -> None:
    """A living node that is taken out keeps none: what is parked there ends, and comes anew when it is used again."""
    forget_node(draft, node, "its node is quarantined")
    if draft.job.level and node.link == "up":
        id_ = action_id(draft.job.id, f"standbys-{node.node}", draft.job.order_count)
        draft.order(KeepStandbys(id=id_, job=draft.job.id, epoch=draft.job.epoch, node=node.node, count=0))


def arrived(draft: Draft, key: str, to: StandbyState = "ACTIVE") -> None:
    """A former standby's rank has resumed."""
    standby = draft.job.standbys.get(key)
    if standby is not None and standby.state == "WAKING":
        draft.move_standby(standby.node, standby.slot, to, "its rank has resumed")
