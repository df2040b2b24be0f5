"""The situation: what of a job's state the ladder needs to know, gathered in one value."""

from __future__ import annotations

from keepstep.core.decide.budgets import budget, came_back, fault_class
from keepstep.core.decide.ladder import LADDER, Situation
from keepstep.core.decide.proposals import covering, held_now, leaving
from keepstep.core.draft import nanos
from keepstep.core.health.machine import USABLE
from keepstep.core.state import Incident, Job, Node, seat_key
from keepstep.model.exits import of_worker
from keepstep.model.ids import Nanos, NodeId, Rank
from keepstep.model.records import Rung
from keepstep.model.settings import Policy


def vacant_ranks(job: Job) -> tuple[Rank, ...]:
    """Ranks of the present roster whose process is gone, or is to be killed, or ran on a lost node."""
    assert job.roster is not None
    gone = {place.node for place in job.roster.places if (node := job.nodes.get(place.node)) is None or node.lost}
    return tuple(
        member.rank
        for member in job.roster.members
        if member.node in gone
        or (key := seat_key(member.node, member.slot)) in job.exits
        or key in job.condemned
    )  # fmt: skip


def lost_nodes(job: Job) -> tuple[NodeId, ...]:
    assert job.roster is not None
    return tuple(p.node for p in job.roster.places if (node := job.nodes.get(p.node)) is None or node.lost)


def spare_nodes(job: Job) -> list[Node]:
    """Connected nodes outside of the roster that may take ranks: healthy ones first, then those with warm processes."""
    parked: dict[NodeId, int] = {}
    for standby in job.standbys.values():
        if standby.state == "SLEEPING":
            parked[standby.node] = parked.get(standby.node, 0) + 1
    spares = [
        node
        for node in job.nodes.values()
        if node.link == "up" and node.health in USABLE and not job.in_roster(node.node)
    ]
    return sorted(spares, key=lambda n: (n.health != "HEALTHY", -parked.get(n.node, 0), n.arrival))


def repeat_offender(job: Job, incident: Incident, now: Nanos, policy: Policy) -> NodeId | None:
    """The blamed node, when its own words prove it broken, its processes failed too often lately, or no attempt on it
    led to a new step."""
    blamed = incident.leave or incident.node
    node = job.nodes.get(blamed) if blamed else None
    if node is None or node.lost or not job.in_roster(node.node) or came_back(incident):
        return None
    if incident.leave:
        return node.node
    recent = [at for at in node.faults if at > now - nanos(policy.node_fault_window_s)]
    often = len(recent) >= policy.node_faults_to_suspect
    return node.node if often or incident.attempts >= budget(incident, policy).retries else None


def survey(job: Job, now: Nanos, policy: Policy, *, floor: Rung = "in_process", no_capacity: bool = False) -> Situation:
    """Gather the situation of the open incident."""
    incident, roster = job.incident, job.roster
    assert incident is not None
    assert roster is not None
    if job.cannot or (job.refused and incident.attempts >= policy.in_process_budget):
        floor = max(floor, "restart_job", key=LADDER.index)
    if incident.planned:
        floor = max(floor, incident.planned, key=LADDER.index)
    nobody = not incident.suspects and incident.attempts and not vacant_ranks(job)
    if nobody and fault_class(incident) not in ("network", "storage"):
        floor = max(floor, "restart_job", key=LADDER.index)
    limit, again = budget(incident, policy), came_back(incident)
    vacant, lost = vacant_ranks(job), lost_nodes(job)
    free = _parked_per_node(job)
    for rank in vacant:
        free[roster.members[rank].node] = free.get(roster.members[rank].node, 0) - 1
    left = [p for p in roster.places if p.node not in lost]
    spares = len(spare_nodes(job))
    evict, kept = _evictions(job, incident, now, policy, spares - len(lost))
    stateless = job.level == 0 or not job.trained
    mine = [fault for fault in job.user_faults if fault.incident == incident.id]
    last = job.user_faults[-1] if job.user_faults and mine else None
    return Situation(
        level=job.level,
        settled=job.settled,
        ending=bool(job.done or job.clean),
        category=incident.category,
        floor=floor,
        attempts=incident.attempts,
        in_process_budget=limit.retries,
        budget_name=limit.name,
        again=again,
        vacant=vacant,
        parked=all(free[roster.members[rank].node] >= 0 for rank in vacant),
        lost=lost,
        evict=evict,
        kept=kept,
        broken=incident.leave is not None and repeat_offender(job, incident, now, policy) == incident.leave,
        spares=spares,
        nodes_replaced=incident.nodes_replaced,
        replace_node_budget=policy.replace_node_budget,
        smaller=stateless and len(left) >= job.spec.min_nodes,
        no_capacity=no_capacity,
        restarts=job.attempt,
        max_restarts=job.spec.max_restarts,
        user_faults=incident.user_faults,
        user_retries=min(job.spec.user_retries, limit.retries),
        repeated=_repeated(job, incident),
        signature=last.signature if last else "the same exit",
        worker_code=_worker_code(job, incident),
        culprit=incident.reason or "nobody is to blame",
    )


def _evictions(job: Job, incident: Incident, now: Nanos, policy: Policy, spares: int) -> tuple[tuple[NodeId, ...], str]:
    """Which living nodes go with the next epoch, and why one that is to blame does not."""
    going = leaving(job, now, policy)
    if incident.category in ("user_code", "data"):
        return (), ""
    if going and incident.nodes_replaced >= policy.replace_node_budget:
        return (), f"replace_node_budget {policy.replace_node_budget} is used up"
    if going[: max(spares, 0)]:
        return going[:spares], ""
    if going:
        return (), "no spare node is connected"
    blamed = repeat_offender(job, incident, now, policy)
    if blamed is None or (one := covering(job, (blamed,))) is None:
        return (), ""
    why = held_now(job, one, now, policy) or "its state has no copy elsewhere"
    return (), f"node {blamed} is to blame, but {why} ({one.id})"


def _parked_per_node(job: Job) -> dict[NodeId, int]:
    free: dict[NodeId, int] = {}
    for standby in job.standbys.values():
        if standby.state == "SLEEPING":
            free[standby.node] = free.get(standby.node, 0) + 1
    return free


def _repeated(job: Job, incident: Incident) -> bool:
    """The same exception at the same step again; without a known step only within one incident."""
    if not job.user_faults or job.user_faults[-1].incident != incident.id:
        return False
    last = job.user_faults[-1]
    return any(
        fault.signature == last.signature
        and fault.step == last.step
        and (fault.step is not None or fault.incident == last.incident)
        for fault in job.user_faults[:-1]
    )


def _worker_code(job: Job, incident: Incident) -> int:
    """The culprit's code, else that of the first rank that failed; 1 when nobody had one."""
    assert job.roster is not None
    exits = [fact for key, fact in job.exits.items() if key in job.seats and fact.code != 0]
    blamed = [fact for fact in exits if fact.rank in incident.suspects]
    for fact in blamed or exits:
        return of_worker(fact.code, fact.signal)
    return 1
