"""One line of text per fact and per record, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from keepstep.core.locate.brief import brief
from keepstep.core.locate.exits import words
from keepstep.core.summary_decisions import decision_words
from keepstep.model.actions import (
    AnyAction,
    InjectFault,
    Join,
    KeepStandbys,
    KillProcess,
    SelfTest,
    StopJob,
    TaintCheckpoints,
    TakeStacks,
)
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
from keepstep.model.ids import Nanos, show_epoch
from keepstep.model.records import (
    AnyRecord,
    AutomationMoved,
    DeadlineSet,
    EpochOpened,
    IncidentMarked,
    IncidentMeasured,
    IncidentMoved,
    IncidentOpened,
    InvestigationMoved,
    JobMoved,
    NodeMoved,
    Noted,
    Observed,
    Ordered,
    PlanMade,
    ProposalMoved,
    StandbyMoved,
    StragglerNoted,
    SuspectNamed,
)
from keepstep.model.topology import fold_ranks


def clock(at: Nanos) -> str:
    """Time of the day in UTC, to the millisecond."""
    ms = at // 1_000_000 % 86_400_000
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}.{ms % 1000:03}"


def evidence_line(fact: AnyFact) -> str:
    """``time  source  words`` for a fact that says that something is wrong; empty for all others."""
    match fact:
        case WorkerExited():
            if fact.killed_by_us:
                return ""
            source = "process"
        case WorkerFrozen():
            source = "kernel"
        case RankStalled():
            source = "progress"
        case CollectiveBroken() | ResumeFailed():
            source = "trainer"
        case AgentDisconnected() | LeaseExpired() | AgentLeft():
            source = "node"
        case RecoveredLocally():
            source = "deputy"
        case GuardNoted():
            if fact.what in ("gone", "kept", "alone"):
                return ""
            source = "guard"
        case _:
            return ""
    return f"{clock(fact.at)}  {source:<9} {fact_words(fact)}"


def stalled_line(alike: Sequence[RankStalled]) -> str:
    """One line for ranks that stand alike, in the form of ``evidence_line``."""
    first = min(alike, key=lambda fact: fact.at)
    who = f"rank{'s' if len(alike) > 1 else ''} {fold_ranks([fact.rank for fact in alike])}"
    return f"{clock(first.at)}  progress  {who} idle for {min(f.idle_s for f in alike):.1f} s, {stands(first)}"


def stands(fact: RankStalled) -> str:
    """Where a rank that has fallen silent stands, by its own count."""
    return f"{'inside' if fact.started > fact.finished else 'outside of'} collective {fact.started}"


def checkpoint_words(fact: CheckpointNoted) -> str:
    """What happened to a checkpoint, in one phrase."""
    who = "" if fact.rank is None else f"rank {fact.rank}: "
    size = f", {fact.bytes / 1e6:.1f} MB" if fact.bytes else ""
    time = f" in {fact.seconds:.2f} s" if fact.seconds else ""
    return f"{who}step {fact.step} {fact.what} ({fact.tier} tier){size}{time}" + (f": {fact.why}" if fact.why else "")


def fact_words(fact: AnyFact) -> str:
    """What was observed, in one phrase."""
    match fact:
        case JobSubmitted():
            s = fact.spec
            return f"job {s.job} submitted: {s.min_nodes} to {s.max_nodes} nodes of {s.nproc_per_node}"
        case StopRequested():
            return f"{fact.by} asks to stop: {fact.why}"
        case InjectRequested():
            return f"{fact.by} asks for {fact.fault}"
        case StacksRequested():
            return f"{fact.by} asks for stacks"
        case StacksTaken():
            return f"{fact.node}: stacks of {len(fact.processes)} processes"
        case OperatorSaid():
            return f"{fact.by} says {' '.join(filter(None, (fact.verb, fact.subject, fact.other)))}: {fact.why}"
        case RanksPaced():
            slowest = max(fact.ranks, key=lambda pace: pace.own_s, default=None)
            most = f", rank {slowest.rank} took {slowest.own_s * 1e3:.1f} ms for itself" if slowest else ""
            return f"{fact.node}: pace of {len(fact.ranks)} ranks in window {fact.window}{most}"
        case SelfTestDone():
            how = "could not be made" if fact.passed is None else "passed" if fact.passed else "FAILED"
            why = "; ".join((*fact.failed, *([fact.why] if fact.why else [])))
            return f"{fact.node}: self-test {fact.test} {how}{f': {why}' if why else ''}"
        case TimePassed():
            return "a deadline is due"
        case AgentJoined():
            return f"agent of {fact.node} connects, epoch {show_epoch(fact.epoch)}, {len(fact.slots)} processes"
        case GuardNoted():
            who = f"rank {fold_ranks(fact.ranks)}, " if fact.ranks else ""
            tensor = f" in {fact.tensor}" if fact.tensor else ""
            return f"{who}step {fact.step}: {fact.what.replace('_', ' ')}{tensor}: {fact.why}"
        case CheckpointNoted():
            return checkpoint_words(fact)
        case AgentDisconnected():
            return "the controller was away" if fact.ours else f"connection of {fact.node} broke: {fact.why}"
        case LeaseExpired():
            return f"{fact.node} silent for {fact.silent_s:.1f} s"
        case LeaseRenewed():
            return f"{fact.node} speaks again"
        case AgentLeft():
            return f"agent of {fact.node} leaves: {fact.why}"
        case StoreReady():
            return f"unused store on {fact.node}"
        case StoreLost():
            return f"store of {fact.node} lost: {fact.why}"
        case SdkAttached():
            return f"{fact.node}/{fact.slot} calls keepstep.init"
        case StandbyReady():
            return f"standby {fact.node}/{fact.slot} is parked"
        case StandbyGone():
            return f"standby {fact.node}/{fact.slot} is gone: {fact.why}"
        case WorkerExited():
            by = ", by us" if fact.killed_by_us else ""
            return f"rank {fact.rank} on {fact.node} ({fact.slot}): {words(fact)}{by}"
        case WorkerFrozen():
            return f"rank {fact.rank} on {fact.node} ({fact.slot}) in state {fact.state} for {fact.for_s:.1f} s"
        case RankStalled():
            return f"rank {fact.rank} idle for {fact.idle_s:.1f} s, {stands(fact)}"
        case StallEnded():
            return f"rank {fact.rank} moves again"
        case CollectiveBroken():
            return f"rank {fact.rank}'s collective broke: {brief(fact.error)}"
        case RankJoined():
            return f"rank {fact.rank} is connected in epoch {show_epoch(fact.epoch)}"
        case RestoreMoved():
            who = f"rank {fold_ranks(fact.ranks)} is" if fact.ranks else "nobody is any more"
            return f"{who} bringing state to {fact.node}, {fact.bytes / 1e6:.1f} MB so far"
        case RankResumed():
            return f"rank {fact.rank} resumes from step {fact.step} ({fact.source})"
        case RankAdvanced():
            return f"rank {fact.rank} has done step {fact.step}"
        case RankDone():
            return f"rank {fact.rank} has completed its loop at step {fact.step}"
        case ResumeFailed():
            return f"rank {fact.rank} cannot resume in process: {fact.why}"
        case ActionDone():
            return f"done: {fact.action}"
        case ActionFailed():
            return f"failed: {fact.action}: {fact.why}"
        case RecoveredLocally():
            return f"deputy {fact.roster.origin} opened epoch {show_epoch(fact.roster.epoch)}: {fact.why}"
        case _:
            assert_never(fact)


def record_words(record: AnyRecord) -> str:
    """One line per record; empty for what only the machinery needs."""
    match record:
        case Observed():
            return "" if isinstance(record.fact, ActionDone) else f"fact      {fact_words(record.fact)}"
        case JobMoved():
            code = "" if record.exit_code is None else f" (code {record.exit_code})"
            return f"job       {record.to}{code}: {record.why}"
        case NodeMoved():
            return f"node      {record.node} {record.to}: {record.why}"
        case StandbyMoved():
            return f"standby   {record.node}/{record.slot} {record.to}: {record.why}"
        case IncidentOpened():
            return f"incident  {record.incident} OPEN: {record.title}"
        case IncidentMoved():
            return f"incident  {record.to}: {record.why}"
        case SuspectNamed():
            who = f"rank {fold_ranks(record.ranks)}" if record.ranks else "nobody"
            node = f", node {record.node}" if record.node else ""
            return f"suspect   {who}{node}, {record.category} p={record.probability:.2f}: {record.reason}"
        case PlanMade():
            passed = "".join(f"\n{'':14}not {line}" for line in rejections(record.rejected))
            return f"plan      {record.rung}: {record.reason}{passed}"
        case EpochOpened():
            r = record.roster
            return f"epoch     {show_epoch(r.epoch)} {r.mode} by {r.origin}: {_seats(record)}"
        case Ordered():
            return f"order     {action_words(record.action)}"
        case DeadlineSet():
            return ""
        case Noted():
            return f"note      {record.text}"
        case IncidentMeasured():
            kept = f"{record.survivors_kept} of {record.survivors_possible}"
            spans = (record.detect_ms, record.locate_ms, record.decide_ms, record.recover_ms)
            took = "detect {:.1f}, locate {:.1f}, decide {:.1f}, recover {:.1f} ms".format(*spans)
            return f"measured  {took}; {kept} survivors kept; {record.steps_lost} steps lost"
        case ProposalMoved() | AutomationMoved() | IncidentMarked() | InvestigationMoved() | StragglerNoted():
            return decision_words(record)
        case _:
            assert_never(record)


def rejections(rejected: Sequence[str]) -> list[str]:
    """Rungs that were passed over for the same reason, in one line."""
    why: dict[str, list[str]] = {}
    for line in rejected:
        rung, _, reason = line.partition(": ")
        why.setdefault(reason, []).append(rung)
    return [f"{', '.join(rungs)}: {reason}" if reason else rungs[0] for reason, rungs in why.items()]


def action_words(action: AnyAction) -> str:
    """What is ordered, in one phrase."""
    match action:
        case Join():
            return f"{action.node}: join epoch {show_epoch(action.epoch)}"
        case KillProcess():
            return f"{action.node}: kill {action.slot}"
        case KeepStandbys():
            return f"{action.node}: keep {action.count} standbys"
        case StopJob():
            return f"{action.node}: stop with code {action.code} ({action.category})"
        case InjectFault():
            return f"{action.node}: inject {action.fault}"
        case TakeStacks():
            return f"{action.node}: take the stacks of rank {fold_ranks(action.ranks)}, {action.why}"
        case SelfTest():
            return f"{action.node}: self-test {action.test} for {action.seconds:g} s, {action.why}"
        case TaintCheckpoints():
            verb = "clear the mark of" if action.clear else "mark as tainted"
            return f"{action.node}: {verb} checkpoints of steps {action.since + 1} to {action.until}, {action.why}"
        case _:
            assert_never(action)


def _seats(record: EpochOpened) -> str:
    """``node rank=slot ...``; a star marks a newcomer."""
    roster = record.roster
    seats = {place.node: "" for place in roster.places}
    for member in roster.members:
        seats[member.node] += f" {member.rank}={member.slot}{'*' if member.newcomer else ''}"
    return "; ".join(node + held for node, held in seats.items())
