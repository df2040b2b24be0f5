"""Stragglers: ranks whose own time per step is longer than the others', window after window.

When all nodes have told of a window, the last ``pace_windows`` of them are judged (``slow_causes``, ``slow_links``).
What they all show is noted once, and noted again when it has ended. Only what another machine would cure, and costs
more than ``swap_gain``, leads on to a proposal to swap it, which the limits or a person decide.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from keepstep.core.cases import Proposal
from keepstep.core.decide import proposals
from keepstep.core.decide.limits import AUTO
from keepstep.core.decide.situation import spare_nodes
from keepstep.core.detect.pace_stats import typical
from keepstep.core.detect.slow_causes import OF_MACHINES, Finding, Where, Window, judge
from keepstep.core.detect.slow_links import slow_links
from keepstep.core.draft import Draft, nanos
from keepstep.core.fold_decisions import straggler_key
from keepstep.core.state import PACES_KEPT, Job
from keepstep.model.facts import RanksPaced
from keepstep.model.ids import NodeId
from keepstep.model.records import StragglerNoted
from keepstep.model.topology import fold_ranks

ASKED_AGAIN_S = 3600.0
"""A swap for which no node or no moment was found is not proposed anew before that."""
SOFT = frozenset({"data", "gc", "save", "starved", "input", "work"})
"""Causes whose ranks may change from window to window: one note for all of them."""


def ranks_paced(draft: Draft, fact: RanksPaced) -> None:
    """One node has told of its ranks' last window; the last node of all completes it."""
    job = draft.job
    if job.state != "RUNNING" or job.incident is not None or fact.epoch != job.epoch or not job.in_roster(fact.node):
        return
    if not _last_word(job, fact.window):
        return
    numbers = complete(job)
    if fact.window not in numbers[-1:]:
        return
    windows = [_window(job, number) for number in numbers[-min(draft.policy.pace_windows, PACES_KEPT) :]]
    where = _where(job)
    share = draft.policy.slow_share
    if len(windows) >= min(draft.policy.pace_windows, PACES_KEPT):
        for finding in (_in_doubt(job, one) for one in _look(windows, where, share)):
            _note(draft, finding)
            _swap(draft, finding)
    _end(draft, windows[-max(2, draft.policy.pace_windows // 2) :], where)


def _last_word(job: Job, number: int) -> bool:
    """Whether no node is behind this window; most facts end here."""
    assert job.roster is not None
    return all((told := job.paces.get(place.node)) and told[-1].window >= number for place in job.roster.places)


def complete(job: Job) -> list[int]:
    """Windows that every node of the roster has told of, oldest first."""
    assert job.roster is not None
    nodes = [place.node for place in job.roster.places]
    if any(node not in job.paces for node in nodes):
        return []
    counts = Counter(number for node in nodes for number in {fact.window for fact in job.paces[node]})
    return sorted(number for number, count in counts.items() if count == len(nodes))


def _window(job: Job, number: int) -> Window:
    facts = {node: fact for node, told in job.paces.items() for fact in told if fact.window == number}
    ranks = {
        pace.rank: pace
        for node, fact in facts.items()
        for pace in fact.ranks
        if job.roster is not None and 0 <= pace.rank < job.roster.world_size and job.seat_of(pace.rank).node == node
    }
    return Window(
        number=number,
        seconds=max(fact.seconds for fact in facts.values()),
        ranks=ranks,
        machines={node: fact.machine for node, fact in facts.items()},
        step_s=typical([pace.step_s for pace in ranks.values()]),
    )


def _where(job: Job) -> Where:
    assert job.roster is not None
    shared = Counter(place.host for place in job.roster.places)
    return Where(
        nodes={member.rank: member.node for member in job.roster.members},
        hosts={place.host: place.node for place in job.roster.places if shared[place.host] == 1},
        layout=job.spec.layout,
    )


def _in_doubt(job: Job, finding: Finding) -> Finding:
    """The benefit of the doubt: what may be the ranks' own work is not a machine's fault.

    Scripts let rank 0 do more than the others (logs, evaluation, their own checkpoints), and ranks that are slow on one
    machine after the other take their trouble along.
    """
    if finding.cause not in ("node", "device"):
        return finding
    if finding.ranks == (0,):
        why, sure = "often it does more than the others (logs, evaluation); see where it is: keepstep stacks", 0.5
    elif before := _was_slow_elsewhere(job, finding):
        why, sure = f"on {before} it was slow, too: it is its work, not the machine", 0.9
    else:
        return finding
    return dataclasses.replace(finding, cause="work", because=why, probability=min(sure, finding.probability))


def _was_slow_elsewhere(job: Job, finding: Finding) -> str:
    """The nodes that some of these ranks were taken off for being slow; empty where they never were."""
    swapped = [one for one in job.proposals.values() if one.state == "CARRIED_OUT" and one.kind == "swap"]
    nodes = [node for one in swapped if set(one.ranks) & set(finding.ranks) for node in one.nodes]
    return ", ".join(node for node in dict.fromkeys(nodes) if node not in finding.nodes)


def _look(windows: list[Window], where: Where, share: float) -> list[Finding]:
    return judge(windows, where, share) or slow_links(windows, where, share)


# ---------------------------------------------------------------- noted once


def _note(draft: Draft, finding: Finding) -> None:
    """Say it, unless it is said already; what was said of the same ranks under another cause is taken back."""
    job = draft.job
    record = StragglerNoted(
        job=job.id,
        at=draft.now,
        cause=finding.cause,
        ranks=finding.ranks,
        nodes=finding.nodes,
        slowdown=finding.slowdown,
        probability=finding.probability,
        why=words(finding),
        evidence=finding.evidence,
        peer=finding.peer,
    )
    if straggler_key(record) in job.stragglers:
        return
    same = [one for one in job.stragglers.values() if one.cause == finding.cause and _about_the_same(one, finding)]
    if same and finding.cause in SOFT:
        return
    for one in [one for one in job.stragglers.values() if _about_the_same(one, finding)]:
        _over(draft, one, f"it is another cause or other ranks now: {finding.because}")
    draft.emit(record)


def _end(draft: Draft, windows: list[Window], where: Where) -> None:
    """What none of the last windows shows, taken one by one, is over; half the share is enough to go on."""
    if not draft.job.stragglers or len(windows) < 2:
        return
    still = [finding for window in windows for finding in _look([window], where, draft.policy.slow_share / 2)]
    for one in list(draft.job.stragglers.values()):
        if not any(_about_the_same(one, finding) for finding in still):
            _over(draft, one, f"the last {len(windows)} windows do not show it any more")


def _about_the_same(one: StragglerNoted, finding: Finding) -> bool:
    if one.ranks and finding.ranks:
        return bool(set(one.ranks) & set(finding.ranks))
    mine, theirs = {*one.nodes, one.peer} - {None}, {*finding.nodes, finding.peer} - {None}
    return one.cause == finding.cause and bool(mine & theirs)


def _over(draft: Draft, one: StragglerNoted, why: str) -> None:
    draft.emit(
        StragglerNoted(
            job=one.job,
            at=draft.now,
            cause=one.cause,
            ranks=one.ranks,
            nodes=one.nodes,
            slowdown=one.slowdown,
            probability=one.probability,
            why=why,
            peer=one.peer,
            over=True,
        )
    )
    for proposal in list(draft.job.proposals.values()):
        if proposal.open and proposal.origin == "straggler" and proposal.nodes == one.nodes:
            proposals.move(draft, proposal, "REJECTED", by=AUTO, why=f"its reason is gone: {why}")


def words(finding: Finding) -> str:
    """``rank 5 on n2 is 1.3x slow: clock 1.2 of 2.9 GHz; costs 18 % of the job``."""
    if finding.cause == "link":
        who = f"node {finding.nodes[0]}" if finding.peer is None else f"{finding.nodes[0]} - {finding.peer}"
        subject = f"{who}: {finding.because}"
    elif finding.times > 1.0:
        some = f"ranks {fold_ranks(finding.ranks)}" if len(finding.ranks) > 1 else f"rank {finding.ranks[0]}"
        at = f" on {', '.join(finding.nodes)}" if finding.nodes else ""
        verb = "are" if len(finding.ranks) > 1 else "is"
        subject = f"{some}{at} {verb} {finding.times:.2g}x slow: {finding.because}"
    else:
        subject = finding.because
    return f"{subject}; costs {(1.0 - 1.0 / finding.slowdown) * 100:.0f} % of the job"


# ---------------------------------------------------------------- and perhaps swapped


def _swap(draft: Draft, finding: Finding) -> None:
    """Propose another machine where that would win back enough; a pair of nodes does not tell which of them it is."""
    job, gain = draft.job, 1.0 - 1.0 / finding.slowdown
    if finding.cause not in OF_MACHINES or finding.peer is not None or gain <= draft.policy.swap_gain:
        return
    if not spare_nodes(job) or any(_in_vain(draft, one, finding.nodes) for one in job.proposals.values()):
        return
    proposals.propose(
        draft,
        kind="swap",
        nodes=finding.nodes,
        ranks=finding.ranks,
        reason=words(finding),
        evidence=finding.evidence,
        probability=finding.probability,
        rejected=(
            f"wait: {gain * 100:.0f} % of the job's time is lost for as long as it lasts",
            "restart its processes: neither data, collections, snapshots nor a neighbour explains it",
        ),
        origin="straggler",
    )


def _in_vain(draft: Draft, one: Proposal, nodes: tuple[NodeId, ...]) -> bool:
    lately = one.at > draft.now - nanos(ASKED_AGAIN_S)
    return one.state == "EXPIRED" and lately and set(nodes) <= set(one.nodes)
