"""Rosters: who holds which rank in the next epoch. Pure functions from the last roster and what is left of it.

Ranks never move without need: a seat whose process lives keeps it, and a node's ranks stay together, so that the
parallel layout of the script (which ranks share a node) survives every recovery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from keepstep.core.state import ORIGIN, Job, Node, Store, seat_key
from keepstep.model.ids import Epoch, IncidentId, NodeId, Rank, SlotId, show_epoch
from keepstep.model.placement import Host, Placement, Shortfall, judge, place
from keepstep.model.topology import JoinMode, Member, Place, Roster


def cold_slot(rank: int, epoch: Epoch) -> SlotId:
    """The name of a process that does not exist yet."""
    return SlotId(f"r{rank}e{show_epoch(epoch)}")


def pick_store(job: Job, nodes: Sequence[NodeId]) -> tuple[NodeId, Store] | None:
    """An unused store, on the first of ``nodes`` that has one; any other connected node's if none of them has.

    Args:
        nodes: in order of preference: survivors first, since a newcomer has more to do.
    """
    others = [name for name in job.stores if name not in nodes]
    for name in [*nodes, *others]:
        node, store = job.nodes.get(name), job.stores.get(name)
        if node is not None and store is not None and node.link == "up" and not node.lost:
            return name, store
    return None


def places_of(
    job: Job, nodes: Sequence[Node], members: Sequence[Member], moves: Mapping[NodeId, NodeId] | None = None
) -> tuple[Place, ...]:
    """The nodes of a roster, each with the home of its copies.

    Args:
        moves: nodes that were given up, and who takes their seats: those take over their place in the pattern, too.
    """
    homes = _placement(job, nodes, members, moves or {}).buddy
    return tuple(
        Place(
            node=node.node,
            host=node.host,
            keeper_port=node.keeper_port,
            peer_port=node.peer_port,
            rack=node.rack,
            buddy=homes[node.node],
        )
        for node in nodes
    )


def _placement(job: Job, nodes: Sequence[Node], members: Sequence[Member], moves: Mapping[NodeId, NodeId]) -> Placement:
    """Copies stay where they are as far as may be: a copy that moves has to be made again."""
    before = {
        moves.get(at.node, at.node): moves.get(at.buddy, at.buddy)
        for at in (job.roster.places if job.roster else ())
        if at.buddy is not None
    }
    return place(_hosts(nodes, members), job.spec.layout, before)


def _hosts(nodes: Sequence[Node] | Sequence[Place], members: Sequence[Member]) -> list[Host]:
    ranks: dict[NodeId, list[int]] = {}
    for member in members:
        ranks.setdefault(member.node, []).append(member.rank)
    return [Host(node.node, tuple(ranks.get(node.node, ())), node.rack) for node in nodes]


def shortfalls(job: Job) -> tuple[Shortfall, ...]:
    """What the present copies share with their originals although they should not, and why."""
    roster = job.roster
    if roster is None:
        return ()
    homes = {at.node: at.buddy for at in roster.places}
    return judge(_hosts(roster.places, roster.members), job.spec.layout, homes)


def first_order(nodes: Sequence[Node]) -> list[Node]:
    """Nodes by the rank they were given, the others behind in order of arrival."""
    return sorted(nodes, key=lambda node: (node.node_rank is None, node.node_rank or 0, node.arrival))


def anew(
    job: Job,
    nodes: Sequence[Node],
    store: Store,
    epoch: Epoch,
    *,
    mode: JoinMode,
    attempt: int,
    incident: IncidentId | None = None,
) -> Roster:
    """A roster of new processes only: the first start, or a restart of the whole job."""
    per_node = job.spec.nproc_per_node
    names = [node.node for node in nodes]
    members = []
    for index, node in enumerate(nodes):
        for local in range(per_node):
            rank = Rank(index * per_node + local)
            home = _replica_home(job, rank, names)
            moved = mode == "restart" and _proven_node(job, rank) not in (None, node.node)
            members.append(
                Member(
                    rank=rank,
                    node=node.node,
                    slot=cold_slot(rank, epoch),
                    local_rank=local,
                    replica_node=home if moved else None,
                )
            )
    return Roster(
        job=job.id,
        epoch=epoch,
        origin=ORIGIN,
        mode=mode,
        world_size=len(members),
        members=tuple(members),
        places=places_of(job, nodes, members),
        store_host=store.host,
        store_port=store.port,
        attempt=attempt,
        incident=incident,
        snapshot_every=job.spec.snapshot_every,
        run=f"{job.submitted:x}",
    )


def reseat(
    job: Job,
    vacant: Sequence[Rank],
    moves: Mapping[NodeId, NodeId],
    store: Store,
    epoch: Epoch,
    *,
    warm: bool,
    incident: IncidentId | None = None,
) -> Roster:
    """The next roster in process: survivors keep their seats, vacant ones go to standbys or cold processes.

    Args:
        vacant: ranks without a process.
        moves: for each node that is given up, the node that takes all its ranks.
        warm: use parked standbys where there are any.
    """
    before = job.roster
    assert before is not None
    nodes = [job.nodes[moves.get(place.node, place.node)] for place in before.places]
    names = [node.node for node in nodes]
    parked = _parked(job) if warm else {}
    lost = set(vacant)
    members = []
    for member in before.members:
        home = moves.get(member.node, member.node)
        if member.rank not in lost and home == member.node:
            members.append(_stayer(job, member, names))
            continue
        free = parked.get(home, [])
        members.append(
            Member(
                rank=member.rank,
                node=home,
                slot=free.pop(0) if free else cold_slot(member.rank, epoch),
                local_rank=member.local_rank,
                newcomer=True,
                replica_node=_replica_home(job, member.rank, names),
            )
        )
    return Roster(
        job=job.id,
        epoch=epoch,
        origin=ORIGIN,
        mode="in_process",
        world_size=before.world_size,
        members=tuple(members),
        places=places_of(job, nodes, members, moves),
        store_host=store.host,
        store_port=store.port,
        attempt=before.attempt,
        incident=incident,
        snapshot_every=before.snapshot_every,
        run=before.run,
    )


def _stayer(job: Job, member: Member, names: Sequence[NodeId]) -> Member:
    """A seat that stays. A newcomer that had not resumed yet when the next fault struck is still one."""
    seen = job.progress.get(member.rank)
    arrived = seen is not None and seen.epoch == job.epoch and seen.resumed is not None
    if member.newcomer and not arrived:
        return replace(member, replica_node=_replica_home(job, member.rank, names))
    return replace(member, newcomer=False, replica_node=None)


def _parked(job: Job) -> dict[NodeId, list[SlotId]]:
    parked: dict[NodeId, list[SlotId]] = {}
    for standby in job.standbys.values():
        if standby.state == "SLEEPING" and seat_key(standby.node, standby.slot) not in job.condemned:
            parked.setdefault(standby.node, []).append(standby.slot)
    return parked


def _proven(job: Job) -> Roster | None:
    """The last roster whose ranks all held their state; the present one when it has come that far."""
    if job.roster is not None and job.resumed == job.roster.world_size:
        return job.roster
    return job.proven or job.roster


def _proven_node(job: Job, rank: Rank) -> NodeId | None:
    proven = _proven(job)
    return proven.members[rank].node if proven is not None and rank < proven.world_size else None


def _replica_home(job: Job, rank: Rank, names: Sequence[NodeId]) -> NodeId | None:
    """Where the newest replica of this rank's state is, if that node takes part in the next epoch."""
    proven = _proven(job)
    if proven is None or rank >= proven.world_size:
        return None
    place = proven.place(proven.members[rank].node)
    home = place.buddy if place else None
    return home if home in names else None
