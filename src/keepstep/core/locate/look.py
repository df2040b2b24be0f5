"""Look: have the agents see where every process of a job stands, because it does not move or because a person asks."""

from __future__ import annotations

from collections.abc import Collection

from keepstep.core.draft import Draft, nanos
from keepstep.core.state import Job
from keepstep.model.actions import TakeStacks
from keepstep.model.facts import StacksRequested, StacksTaken
from keepstep.model.ids import Rank, action_id


def order_stacks(
    draft: Draft, why: str, ranks: Collection[Rank] = (), *, native: bool = False, number: int = 0
) -> None:
    """Order each node of the roster that is not lost to look into its ranks' processes.

    Args:
        ranks: only these; all where empty.
        number: of the request; one is derived where it is 0.
    """
    job = draft.job
    assert job.roster is not None
    number = number or job.order_count
    for place in job.roster.places:
        mine = tuple(seat.rank for seat in job.roster.seats_on(place.node) if not ranks or seat.rank in ranks)
        known = job.nodes.get(place.node)
        if not mine or known is None or known.lost:
            continue
        draft.order(
            TakeStacks(
                id=action_id(job.id, f"stacks-{place.node}", number),
                job=job.id,
                epoch=job.epoch,
                node=place.node,
                ranks=mine,
                native=native,
                request=number,
                why=why,
            )
        )


def stacks_requested(draft: Draft, fact: StacksRequested) -> None:
    """A person wants to see; nothing is decided upon it."""
    job = draft.job
    if job.over or job.roster is None:
        draft.note(f"stacks asked for by {fact.by}: job {job.id} is {job.state}")
        return
    order_stacks(draft, f"asked for by {fact.by}", fact.ranks, native=fact.native, number=fact.number)


def looking(job: Job) -> bool:
    """Whether some node has yet to show where its processes stand in the present epoch."""
    waiting = [a for a in job.orders.values() if isinstance(a, TakeStacks) and a.epoch == job.epoch]
    return any((shown := job.stacks.get(a.node)) is None or shown.request < a.request for a in waiting)


def shown(job: Job) -> list[StacksTaken]:
    """What the nodes saw at the newest look of the present epoch; empty while nobody has looked."""
    taken = [fact for fact in job.stacks.values() if fact.epoch == job.epoch]
    newest = max((fact.request for fact in taken), default=0)
    return [fact for fact in taken if fact.request == newest]


def outdated(job: Job) -> bool:
    """Whether some rank came to rest only after its node had looked; both times are of that node's clock."""
    rests = ((fact.node, fact.at - nanos(fact.idle_s)) for fact in job.stalled.values())
    return any(
        (taken := job.stacks.get(node)) is not None and taken.epoch == job.epoch and taken.at < rest
        for node, rest in rests
    )
