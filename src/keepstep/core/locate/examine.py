"""Examine: a node that went on suspicion examines itself, and comes back when it passes.

Taking a node out before its guilt is proven is right while a whole job waits, and fair only if the innocent are back
within minutes (ByteRobust, SOSP '25, https://arxiv.org/abs/2509.16293). So whoever was taken out on suspicion alone
does work whose result is known, all of them at the same time, and returns on probation. Who fails stays out, and who
was taken out on proof (its driver's own words, corruption seen twice), for being slow or for the second time is not
asked: right results do not clear them. Faults that show only in a group of machines are for the replay
(``python -m keepstep.probes``).
"""

from __future__ import annotations

import zlib

from keepstep.core.cases import Proposal
from keepstep.core.decide.limits import AUTO
from keepstep.core.decide.proposals import move
from keepstep.core.draft import Draft
from keepstep.core.locate.assess import retry
from keepstep.core.standby.pool import order_standbys
from keepstep.core.state import Job
from keepstep.model.actions import EXAMINATIONS, SelfTest
from keepstep.model.facts import SelfTestDone
from keepstep.model.ids import NodeId, action_id

TESTS = "all"


def examine(draft: Draft) -> None:
    """Order a self-test of each node that is out on suspicion, once per eviction, as soon as it can be reached."""
    job = draft.job
    if job.over or draft.policy.examine_s <= 0:
        return
    for one in [one for one in job.proposals.values() if one.testable and one.state == "CARRIED_OUT"]:
        for name in [name for name in one.nodes if _awaits(job, name)]:
            number = EXAMINATIONS + int(one.id.rpartition("-p")[2])
            draft.order(
                SelfTest(
                    id=action_id(one.id, f"examine-{name}", job.order_count),
                    job=job.id,
                    epoch=job.epoch,
                    node=name,
                    test=TESTS,
                    request=number,
                    seed=zlib.crc32(one.id.encode()),
                    seconds=draft.policy.examine_s,
                    why=f"{one.id}: out on suspicion",
                )
            )


def examined(draft: Draft, fact: SelfTestDone) -> None:
    """A node that is out on suspicion has examined itself."""
    job = draft.job
    one = job.proposals.get(f"{job.id}-p{fact.request - EXAMINATIONS}")
    if one is None or one.state != "CARRIED_OUT" or not _out(job, fact.node):
        return
    work = f"self-test {fact.test}, {fact.rounds} rounds in {fact.seconds:.0f} s"
    if fact.passed is None:
        draft.note(f"{fact.node} stays out: it could not examine itself: {fact.why}; `keepstep undo {fact.node}`")
    elif not fact.passed:
        draft.note(f"{fact.node} stays out: it failed the {work}: {'; '.join(fact.failed)}")
    else:
        draft.move_node(fact.node, "PROBATION", f"it went on suspicion and passed the {work}")
        _close(draft, one)
        order_standbys(draft)
        retry(draft)


def _awaits(job: Job, name: NodeId) -> bool:
    return _out(job, name) and job.examined.get(name, -1) < job.evicted[name]


def _out(job: Job, name: NodeId) -> bool:
    node = job.nodes.get(name)
    return name in job.evicted and node is not None and node.health == "QUARANTINED" and node.link == "up"


def _close(draft: Draft, one: Proposal) -> None:
    if not any(name in draft.job.evicted for name in one.nodes):
        move(draft, one, "UNDONE", by=AUTO, why="its nodes have passed a self-test")
