"""Orders of an investigation: a suspect examines itself, and what may be spoilt is marked."""

from __future__ import annotations

import zlib

from keepstep.core.cases import Investigation
from keepstep.core.draft import Draft
from keepstep.core.state import Job
from keepstep.model.actions import SelfTest, TaintCheckpoints
from keepstep.model.ids import Nanos, NodeId, action_id

TEST = "gemm"


def number_of(known: Investigation) -> int:
    """The number in an investigation's id; self-tests carry it as their request."""
    return int(known.id.rpartition("-sdc")[2])


def order_soak(draft: Draft, known: Investigation) -> list[NodeId]:
    """Have the suspects examine themselves, and one healthy node do the same work to compare with.

    Returns:
        The suspects that were given the order; none where the policy orders no tests or they are out of reach.
    """
    job, policy = draft.job, draft.policy
    if policy.soak_s <= 0:
        return []
    suspects = [node for node in known.nodes if node in job.nodes and not job.nodes[node].lost]
    peer = _healthy(job, known)
    for node in [*suspects, *([peer] if peer else [])]:
        draft.order(
            SelfTest(
                id=action_id(known.id, f"selftest-{node}", job.order_count),
                job=job.id,
                epoch=job.epoch,
                node=node,
                test=TEST,
                request=number_of(known),
                seed=zlib.crc32(known.id.encode()),
                seconds=policy.soak_s,
                share=policy.soak_share,
                why=f"{known.id}: {'suspect' if node in suspects else 'to compare the suspect with'}",
            )
        )
    return suspects


def _healthy(job: Job, known: Investigation) -> NodeId | None:
    """A node that nobody investigates; one that trains, so that it is under the same load."""
    accused = {
        node for one in job.investigations.values() if one.open or one.state == "CONFIRMED" for node in one.nodes
    }
    names = [place.node for place in job.roster.places] if job.roster else []
    return next((n for n in names if n not in accused and n in job.nodes and not job.nodes[n].lost), None)


def order_taint(draft: Draft, known: Investigation, *, before: Nanos) -> None:
    """Mark what was saved of steps since the newest clean one, on all nodes that train.

    Args:
        before: when the corruption was seen; what was written later is of steps that were done again.
    """
    until = max(draft.job.step, known.step + 1)
    if until > known.since:
        _taint(draft, known, until, before=before, clear=False)


def clear_taint(draft: Draft, known: Investigation) -> None:
    """It was something else: what is saved is what the code makes of the data."""
    _taint(draft, known, max(draft.job.step, known.step + 1), before=Nanos(0), clear=True)


def _taint(draft: Draft, known: Investigation, until: int, *, before: Nanos, clear: bool) -> None:
    job = draft.job
    for place in job.roster.places if job.roster else ():
        node = job.nodes.get(place.node)
        if node is None or node.lost:
            continue
        draft.order(
            TaintCheckpoints(
                id=action_id(known.id, f"{'clear' if clear else 'taint'}-{place.node}", job.order_count),
                job=job.id,
                epoch=job.epoch,
                node=place.node,
                since=known.since,
                until=until,
                before=before,
                clear=clear,
                why=known.id,
            )
        )
