"""Fold of facts: what was observed goes onto the board of the job, unjudged."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from keepstep.core.fold_checkpoints import fold_checkpoint
from keepstep.core.state import PACES_KEPT, Job, Link, Node, Progress, Store, seat_key
from keepstep.model.actions import Join, KeepStandbys
from keepstep.model.facts import (
    ActionDone,
    ActionFailed,
    AgentDisconnected,
    AgentJoined,
    AgentLeft,
    AnyFact,
    CheckpointNoted,
    CollectiveBroken,
    GuardNoted,
    InjectRequested,
    JobSubmitted,
    LeaseExpired,
    LeaseRenewed,
    OperatorSaid,
    RankAdvanced,
    RankDone,
    RankJoined,
    RankResumed,
    RanksPaced,
    RankStalled,
    RecoveredLocally,
    RestoreMoved,
    ResumeFailed,
    SdkAttached,
    SelfTestDone,
    StacksRequested,
    StacksTaken,
    StallEnded,
    StandbyGone,
    StandbyReady,
    StopRequested,
    StoreLost,
    StoreReady,
    TimePassed,
    WorkerExited,
    WorkerFrozen,
)
from keepstep.model.ids import Nanos, NodeId, Rank


def fold_fact(job: Job, fact: AnyFact) -> None:
    """Write one fact onto the board."""
    if fact.seq:
        job.seqs[fact.node] = fact.seq
    match fact:
        case JobSubmitted() | StopRequested() | InjectRequested() | StacksRequested() | TimePassed() | StandbyReady():
            pass  # what follows from them is in the records behind
        case SelfTestDone():
            job.selftests[fact.node] = fact
        case OperatorSaid() | GuardNoted():
            pass  # what follows from them is in the records behind, or the SDK has acted by itself
        case RanksPaced():
            if fact.epoch == job.epoch and job.in_roster(fact.node):
                job.paces[fact.node] = (*job.paces.get(fact.node, ()), fact)[-PACES_KEPT:]
        case CheckpointNoted():
            fold_checkpoint(job, fact)
        case RecoveredLocally():
            if fact.roster.epoch > job.epoch:
                job.deputy_at = fact.at
        case AgentJoined():
            _agent_joined(job, fact)
        case AgentDisconnected():
            _link(job, fact.node, "away" if fact.ours else "broken", fact.at)
        case LeaseExpired():
            _link(job, fact.node, "expired", fact.at)
        case LeaseRenewed():
            _link(job, fact.node, "up", fact.at)
        case AgentLeft():
            _link(job, fact.node, "left", fact.at)
        case StoreReady():
            if f"{fact.host}:{fact.port}" not in job.used_stores:
                job.stores[fact.node] = Store(host=fact.host, port=fact.port)
        case StoreLost():
            job.stores.pop(fact.node, None)
        case SdkAttached():
            job.level = 2
        case StandbyGone():
            _gone(job, fact)
        case WorkerExited():
            _exited(job, fact)
        case WorkerFrozen():
            if job.rank_at(fact.node, fact.slot) is not None:
                job.frozen[seat_key(fact.node, fact.slot)] = fact
        case RankStalled():
            if fact.epoch == job.epoch and job.rank_at(fact.node, fact.slot) == fact.rank:
                job.stalled[fact.rank] = fact
                _step(job, fact.rank, fact.step)
        case StallEnded():
            if fact.epoch == job.epoch:
                job.stalled.pop(fact.rank, None)
        case StacksTaken():
            job.stacks[fact.node] = fact
        case CollectiveBroken():
            if fact.epoch == job.epoch and _seated(job, fact.node, fact.rank):
                job.broken[fact.rank] = fact
                _step(job, fact.rank, fact.step)
        case ResumeFailed():
            if fact.epoch == job.epoch and _seated(job, fact.node, fact.rank):
                job.cannot[fact.rank] = fact
        case RestoreMoved():
            if fact.epoch == job.epoch and job.in_roster(fact.node):
                job.restoring[fact.node] = fact
        case RankJoined() | RankResumed() | RankAdvanced() | RankDone():
            _progress(job, fact)
        case ActionDone():
            action = job.orders.pop(fact.action, None)
            if isinstance(action, Join) and action.epoch == job.epoch:
                job.started[action.node] = True
        case ActionFailed():
            action = job.orders.pop(fact.action, None)
            if isinstance(action, Join) and action.epoch == job.epoch:
                job.refused[action.node] = fact.why
            elif isinstance(action, KeepStandbys):
                job.standby_orders.pop(action.node, None)
        case _:
            assert_never(fact)


def recount(job: Job) -> None:
    """Count anew how many ranks have come how far in the present epoch."""
    now = [seen for seen in job.progress.values() if seen.epoch == job.epoch]
    job.joined = sum(seen.joined for seen in now)
    job.resumed = sum(seen.resumed is not None for seen in now)
    job.advanced = sum(seen.advanced or seen.done for seen in now)
    job.done = sum(seen.done for seen in now)
    job.clean = sum(fact.code == 0 for key, fact in job.exits.items() if key in job.seats)
    _settle(job)


def _settle(job: Job) -> None:
    if job.roster is not None and job.resumed == job.roster.world_size:
        job.settled = True
    if job.roster is not None and job.advanced == job.roster.world_size:
        job.trained = True


def _agent_joined(job: Job, fact: AgentJoined) -> None:
    before = job.nodes.get(fact.node)
    job.nodes[fact.node] = Node(
        node=fact.node,
        host=fact.host,
        boot=fact.boot,
        peer_port=fact.peer_port,
        keeper_port=fact.keeper_port,
        node_rank=fact.node_rank,
        rack=fact.rack,
        wants_standby=fact.wants_standby,
        arrival=before.arrival if before else len(job.nodes),
        epoch=fact.epoch,
        slots=fact.slots,
        link="up",
        since=fact.at,
        health=before.health if before else "HEALTHY",
        faulty=before.faulty if before else False,
        faults=before.faults if before else (),
    )
    if before is None or before.boot != fact.boot:
        job.standby_orders.pop(fact.node, None)


def _link(job: Job, name: NodeId, link: Link, at: Nanos) -> None:
    node = job.nodes.get(name)
    if node is None or node.link == link or (node.link == "left" and link != "up"):
        return
    if link in ("broken", "away") and node.link == "expired":
        job.nodes[name] = replace(node, cut=True)
        return  # a later word about a connection that was already given up
    if link == "up" and node.cut:
        return
    job.nodes[name] = replace(node, link=link, since=at, cut=node.cut or link in ("broken", "away", "left"))
    if link in ("expired", "left"):
        job.stores.pop(name, None)


def _gone(job: Job, fact: StandbyGone) -> None:
    """A standby that was given a rank a moment ago is a worker that exited."""
    rank = job.rank_at(fact.node, fact.slot)
    if rank is not None:
        exit_ = WorkerExited(
            job=fact.job, at=fact.at, node=fact.node, seq=fact.seq, slot=fact.slot, rank=rank, epoch=job.epoch,
            stderr_tail=(fact.why,),
        )  # fmt: skip
        job.exits.setdefault(seat_key(fact.node, fact.slot), exit_)


def _exited(job: Job, fact: WorkerExited) -> None:
    """Exits count by process, not by epoch: a survivor may die before it has heard of the newest one."""
    key = seat_key(fact.node, fact.slot)
    if key not in job.seats and fact.epoch <= job.epoch:
        return
    if key in job.seats and key not in job.exits and fact.code == 0:
        job.clean += 1
    job.exits[key] = fact
    if key in job.seats and fact.error is not None and fact.error.step is not None:
        _step(job, fact.rank, fact.error.step)


def _seated(job: Job, node: NodeId, rank: Rank) -> bool:
    roster = job.roster
    return roster is not None and rank < roster.world_size and roster.members[rank].node == node


def _progress(job: Job, fact: RankJoined | RankResumed | RankAdvanced | RankDone) -> None:
    """Facts of an epoch that a deputy opened may come before its own report: they are kept until then."""
    if fact.epoch < job.epoch or (fact.epoch == job.epoch and not _seated(job, fact.node, fact.rank)):
        return
    seen = job.progress.get(fact.rank)
    if seen is None or seen.epoch < fact.epoch:
        seen = Progress(epoch=fact.epoch, at=fact.at)
    elif seen.epoch > fact.epoch:
        return
    match fact:
        case RankJoined():
            after = replace(seen, joined=True, at=fact.at)
        case RankResumed():
            after = replace(seen, at=fact.at, joined=True, resumed=fact, step=max(seen.step, fact.step))
        case RankAdvanced():
            after = replace(seen, at=fact.at, advanced=True, step=max(seen.step, fact.step))
        case RankDone():
            after = replace(seen, at=fact.at, done=True, step=max(seen.step, fact.step))
        case _:
            assert_never(fact)
    job.progress[fact.rank] = after
    if after.epoch != job.epoch:
        return
    job.joined += after.joined - seen.joined
    job.resumed += (after.resumed is not None) - (seen.resumed is not None)
    job.advanced += (after.advanced or after.done) - (seen.advanced or seen.done)
    job.done += after.done - seen.done
    world = job.roster.world_size if job.roster else 0
    if world in (job.resumed if isinstance(fact, RankResumed) else 0, job.advanced, job.done):
        job.step = min(seen.step for seen in job.progress.values())
    _settle(job)


def _step(job: Job, rank: Rank, step: int) -> None:
    seen = job.progress.get(rank)
    if seen is not None and seen.epoch == job.epoch and step > seen.step:
        job.progress[rank] = replace(seen, step=step)
        if job.roster is not None and job.resumed == job.roster.world_size:
            job.step = max(job.step, min(seen.step for seen in job.progress.values()))
