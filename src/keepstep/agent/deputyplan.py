"""What a deputy decides: the next minor epoch with one seat changed. Pure, so that every node would decide alike."""

from __future__ import annotations

import msgspec

from keepstep.model.ids import MINOR_BITS, Epoch, NodeId, next_minor, show_epoch
from keepstep.model.topology import Member, Roster
from keepstep.model.wire import PeerFault


def plan(
    roster: Roster, fault: PeerFault, *, deputy: NodeId, store_host: str, store_port: int, resumed: bool
) -> Roster | str:
    """The roster to enter, or a sentence why there is none.

    Args:
        resumed: the epoch that the fault struck had got over its own rebuild, so its newcomers are survivors now.
    """
    if fault.job != roster.job:
        return f"job {fault.job} does not run here"
    if fault.epoch != roster.epoch:
        return f"the fault is of epoch {show_epoch(fault.epoch)}, the job is at {show_epoch(roster.epoch)}"
    seat = next((m for m in roster.members if m.slot == fault.cause.slot and m.node == fault.node), None)
    if seat is None:
        return f"slot {fault.cause.slot} of node {fault.node} holds no seat in epoch {show_epoch(roster.epoch)}"
    if any(m.node == fault.node and m.slot == fault.offer for m in roster.members):
        return f"the offered slot {fault.offer} of node {fault.node} has a seat already"
    epoch = next_minor(roster.epoch)
    if epoch >> MINOR_BITS != roster.epoch >> MINOR_BITS:
        return f"epoch {show_epoch(roster.epoch)} has no more minors; only the controller can go on"
    replacement = msgspec.structs.replace(seat, slot=fault.offer, newcomer=True, replica_node=None)
    return msgspec.structs.replace(
        roster,
        epoch=epoch,
        origin=deputy,
        mode="in_process",
        members=tuple(replacement if m == seat else _survivor(m) if resumed else m for m in roster.members),
        store_host=store_host,
        store_port=store_port,
        incident=None,
    )


def again(roster: Roster, rival: Epoch, *, store_port: int) -> Roster:
    """The same seats in a minor above a rival's, on a store of its own."""
    return msgspec.structs.replace(roster, epoch=next_minor(max(roster.epoch, rival)), store_port=store_port)


def _survivor(seat: Member) -> Member:
    return msgspec.structs.replace(seat, newcomer=False, replica_node=None)
