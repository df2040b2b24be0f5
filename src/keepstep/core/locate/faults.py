"""Faults: evidence on the board that names its culprit by itself.

Two kinds of evidence do not: broken collectives, and processes that died of them. They say that *somebody* is gone;
``doubts`` finds them, and a deadline makes sure that they are answered even if nobody is ever named.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from keepstep.core.draft import nanos
from keepstep.core.locate.brief import brief
from keepstep.core.locate.exits import Judgement, judge, overruled
from keepstep.core.locate.told import Told, told
from keepstep.core.state import Job, Node, seat_key
from keepstep.model.facts import WorkerExited
from keepstep.model.ids import Nanos, NodeId, Rank
from keepstep.model.records import Category
from keepstep.model.settings import Policy
from keepstep.model.topology import fold_ranks


class Fault(Struct, frozen=True, kw_only=True):
    """One thing that went wrong, with whom we blame for it.

    Attributes:
        key: names the evidence; a fault is judged once.
        title: for the incident that it opens.
        node: the node that is blamed, ``None`` when none is.
        kill: ranks whose process has to be killed because it does not end by itself.
        lost: the whole node is gone.
        victim: a consequence of another fault.
        leave: the node lives, and its own words say that it is broken: ranks must not run there again.
        pair: two nodes that do not reach each other.
        root_cause, code: in the words of the diagnosis; empty where only exits and positions spoke.
    """

    key: str
    title: str
    category: Category
    node: NodeId | None
    ranks: tuple[Rank, ...]
    probability: float
    reason: str
    evidence: tuple[str, ...]
    onset: Nanos
    kill: tuple[Rank, ...] = ()
    lost: bool = False
    victim: bool = False
    leave: bool = False
    pair: tuple[NodeId, ...] = ()
    root_cause: str = ""
    code: str = ""


def faults(job: Job, now: Nanos, policy: Policy) -> list[Fault]:
    """All faults on the board that no suspect has been named for yet; lost nodes first, culprits before victims."""
    assert job.roster is not None
    named = set(job.incident.named) if job.incident else set[str]()
    found = [*_lost_nodes(job, now, policy), *_frozen(job), *_exits(job), *_said_by_the_living(job), *_refusals(job)]
    gone = {fault.node for fault in found if fault.lost}
    fresh = [f for f in found if f.key not in named and (f.lost or f.node not in gone)]
    return sorted(fresh, key=lambda fault: (not fault.lost, fault.victim))


def normal_end(job: Job, fact: WorkerExited) -> bool:
    """Code 0 is an end, not a fault; whether it came too early is for the others to say."""
    return fact.code == 0


def early_leavers(job: Job) -> list[WorkerExited]:
    """Ranks that left with code 0 although they had not reported their loop complete."""
    if job.level == 0:
        return []
    return [
        fact
        for key, fact in job.exits.items()
        if fact.code == 0 and key in job.seats and not (fact.rank in job.progress and job.progress[fact.rank].done)
    ]


def doubts(job: Job) -> list[str]:
    """Evidence, in words, that somebody is gone, without saying who."""
    named = set(job.incident.named) if job.incident else set[str]()
    said = told(job)
    lines = [f"rank {rank}'s collective broke: {brief(fact.error)}" for rank, fact in sorted(job.broken.items())]
    for key, fact in job.exits.items():
        if key in job.seats and key not in named and not normal_end(job, fact):
            judged = _judged(fact, key, said, amid=False)
            if judged.consequence:
                lines.append(f"rank {job.seats[key]} left after its collective broke: {judged.words}")
    return lines


def victims(job: Job) -> list[Fault]:
    """The exits among the doubts, as faults without blame."""
    named = set(job.incident.named) if job.incident else set[str]()
    said = told(job)
    return [
        _exit_fault(job, key, fact, said, amid=True)
        for key, fact in job.exits.items()
        if key in job.seats and key not in named and not normal_end(job, fact)
    ]


def onset_of_doubt(job: Job, now: Nanos) -> Nanos:
    return min([now, *(f.at for f in job.broken.values()), *(f.at for k, f in job.exits.items() if k in job.seats)])


def _exits(job: Job) -> Iterator[Fault]:
    known = job.incident is not None and job.incident.state not in ("OPEN", "LOCATING")
    culprit = False
    held = []
    said = told(job)
    for key, fact in job.exits.items():
        if key not in job.seats or key in job.condemned or normal_end(job, fact):
            continue
        fault = _exit_fault(job, key, fact, said, amid=known)
        if fault.victim and not known:
            held.append((key, fact))
        else:
            culprit = True
            yield fault
    if culprit:
        for key, fact in held:
            yield _exit_fault(job, key, fact, said, amid=True)


def _judged(fact: WorkerExited, key: str, said: Told | None, *, amid: bool) -> Judgement:
    judged = judge(fact, amid=amid)
    return overruled(fact, judged, said, key) if said is not None else judged


def _exit_fault(job: Job, key: str, fact: WorkerExited, said: Told | None, *, amid: bool) -> Fault:
    rank = job.seats[key]
    judged = _judged(fact, key, said, amid=amid)
    cause = said if said is not None and key in said.seats and judged.category == said.category else None
    if judged.consequence:
        reason = f"rank {rank} left after a collective broke under it: a victim, not a culprit ({judged.words})"
    elif judged.category == "user_code":
        reason = f"rank {rank} ended by its own code: {judged.words}"
    elif cause is not None:
        reason = f"rank {rank} on {fact.node} ended: {cause.sentence}"
    else:
        reason = f"rank {rank} on {fact.node} ended: {judged.words}"
    if cause is None:
        blame = fact.node if judged.category in ("infrastructure", "unknown") else None
    else:
        blame = cause.node
    return Fault(
        key=key,
        title=f"rank {rank} on {fact.node}: {judged.words}",
        category=judged.category,
        node=blame,
        ranks=(rank,),
        probability=judged.probability,
        reason=reason,
        evidence=(
            *(cause.evidence if cause is not None else ()),
            f"process {fact.slot} of rank {rank} on {fact.node}: {judged.words}",
        ),
        onset=fact.at,
        victim=judged.consequence,
        leave=cause is not None and cause.leave and blame == fact.node,
        root_cause=cause.root_cause if cause is not None else "",
        code=cause.code if cause is not None else "",
    )


def _said_by_the_living(job: Job) -> Iterator[Fault]:
    """A rank whose collective broke with words that prove its own machine broken: it lives, and cannot go on there."""
    if not job.broken or (said := told(job)) is None or not said.leave:
        return
    for rank, fact in sorted(job.broken.items()):
        seat = job.seat_of(rank)
        key = seat_key(seat.node, seat.slot)
        if key in said.seats and key not in job.exits and key not in job.condemned and seat.node == said.node:
            yield Fault(
                key=key,
                title=f"rank {rank} on {seat.node}: {brief(fact.error)}",
                category=said.category,
                node=said.node,
                ranks=(rank,),
                probability=said.probability,
                reason=f"rank {rank} on {seat.node} cannot go on: {said.sentence}",
                evidence=said.evidence,
                onset=fact.at,
                kill=(rank,),
                leave=True,
                root_cause=said.root_cause,
                code=said.code,
            )


def by_words(fault: Fault, job: Job) -> Fault:
    """A fault that blames nobody, with the cause that survivors' words name; still nobody is blamed."""
    said = told(job)
    if said is None or not said.root_cause:
        return fault
    return replace(
        fault,
        category=said.category,
        probability=said.probability,
        reason=f"{fault.reason}; by what was written: {said.sentence}",
        evidence=(*said.evidence, *fault.evidence),
        root_cause=said.root_cause,
        code=said.code,
    )


def early_fault(job: Job, fact: WorkerExited) -> Fault:
    """An early leaver whom the others miss: its code went another way than theirs."""
    rank = job.seats[seat_key(fact.node, fact.slot)]
    reason = f"rank {rank} left with code 0 before its loop was complete, while the others train on"
    return Fault(
        key=seat_key(fact.node, fact.slot),
        title=f"rank {rank} on {fact.node} left its loop early",
        category="user_code",
        node=None,
        ranks=(rank,),
        probability=0.9,
        reason=reason,
        evidence=(f"process {fact.slot} of rank {rank} on {fact.node}: exit code 0, loop not complete",),
        onset=fact.at,
    )


def _frozen(job: Job) -> Iterator[Fault]:
    for key, fact in job.frozen.items():
        if key in job.seats and key not in job.exits and key not in job.condemned:
            rank = job.seats[key]
            what = "stopped" if fact.state.startswith("T") else "stuck in the kernel"
            yield Fault(
                key=key,
                title=f"rank {rank} on {fact.node} is {what}",
                category="infrastructure",
                node=fact.node,
                ranks=(rank,),
                probability=0.99,
                reason=f"rank {rank} on {fact.node} has been {what} (state {fact.state}) for {fact.for_s:.1f} s",
                evidence=(f"kernel: process {fact.slot} of rank {rank} in state {fact.state} for {fact.for_s:.1f} s",),
                onset=Nanos(fact.at - nanos(fact.for_s)),
                kill=(rank,),
            )


def _lost_nodes(job: Job, now: Nanos, policy: Policy) -> Iterator[Fault]:
    assert job.roster is not None
    for place in job.roster.places:
        node = job.nodes.get(place.node)
        if node is None or not (why := why_lost(job, node, now, policy)):
            continue
        ranks = tuple(
            seat.rank
            for seat in job.roster.seats_on(node.node)
            if not ((fact := job.exits.get(seat_key(seat.node, seat.slot))) and normal_end(job, fact))
        )
        if not ranks:
            continue  # all that ran there had ended well before
        yield Fault(
            key=f"node:{node.node}",
            title=f"node {node.node} is lost with rank {fold_ranks(ranks)}",
            category="infrastructure",
            node=node.node,
            ranks=ranks,
            probability=0.97 if node.link == "left" else 0.9,
            reason=f"node {node.node} {why}",
            evidence=(f"node {node.node}: {why}", *doubts(job)[:4]),
            onset=node.since,
            lost=True,
        )


def why_lost(job: Job, node: Node, now: Nanos, policy: Policy) -> str:
    """Why this node counts as gone; empty when it does not."""
    if node.link == "left":
        return "was shut down"
    if node.link == "expired":
        return "has been silent for a whole lease"
    if node.health == "QUARANTINED":
        return "is quarantined"
    if node.link == "broken" and now >= node.since + nanos(policy.reconnect_s):
        others = [f for f in job.broken.values() if f.node != node.node]
        exits = [f for k, f in job.exits.items() if k in job.seats and f.node != node.node and judge_echo(f)]
        if others or exits:
            return f"broke its connection and did not come back within {policy.reconnect_s:g} s, and collectives broke"
        if job.incident is not None and job.incident.node == node.node and node.node not in job.started:
            return f"lost a process, then its connection, and did not come back within {policy.reconnect_s:g} s"
    return ""


def judge_echo(fact: WorkerExited) -> bool:
    return fact.code != 0 and judge(fact, amid=False).consequence


def _refusals(job: Job) -> Iterator[Fault]:
    """What asks for a higher rung without blaming anybody: a state that cannot be agreed on, a Join not carried out."""
    if job.cannot:
        rank, fact = min(job.cannot.items())
        yield Fault(
            key=f"nobody:{job.epoch}",
            title="in-process recovery is not possible",
            category="unknown",
            node=None,
            ranks=(),
            probability=0.5,
            reason=f"rank {rank} cannot resume in process: {fact.why}",
            evidence=(f"rank {rank}: {fact.why}",),
            onset=fact.at,
        )
    elif job.refused:
        name, why = min(job.refused.items())
        yield Fault(
            key=f"nobody:{job.epoch}",
            title=f"node {name} could not enter the epoch",
            category="unknown",
            node=name,
            ranks=(),
            probability=0.6,
            reason=f"node {name} could not carry out its orders: {why}",
            evidence=(f"node {name}: {why}",),
            onset=job.nodes[name].since if name in job.nodes else Nanos(0),
        )
