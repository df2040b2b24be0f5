"""Leases: agents come, go silent, and come back. A broken connection alone proves nothing about the processes."""

from __future__ import annotations

from keepstep.core.detect import deadlines
from keepstep.core.draft import SECOND, Draft
from keepstep.core.locate.assess import assess, retry
from keepstep.core.locate.faults import Fault
from keepstep.core.recover.act import answer, order_join
from keepstep.core.recover.end import end_by_request, repeat_stop, stop_code
from keepstep.core.recover.rosters import cold_slot
from keepstep.core.recover.start import try_start
from keepstep.core.standby.pool import forget_node, order_standbys, sync_with_agent
from keepstep.core.state import Node, seat_key
from keepstep.model.facts import AgentDisconnected, AgentJoined, AgentLeft, LeaseExpired, LeaseRenewed
from keepstep.model.ids import Nanos, NodeId
from keepstep.model.topology import Member

_PROGRESS = (deadlines.REBUILD, deadlines.VERIFY, deadlines.EXPLAIN)


def agent_joined(draft: Draft, fact: AgentJoined) -> None:
    """An agent is (back) here: reconcile what it has with what we believe it has."""
    job = draft.job
    if job.over:
        repeat_stop(draft, fact.node)
        return
    _back(draft, fact.node, "its agent is connected")
    sync_with_agent(draft, fact)
    try_start(draft)
    if job.roster is None:
        return
    if fact.epoch > job.epoch:
        draft.wake_once(deadlines.ADOPT, draft.policy.lease_s)
    else:
        _reconcile(draft, fact)
    order_standbys(draft)
    retry(draft)
    assess(draft)


def _reconcile(draft: Draft, fact: AgentJoined) -> None:
    """Fence what has no seat; give reports of what is missing time to follow."""
    job = draft.job
    strays = [s for s in fact.slots if s.role == "worker" and job.rank_at(fact.node, s.slot) is None]
    if strays or (job.in_roster(fact.node) and fact.epoch < job.epoch):
        order_join(draft, fact.node)
    if missing_seats(draft, fact.node):
        draft.wake(deadlines.reconcile(fact.node), draft.policy.explain_s)
    for name in _PROGRESS:  # what the agent kept while it could not reach us comes right behind
        due = job.deadlines.get(name)
        if due is not None and due < draft.now + draft.policy.explain_s * SECOND:
            draft.wake(name, draft.policy.explain_s)


def missing_seats(draft: Draft, name: NodeId) -> list[Member]:
    """Seats whose process the node's agent should have and does not, without any exit reported.

    A process that the present epoch's Join is still to start is not missed.
    """
    job = draft.job
    node = job.nodes.get(name)
    if job.roster is None or node is None:
        return []
    have = {state.slot for state in node.slots}
    return [
        seat
        for seat in job.roster.seats_on(name)
        if seat.slot not in have
        and (name in job.started or seat.slot != cold_slot(seat.rank, job.epoch))
        and (key := seat_key(seat.node, seat.slot)) not in job.exits
        and key not in job.condemned
    ]


def reconcile_time_is_over(draft: Draft, name: NodeId) -> None:
    """No report explains why these processes are not there: they are gone, and nobody saw how."""
    job = draft.job
    seats = missing_seats(draft, name)
    if not seats:
        retry(draft)
    if not seats or job.over or job.ahead() > job.epoch or job.nodes[name].link != "up":
        return
    ranks = tuple(seat.rank for seat in seats)
    reason = f"node {name}'s agent came back without the process of rank {', '.join(map(str, ranks))}"
    fault = Fault(
        key=seat_key(seats[0].node, seats[0].slot),
        title=reason,
        category="infrastructure",
        node=name,
        ranks=ranks,
        probability=0.8,
        reason=reason,
        evidence=(reason,),
        onset=Nanos(job.nodes[name].since),
        kill=ranks,
    )
    answer(draft, [fault])


def agent_disconnected(draft: Draft, fact: AgentDisconnected) -> None:
    """Maybe only the agent, maybe the node: ask the survivors' collectives, and the lease."""
    job = draft.job
    node = job.nodes.get(fact.node)
    if job.over or node is None or node.link != ("away" if fact.ours else "broken"):
        return
    if not fact.ours:
        if node.health in ("HEALTHY", "PROBATION"):
            draft.move_node(node.node, "SUSPECT", f"its connection broke: {fact.why}")
        if job.in_roster(node.node):
            draft.wake_once(deadlines.reconnect(node.node), draft.policy.reconnect_s)
    assess(draft)


def lease_expired(draft: Draft, fact: LeaseExpired) -> None:
    node = draft.job.nodes.get(fact.node)
    if node is not None:
        _gone(draft, node, f"silent for {fact.silent_s:.1f} s")


def agent_left(draft: Draft, fact: AgentLeft) -> None:
    """In good order: whoever started it wanted it to end. The last one to leave ends the job.

    A scheduler that ends a job signals all its launchers, but they do not all leave in the same instant. So one that
    leaves proves nothing about the others until these have had ``leave_s`` to follow.
    """
    job = draft.job
    node = job.nodes.get(fact.node)
    if node is None or job.over:
        return
    if all(other.link == "left" or other.link == "expired" for other in job.nodes.values()):
        end_by_request(draft, f"all nodes have left, the last one because: {fact.why}", stop_code(fact.why))
        return
    if job.in_roster(node.node):
        draft.wake(deadlines.LEAVE, draft.policy.leave_s)
    _gone(draft, node, f"its agent left: {fact.why}")


def _gone(draft: Draft, node: Node, why: str) -> None:
    job = draft.job
    if job.over:
        return
    draft.clear(deadlines.reconnect(node.node), deadlines.reconcile(node.node))
    assess(draft)  # a node of the roster with live ranks is a fault
    if node.node in job.nodes and job.nodes[node.node].health != "QUARANTINED":
        draft.move_node(node.node, "QUARANTINED", why)
        forget_node(draft, job.nodes[node.node], "its node is out of reach")


def lease_renewed(draft: Draft, fact: LeaseRenewed) -> None:
    """Silence is over and the connection is the old one: its processes were never touched."""
    node = draft.job.nodes.get(fact.node)
    if draft.job.over or node is None or node.link != "up":
        return  # over a new connection its agent says first what it has
    _back(draft, fact.node, "it speaks again")
    order_standbys(draft)
    retry(draft)
    assess(draft)


def _back(draft: Draft, name: NodeId, why: str) -> None:
    node = draft.job.nodes[name]
    draft.clear(deadlines.reconnect(name))
    if node.health == "SUSPECT":
        draft.move_node(name, "HEALTHY", why)
    elif node.health == "QUARANTINED" and not node.faulty:
        draft.move_node(name, "PROBATION", why)
