"""Silent data corruption: what the guard saw becomes an investigation, and each step of it an order or a verdict.

A value that is wrong without an error may come from data, code, a passing fault or a broken machine, and each of them
wants another answer. So nobody is evicted on a first sighting: the guard does the steps again from a clean state and
says what came of it (``judged``), replicas that did the same work are compared, and a machine that is left over
examines itself while training goes on. A test that passes proves nothing for good; that a machine was suspected is
remembered, and the second corruption from it within ``Policy.sdc_window_s`` confirms.
"""

from __future__ import annotations

from keepstep.core.cases import Investigation
from keepstep.core.decide.proposals import propose
from keepstep.core.detect import deadlines
from keepstep.core.draft import Draft, nanos
from keepstep.core.locate.sdc_orders import clear_taint, order_soak, order_taint
from keepstep.core.locate.sdc_tell import tell
from keepstep.core.state import Job
from keepstep.model.facts import GuardNoted, SelfTestDone
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import InvestigationMoved, InvestigationState

AUTO = "auto"
"""Who moves an investigation where no person does."""
SEEN, NAMED, TWICE, PROVEN = 0.3, 0.7, 0.95, 0.99
"""Probability that it is the machine: replicas differ and nobody is named; one rank of several is; it was named
before; its own work is wrong where the right result is known."""


def guard_noted(draft: Draft, fact: GuardNoted) -> None:
    """The guard told of numbers that cannot be right, or of what came of them."""
    job = draft.job
    if job.over or job.roster is None:
        return
    match fact.what:
        case "replicas":
            _replicas(draft, fact)
        case "rolled_back":
            known = _open_at(job, fact)
            if known is not None and known.state == "SUSPECTED":
                move(draft, known, "REPLAY", fact.why)
        case "judged":
            _judged(draft, fact)
        case _:
            pass


def self_test_done(draft: Draft, fact: SelfTestDone) -> None:
    """A node has examined itself, because it is a suspect or to be compared with one."""
    job = draft.job
    known = job.investigations.get(investigation_id(job, fact.request))
    if known is None or known.state != "SOAK":
        return
    if fact.node not in known.nodes:
        if fact.passed is False:
            draft.note(
                f"{fact.node}, which was only to be compared with, failed the self-test: {'; '.join(fact.failed)}"
            )
        return
    work = f"{fact.rounds} rounds in {fact.seconds:.0f} s"
    if fact.passed is None:
        draft.note(f"{known.id}: {fact.node} could not examine itself: {fact.why}; `keepstep sdc step` goes on by hand")
    elif not fact.passed:
        confirm(draft, known, f"{fact.node} failed the self-test ({work})", fact.failed, PROVEN)
    elif not _awaited(job, known, fact):
        others = [one for one in job.selftests.values() if one.request == fact.request and one.node not in known.nodes]
        same = [one.node for one in others if one.digest == fact.digest]
        evidence = [f"{fact.node}: {work}, digest {fact.digest}"]
        evidence += [f"{node} came to the same digest" for node in same]
        why = f"{fact.node} passed the self-test ({work}); a second corruption from it would be proof"
        move(draft, known, "CLEARED", why, evidence=tuple(evidence))


def soak_is_over(draft: Draft, name: str) -> None:
    """A suspect has had time enough: its test was lost with its agent, or with the orders of a past epoch."""
    known = draft.job.investigations.get(name)
    if known is None or known.state != "SOAK" or draft.job.over:
        return
    why = "no self-test came to an end in time; a second corruption from it would be proof"
    move(draft, known, "CLEARED", why)


def confirm(draft: Draft, known: Investigation, why: str, evidence: tuple[str, ...], probability: float) -> None:
    """It is the machine: say so, and propose to take it out."""
    move(draft, known, "CONFIRMED", why, evidence=evidence, probability=probability)
    known = draft.job.investigations[known.id]
    if known.nodes:
        propose(
            draft,
            kind="evict",
            nodes=known.nodes,
            ranks=known.ranks,
            reason=f"silent data corruption: {why}",
            evidence=known.history,
            probability=probability,
            rejected=("roll back only: the same machine would corrupt again",),
            cost_if_wrong="a healthy node stands idle until it is taken back (`keepstep undo`)",
            incident=known.incident,
        )


# -------------------------------------------------------------------- what the guard says


def _replicas(draft: Draft, fact: GuardNoted) -> None:
    job = draft.job
    known = _open_about(job, fact.ranks)
    told_only = "goes back" not in fact.why and "stop" not in fact.why  # nothing will be done again
    if known is not None:
        if told_only and known.state in ("VOTE", "SOAK"):
            _again(draft, known, fact)
        return  # otherwise the steps are done again first: what comes of it is judged
    new = _begin(draft, fact, NAMED if fact.ranks else SEEN)
    if told_only:
        _conclude(draft, new, "nothing is done again (the guard only tells)")


def _judged(draft: Draft, fact: GuardNoted) -> None:
    job, known = draft.job, _open_at(draft.job, fact)
    if known is None:
        if fact.verdict in ("data", "software") or not fact.ranks:
            if fact.verdict:
                tell(draft, fact, None)
            return
        known = _begin(draft, fact, NAMED)
        again = False
    else:
        again = known.state in ("VOTE", "SOAK")
        if fact.ranks and not known.ranks:
            known = _named(draft, known, fact)
    known = job.investigations[known.id]
    if fact.verdict in ("data", "software"):
        _through(draft, known, "REPLAY", fact.why)
        move(draft, job.investigations[known.id], "CLEARED", f"{fact.verdict}: {fact.why}", evidence=(_line(fact),))
        tell(draft, fact, known.incident)
        clear_taint(draft, known)
    elif fact.verdict == "hardware":
        _through(draft, known, "REPLAY", fact.why)
        confirm(draft, job.investigations[known.id], fact.why, (_line(fact),), TWICE)
    elif again:
        _again(draft, known, fact)
    else:
        _through(draft, known, "REPLAY", fact.why)
        _conclude(draft, job.investigations[known.id], fact.why)


def _conclude(draft: Draft, known: Investigation, why: str) -> None:
    """It is neither data nor code, as far as doing it again can tell: was it this machine before?"""
    before = _before(draft, known.nodes, but=known.id)
    if before is not None and _stands_out(draft, known.nodes):
        _through(draft, known, "VOTE", f"{before.id} suspected the same machine")
        _second(draft, draft.job.investigations[known.id], before)
    else:
        _vote(draft, known, why)


def _again(draft: Draft, known: Investigation, fact: GuardNoted) -> None:
    """It was seen again while the suspect examines itself."""
    nodes = nodes_of(draft.job, fact.ranks)
    if known.nodes and set(fact.ranks) & set(known.ranks) and not set(nodes) & set(known.nodes):
        why = f"the same rank differs on {' and '.join((*known.nodes, *nodes))}: code or data goes with it, no machine"
        move(draft, known, "CLEARED", why, evidence=(_line(fact),))
        return
    lately = known.opened > draft.now - nanos(draft.policy.sdc_window_s)
    if lately and set(nodes) & set(known.nodes) and _stands_out(draft, known.nodes, more=1):
        confirm(draft, known, f"a second corruption: {fact.why}", (_line(fact),), TWICE)
    else:
        draft.note(f"{known.id}: seen again, and that convicts nobody: {_line(fact)}")


def _stands_out(draft: Draft, nodes: tuple[NodeId, ...], *, more: int = 0) -> bool:
    """Whether these machines were suspected more than twice as often as all others within the window.

    Where several machines differ in turn, something that they have in common is at fault.

    Args:
        more: sightings of these machines that no investigation of its own was opened for.
    """
    since = draft.now - nanos(draft.policy.sdc_window_s)
    seen = [
        bool(set(one.nodes) & set(nodes))
        for one in draft.job.investigations.values()
        if one.nodes and one.opened > since and not _exonerated(one)
    ]
    return sum(seen) + more > 2 * (len(seen) - sum(seen))


def _begin(draft: Draft, fact: GuardNoted, probability: float) -> Investigation:
    """Suspect, mark what may be spoilt, and tell. Nobody is convicted before it is known what came of it."""
    job = draft.job
    since = fact.since if fact.since is not None else fact.step
    incident = tell(draft, fact, None)
    draft.emit(
        InvestigationMoved(
            job=job.id,
            at=draft.now,
            investigation=investigation_id(job, job.investigation_count + 1),
            to="SUSPECTED",
            by=AUTO,
            why=fact.why,
            ranks=fact.ranks,
            nodes=nodes_of(job, fact.ranks),
            tensor=fact.tensor,
            step=fact.step,
            since=since,
            probability=probability,
            evidence=(_line(fact),),
            incident=incident,
        )
    )
    new = job.investigations[investigation_id(job, job.investigation_count)]
    if fact.since is not None:
        order_taint(draft, new, before=fact.at)
    return job.investigations[new.id]


def _named(draft: Draft, known: Investigation, fact: GuardNoted) -> Investigation:
    """Doing it again has named a rank that nobody could name before."""
    nodes = nodes_of(draft.job, fact.ranks)
    if known.state in ("SUSPECTED", "REPLAY"):
        move(draft, known, "VOTE", fact.why, ranks=fact.ranks, nodes=nodes, evidence=(_line(fact),), probability=NAMED)
    tell(draft, fact, draft.job.investigations[known.id].incident)
    return draft.job.investigations[known.id]


def _second(draft: Draft, known: Investigation, before: Investigation) -> None:
    why = f"the second corruption from one machine ({before.id} was the first)"
    confirm(draft, known, why, before.history[-1:], TWICE)


def _vote(draft: Draft, known: Investigation, why: str) -> None:
    """Whoever differs from those that did the same work examines itself."""
    _through(draft, known, "VOTE", why)
    known = draft.job.investigations[known.id]
    if not known.nodes:
        move(draft, known, "CLEARED", "nobody can be named: no replica was outvoted, and it did not come again")
        return
    tested = order_soak(draft, known)
    if tested:
        draft.wake(deadlines.soak(known.id), draft.policy.soak_s + draft.policy.soak_patience_s)
        move(draft, known, "SOAK", f"self-test of {', '.join(tested)} while training goes on")


def _through(draft: Draft, known: Investigation, to: InvestigationState, why: str) -> None:
    """Go on to ``to`` where the investigation has not come so far yet."""
    order = ("SUSPECTED", "REPLAY", "VOTE", "SOAK")
    now = draft.job.investigations[known.id].state
    if now in order and order.index(now) < order.index(to):
        move(draft, draft.job.investigations[known.id], to, why)


# -------------------------------------------------------------------- looking things up


def move(
    draft: Draft,
    known: Investigation,
    to: InvestigationState,
    why: str,
    *,
    by: str = AUTO,
    ranks: tuple[Rank, ...] = (),
    nodes: tuple[NodeId, ...] = (),
    evidence: tuple[str, ...] = (),
    probability: float = 0.0,
) -> None:
    draft.emit(
        InvestigationMoved(
            job=draft.job.id,
            at=draft.now,
            investigation=known.id,
            to=to,
            by=by,
            why=why,
            ranks=ranks,
            nodes=nodes,
            evidence=evidence,
            probability=probability,
            incident=known.incident,
        )
    )


def investigation_id(job: Job, number: int) -> str:
    return f"{job.id}-sdc{number}"


def nodes_of(job: Job, ranks: tuple[Rank, ...]) -> tuple[NodeId, ...]:
    """The nodes of these ranks in the present roster; ranks that it does not have are passed over."""
    assert job.roster is not None
    held = [job.seat_of(rank).node for rank in ranks if 0 <= rank < job.roster.world_size]
    return tuple(dict.fromkeys(held))


def _open_about(job: Job, ranks: tuple[Rank, ...]) -> Investigation | None:
    """The open investigation of any of these ranks; of nobody in particular where there are none."""
    running = [one for one in job.investigations.values() if one.open]
    return next((one for one in running if set(one.ranks) & set(ranks) or not (one.ranks or ranks)), None)


def _open_at(job: Job, fact: GuardNoted) -> Investigation | None:
    """The open investigation that what the guard says now is about."""
    running = [one for one in job.investigations.values() if one.open]
    same = [one for one in running if one.step == fact.step]
    return next(iter(same), None) or _open_about(job, fact.ranks)


def _before(draft: Draft, nodes: tuple[NodeId, ...], but: str = "") -> Investigation | None:
    """An earlier investigation of one of these machines, within the window, that did not end with data or code."""
    since = draft.now - nanos(draft.policy.sdc_window_s)
    return next(
        (
            one
            for one in draft.job.investigations.values()
            if one.id != but and one.opened > since and set(one.nodes) & set(nodes) and not _exonerated(one)
        ),
        None,
    )


def _exonerated(one: Investigation) -> bool:
    """Something else was to blame, or a person has said so."""
    return one.state == "CLEARED" and "self-test" not in one.why


def _awaited(job: Job, known: Investigation, fact: SelfTestDone) -> bool:
    """Whether another suspect of this investigation has yet to examine itself."""
    done = {node for node, one in job.selftests.items() if one.request == fact.request}
    return not set(known.nodes) <= done | {fact.node}


def _line(fact: GuardNoted) -> str:
    who = f"rank {', '.join(map(str, fact.ranks))}: " if fact.ranks else ""
    against = f" (against rank {', '.join(map(str, fact.others))})" if fact.others else ""
    return f"step {fact.step}, {who}{fact.verdict or fact.what}{f' in {fact.tensor}' if fact.tensor else ''}{against}"
