"""Respond: one arm per fact. Each hands over to the part of the mind that the fact concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from keepstep.core.decide.operator import operator_said
from keepstep.core.decide.proposals import time_is_over
from keepstep.core.detect import deadlines
from keepstep.core.detect.leases import (
    agent_disconnected,
    agent_joined,
    agent_left,
    lease_expired,
    lease_renewed,
    reconcile_time_is_over,
)
from keepstep.core.detect.restores import restore_moved
from keepstep.core.detect.stragglers import ranks_paced
from keepstep.core.draft import Draft, nanos
from keepstep.core.inject import inject
from keepstep.core.locate.assess import (
    assess,
    capacity_is_over,
    explain_time_is_over,
    look_again_at_stall,
    missing_at_rebuild,
    missing_at_verify,
    patience_is_over,
    pause_is_over,
    retry,
    stacks_are_in,
    stacks_time_is_over,
    stall_reports_are_in,
    store_lost,
)
from keepstep.core.locate.examine import examine, examined
from keepstep.core.locate.look import stacks_requested
from keepstep.core.locate.sdc import guard_noted, self_test_done, soak_is_over
from keepstep.core.recover.adopt import adopt, deputy_stays_silent
from keepstep.core.recover.end import stop
from keepstep.core.recover.progress import check_progress, rank_resumed, settled
from keepstep.core.recover.start import join_time_is_over, store_time_is_over, try_start
from keepstep.core.recover.swap import carry_out
from keepstep.core.standby.pool import order_standbys, standby_gone, standby_ready
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
from keepstep.model.ids import NodeId


def respond(draft: Draft, fact: AnyFact) -> None:
    """Add to ``draft`` what follows from ``fact``, which it has observed already."""
    match fact:
        case JobSubmitted():
            draft.wake(deadlines.JOIN, fact.spec.join_timeout_s)
        case StopRequested():
            if not draft.job.over:
                stop(draft, fact)
        case InjectRequested():
            inject(draft, fact)
        case StacksRequested():
            stacks_requested(draft, fact)
        case TimePassed():
            time_passed(draft)
        case AgentJoined():
            agent_joined(draft, fact)
        case AgentDisconnected():
            agent_disconnected(draft, fact)
        case LeaseExpired():
            lease_expired(draft, fact)
        case LeaseRenewed():
            lease_renewed(draft, fact)
        case AgentLeft():
            agent_left(draft, fact)
        case StoreReady():
            try_start(draft)
            retry(draft)
        case SdkAttached():
            order_standbys(draft)
        case StandbyReady():
            standby_ready(draft, fact)
        case StandbyGone():
            standby_gone(draft, fact)
            assess(draft)
        case WorkerExited():
            standby_gone(draft, fact)
            check_progress(draft)
            assess(draft)
        case RankStalled():
            assess(draft)
            look_again_at_stall(draft)
        case StacksTaken():
            stacks_are_in(draft)
        case WorkerFrozen() | StallEnded() | CollectiveBroken() | ResumeFailed():
            assess(draft)
        case RestoreMoved():
            restore_moved(draft, fact)
        case RankResumed():
            rank_resumed(draft, fact.rank)
        case RankAdvanced() | RankDone() | ActionDone():
            check_progress(draft)
        case ActionFailed():
            assess(draft)
            stacks_are_in(draft)
        case RecoveredLocally():
            adopt(draft, fact)
        case StoreLost():
            store_lost(draft, fact)
        case OperatorSaid():
            operator_said(draft, fact)
        case RanksPaced():
            ranks_paced(draft, fact)
        case GuardNoted():
            guard_noted(draft, fact)
        case SelfTestDone():
            self_test_done(draft, fact)
            examined(draft, fact)
        case CheckpointNoted() | RankJoined():
            pass  # on the board, and that is all
        case _:
            assert_never(fact)
    carry_out(draft)
    examine(draft)


_WHEN_DUE: dict[str, Callable[[Draft], None]] = {
    deadlines.JOIN: join_time_is_over,
    deadlines.LAST_CALL: lambda draft: try_start(draft, last_call=True),
    deadlines.STORE: store_time_is_over,
    deadlines.REBUILD: missing_at_rebuild,
    deadlines.VERIFY: missing_at_verify,
    deadlines.SETTLE: settled,
    deadlines.LOCATE: stall_reports_are_in,
    deadlines.EXPLAIN: explain_time_is_over,
    deadlines.STACKS: stacks_time_is_over,
    deadlines.PATIENCE: patience_is_over,
    deadlines.CAPACITY: capacity_is_over,
    deadlines.PAUSE: pause_is_over,
    deadlines.ADOPT: deputy_stays_silent,
    deadlines.LEAVE: assess,
}

_NEED_REPORTS = frozenset(
    {
        deadlines.REBUILD,
        deadlines.VERIFY,
        deadlines.LOCATE,
        deadlines.EXPLAIN,
        deadlines.ADOPT,
        deadlines.PATIENCE,
        deadlines.LEAVE,
    }
)
"""Deadlines that conclude from the absence of reports."""


def time_passed(draft: Draft) -> None:
    """Handle every deadline of this job that is due, the oldest first."""
    due = sorted((at, name) for name, at in draft.job.deadlines.items() if at <= draft.now)
    for at, name in due:
        if draft.job.deadlines.get(name, draft.now + 1) > draft.now:
            continue  # an earlier one of them has settled or moved it
        if name in _NEED_REPORTS and draft.now - at > nanos(draft.policy.explain_s):
            draft.wake(name, draft.policy.lease_s)  # we overslept: what agents had to say may still wait at their side
            continue
        if name in _NEED_REPORTS and name != deadlines.ADOPT and draft.job.ahead() > draft.job.epoch:
            draft.wake(name, draft.policy.explain_s)  # a deputy has answered already; ADOPT bounds the wait for it
            continue
        draft.clear(name)
        if node := deadlines.reconnect_node(name):
            assess(draft)
        elif node := deadlines.reconcile_node(name):
            reconcile_time_is_over(draft, NodeId(node))
        elif proposal := deadlines.proposal_named(name):
            time_is_over(draft, proposal)
        elif case := deadlines.soak_named(name):
            soak_is_over(draft, case)
        else:
            _WHEN_DUE[name](draft)
    carry_out(draft)
    examine(draft)
