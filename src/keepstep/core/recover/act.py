"""Act: from evidence to suspects, plan, epoch and orders, all in one decision.

The order of records is the order of thought: who (``SuspectNamed``), what is ended at once (``KillProcess``), what
will be done (``PlanMade``), the fence (``EpochOpened``), and the orders behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from keepstep.core.decide.budgets import budget, came_back
from keepstep.core.decide.ladder import Plan, choose
from keepstep.core.decide.proposals import cleared_before, measure_anew, propose, settle
from keepstep.core.decide.situation import lost_nodes, repeat_offender, spare_nodes, survey, vacant_ranks
from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft, nanos
from keepstep.core.locate.exits import broken_device, by_driver
from keepstep.core.locate.faults import Fault
from keepstep.core.locate.past import alike
from keepstep.core.recover import rosters
from keepstep.core.recover.end import give_up
from keepstep.core.standby.pool import forget_node, order_standbys, retire_standbys, seat_standbys
from keepstep.core.state import Job, Node, seat_key
from keepstep.model.actions import Join, KillProcess
from keepstep.model.ids import Nanos, NodeId, action_id, incident_id, next_major, show_epoch
from keepstep.model.records import EpochOpened, IncidentOpened, PlanMade, Rung, SuspectNamed
from keepstep.model.topology import Roster


def open_incident(draft: Draft, title: str, onset: Nanos) -> None:
    """Open one, unless one is open already: then the new evidence belongs to it."""
    job = draft.job
    if job.incident is None:
        name = incident_id(job.id, job.incident_count + 1)
        draft.emit(IncidentOpened(job=job.id, at=draft.now, incident=name, onset=min(onset, draft.now), title=title))


def answer(draft: Draft, found: Sequence[Fault], *, floor: Rung = "in_process") -> None:
    """Name the suspects of new faults and act on them."""
    assert found, "an answer needs a fault"
    open_incident(draft, found[0].title, min(fault.onset for fault in found))
    for fault in found:
        _name(draft, fault)
    act(draft, floor=floor)


def _name(draft: Draft, fault: Fault) -> None:
    job, incident = draft.job, draft.incident
    if fault.lost and fault.node is not None:
        draft.move_node(fault.node, "QUARANTINED", fault.reason)
        forget_node(draft, job.nodes[fault.node], "its node is out of reach")
    draft.emit(
        SuspectNamed(
            job=job.id,
            at=draft.now,
            incident=incident.id,
            category=fault.category,
            node=fault.node,
            ranks=fault.ranks,
            probability=fault.probability,
            reason=fault.reason,
            evidence=fault.evidence,
            root_cause=fault.root_cause,
            code=fault.code,
            similar=alike(job, fault),
            leave=fault.leave,
            pair=fault.pair,
        )
    )
    for rank in fault.kill:
        seat = job.seat_of(rank)
        id_ = action_id(incident.id, f"kill-{seat.node}-{seat.slot}", incident.attempts)
        if id_ not in job.orders and seat_key(seat.node, seat.slot) not in job.condemned:
            kill = KillProcess(id=id_, job=job.id, epoch=job.epoch, node=seat.node, slot=seat.slot, why=fault.reason)
            draft.order(kill)


def act(draft: Draft, *, floor: Rung = "in_process", no_capacity: bool = False, rested: bool = False) -> None:
    """Choose a rung for the open incident and carry it out, or say what it waits for.

    Args:
        rested: the pause that the budget asks for before this attempt is over.
    """
    _accuse(draft)
    job, incident = draft.job, draft.incident
    plan = choose(survey(job, draft.now, draft.policy, floor=floor, no_capacity=no_capacity))
    if incident.planned != plan.rung or incident.plan != plan.reason:
        draft.emit(
            PlanMade(
                job=job.id,
                at=draft.now,
                incident=incident.id,
                rung=plan.rung,
                attempt=incident.attempts,
                reason=plan.reason,
                rejected=plan.rejected,
                cost_if_wrong=plan.cost_if_wrong,
            )
        )
    _clear_innocent(draft)
    if plan.rung in ("stop", "requeue"):
        give_up(draft, plan.code, plan.reason)
        return
    draft.move_incident("DECIDED", f"attempt {incident.attempts + 1}: {plan.rung}")
    if plan.wait:
        draft.move_job("WAITING", plan.reason)
        draft.wake_once(deadlines.CAPACITY, draft.policy.capacity_s)
        draft.clear(deadlines.STORE, *_EVIDENCE, deadlines.REBUILD, deadlines.VERIFY, deadlines.SETTLE)
        return
    if not rested and plan.rung in ("in_process", "same_node") and _pauses(draft):
        return
    roster = _roster(draft, plan)
    if roster is None:
        draft.move_job("WAITING", "no unused rendezvous store is known; waiting for one")
        draft.wake_once(deadlines.STORE, draft.policy.rebuild_s)
        draft.clear(deadlines.CAPACITY, *_EVIDENCE, deadlines.REBUILD, deadlines.VERIFY, deadlines.SETTLE)
        return
    _drain(draft, plan)
    enter(draft, roster)
    settle(draft)
    draft.move_incident("RECOVERING", f"epoch {show_epoch(roster.epoch)} is open")
    draft.move_job("RECOVERING", plan.reason)
    order_standbys(draft)


_EVIDENCE = (deadlines.LOCATE, deadlines.EXPLAIN, deadlines.PATIENCE)


def _accuse(draft: Draft) -> None:
    """A living node on which processes fail again and again: propose to take it out."""
    job, incident = draft.job, draft.incident
    name = repeat_offender(job, incident, draft.now, draft.policy)
    if name is None:
        _part(draft)
        return
    lately = sum(at > draft.now - nanos(draft.policy.node_fault_window_s) for at in job.nodes[name].faults)
    if incident.leave == name:
        reason = f"node {name} is broken by its own words"
    elif lately >= draft.policy.node_faults_to_suspect:
        reason = f"{lately} processes failed on node {name} within {draft.policy.node_fault_window_s:g} s"
    else:
        reason = f"{incident.attempts} attempts on node {name} led to no new step"
    seats = job.roster.seats_on(name) if job.roster else ()
    propose(
        draft,
        kind="swap",
        nodes=(name,),
        ranks=[seat.rank for seat in seats],
        reason=f"{reason}, the last one: {incident.reason}",
        evidence=incident.evidence,
        probability=incident.probability,
        rejected=("keep the node: its next process would probably fail, too",),
        incident=incident.id,
        testable=not (incident.leave == name and _proven(job, name)) and not cleared_before(job, name),
    )


def _proven(job: Job, name: NodeId) -> bool:
    """Whether more than words speak against a node: an error of its driver or NCCL, a signal."""
    exits = [fact for key, fact in job.exits.items() if key in job.seats and fact.node == name]
    return any(map(by_driver, exits)) or any(
        fact.node == name and broken_device(fact.error) for fact in job.broken.values()
    )


def _part(draft: Draft) -> None:
    """Two nodes did not reach each other in an attempt with both: without either of them the link is not needed."""
    job, incident = draft.job, draft.incident
    if not (incident.pair and incident.attempts and all(job.in_roster(name) for name in incident.pair)):
        return
    going = next((name for name in incident.pair if name != job.store_node), incident.pair[0])
    seats = job.roster.seats_on(going) if job.roster else ()
    propose(
        draft,
        kind="swap",
        nodes=(going,),
        ranks=[seat.rank for seat in seats],
        reason=f"nodes {' and '.join(incident.pair)} still do not reach each other after attempt {incident.attempts}; "
        f"whichever of them is at fault, without {going} nobody needs that link",
        evidence=incident.evidence,
        probability=0.5,
        rejected=(f"keep both: attempt {incident.attempts} with both led to no new step",),
        incident=incident.id,
        testable=not cleared_before(job, going),
    )


def _pauses(draft: Draft) -> bool:
    """Whether the network or the storage is given a moment before it is tried again."""
    incident = draft.incident
    limit = budget(incident, draft.policy)
    wait_s = limit.pause(incident.attempts)
    if not wait_s or lost_nodes(draft.job):
        return False
    if deadlines.PAUSE in draft.job.deadlines:
        return True
    draft.wake(deadlines.PAUSE, wait_s)
    draft.move_job("WAITING", f"a pause of {wait_s:g} s before attempt {incident.attempts + 1}: {limit.fault} fault")
    draft.clear(deadlines.CAPACITY, deadlines.STORE, *_EVIDENCE, deadlines.REBUILD, deadlines.VERIFY, deadlines.SETTLE)
    return True


def _clear_innocent(draft: Draft) -> None:
    """What came back with the same stack elsewhere was not the fault of the node that had to go for it."""
    job, incident = draft.job, draft.incident
    if why := came_back(incident):
        for name in dict.fromkeys(death.node for death in incident.deaths if death.node in job.evicted):
            draft.note(f"node {name} may be innocent: {why}; `keepstep undo {name}` lets it be used again")


def _roster(draft: Draft, plan: Plan) -> Roster | None:
    """The next roster; ``None`` when no store is there for it."""
    job, incident = draft.job, draft.incident
    assert job.roster is not None
    epoch = next_major(job.ahead())
    spares = spare_nodes(job)
    moves = dict(zip(plan.moves, (node.node for node in spares), strict=False))
    if plan.rung == "restart_job":
        nodes = _restart_nodes(draft, spares, plan)
        picked = rosters.pick_store(job, [node.node for node in nodes])
        if picked is None:
            return None
        return rosters.anew(job, nodes, picked[1], epoch, mode="restart", attempt=job.attempt + 1, incident=incident.id)
    stay = [place.node for place in job.roster.places if place.node not in moves]
    picked = rosters.pick_store(job, [*stay, *moves.values()])
    if picked is None:
        return None
    warm, vacant = plan.rung != "same_node", vacant_ranks(job)
    roster = rosters.reseat(job, vacant, moves, picked[1], epoch, warm=warm, incident=incident.id)
    return replace(roster, boundary_s=draft.policy.boundary_s) if unhurried(job, moves) and not vacant else roster


def unhurried(job: Job, moves: Collection[NodeId]) -> bool:
    """Nodes are only slow and everything works: ranks may finish the step that they are in. Under suspicion of worse
    (``evict``) nobody takes another step with them."""
    if not moves or job.broken or job.stalled or job.frozen or job.cannot:
        return False
    because = [one for one in job.proposals.values() if one.state == "APPROVED" and set(one.nodes) & set(moves)]
    return bool(because) and all(one.kind == "swap" for one in because)


def _restart_nodes(draft: Draft, spares: list[Node], plan: Plan) -> list[Node]:
    """The old nodes in their places, lost and broken ones replaced; a job without state takes what is there, up to its
    maximum."""
    job = draft.job
    assert job.roster is not None
    lost = {*lost_nodes(job), *plan.moves}
    nodes: list[Node] = []
    for place in job.roster.places:
        if place.node not in lost:
            nodes.append(job.nodes[place.node])
        elif spares:
            nodes.append(spares.pop(0))
    if job.level == 0:
        room = job.spec.max_nodes - len(nodes)
        nodes += [node for node in spares if not node.wants_standby][: max(room, 0)]
    return nodes


def _drain(draft: Draft, plan: Plan) -> None:
    """A living node that is given up: its processes end with the next epoch."""
    for name in plan.moves:
        node = draft.job.nodes[name]
        if not node.lost:
            draft.move_node(name, "TAINTED", plan.reason)
            draft.move_node(name, "DRAINING", "its ranks move to another node")


def enter(draft: Draft, roster: Roster) -> None:
    """Open the epoch and order everybody into it; nodes that lost their seats are told too, so that they are fenced."""
    job = draft.job
    before = [place.node for place in job.roster.places] if job.roster else []
    draft.emit(EpochOpened(job=job.id, at=draft.now, roster=roster))
    seat_standbys(draft)
    for node in [n for n in before if n in job.nodes and job.nodes[n].health == "DRAINING"]:
        retire_standbys(draft, job.nodes[node])
        draft.move_node(node, "QUARANTINED", "none of its ranks is left there")
    places = [place.node for place in roster.places]
    for node in [*places, *(n for n in before if n not in places)]:
        order_join(draft, node)
    new = roster.mode != "in_process"
    draft.clear(*_EVIDENCE, deadlines.PAUSE, deadlines.STORE, deadlines.CAPACITY, deadlines.VERIFY, deadlines.SETTLE)
    limit_s = draft.policy.first_start_s if new else draft.policy.rebuild_s
    draft.wake(deadlines.REBUILD, limit_s + roster.boundary_s)
    measure_anew(draft)


def order_join(draft: Draft, node: NodeId) -> None:
    """Order ``node`` into the present epoch, once per epoch and boot of its agent."""
    job = draft.job
    assert job.roster is not None
    id_ = action_id(job.roster.incident or job.id, f"e{show_epoch(job.epoch)}-join-{node}", job.attempt)
    if id_ not in job.orders:
        draft.order(Join(id=id_, job=job.id, epoch=job.epoch, node=node, roster=job.roster))
