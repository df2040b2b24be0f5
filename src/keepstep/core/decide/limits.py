"""Limits: what holds automation back from taking living nodes out of a job, each as a sentence for people.

Taking out a machine that lives is the one decision whose error nobody forgives: it is always a guess, and the worst
guesses come in crowds, when something that many nodes share is at fault. So each change is measured against a mode,
a rate (breaker), a place (domain guard) and a list of what is never touched. A person may go beyond all of them but
``frozen``. What is dead is not asked about here: it is replaced in every mode.
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep.core.draft import nanos
from keepstep.core.state import Job
from keepstep.model.ids import Nanos, NodeId
from keepstep.model.records import Automation
from keepstep.model.settings import Policy

AUTO = "auto"
"""Who decides where no person does."""
HOUR_S = 3600.0
"""Span of the breaker; also how long a person's no (or undoing) about a node is remembered."""


_CAREFUL: tuple[Automation, ...] = ("frozen", "observe", "assist", "auto")


def mode_of(job: Job, policy: Policy) -> Automation:
    """What a person has set for this job, else what it has by itself."""
    return job.automation or usual_mode(job, policy)


def usual_mode(job: Job, policy: Policy) -> Automation:
    """What the job's owner or the controller's policy says, whichever is stricter."""
    return min(job.spec.mode or policy.mode, policy.mode, key=_CAREFUL.index)


def per_hour(job: Job, policy: Policy) -> int:
    """Living nodes that automation may take out of this job within an hour."""
    asked = job.spec.evictions_per_hour
    return policy.evictions_per_hour if asked is None else min(asked, policy.evictions_per_hour)


def objection(job: Job, nodes: Collection[NodeId], now: Nanos, policy: Policy, *, own: str = "") -> str:
    """Why automation may not take these living nodes out by itself; empty when it may.

    Args:
        own: id of their own proposal, which does not count against itself.
    """
    return (
        against_mode(job, policy)
        or _against_nodes(job, nodes, now, policy)
        or _against_breaker(job, nodes, now, policy, own)
        or _against_domain(job, nodes, policy, own)
        or _against_start(job)
        or _against_last(job, nodes)
    )


def against_mode(job: Job, policy: Policy) -> str:
    """What the mode alone says."""
    match mode_of(job, policy):
        case "frozen":
            return "automation is frozen: `keepstep thaw` ends that"
        case "observe":
            return "mode observe: said, not done"
        case "assist":
            return "mode assist: waits for a person"
        case "auto":
            return ""


def _against_nodes(job: Job, nodes: Collection[NodeId], now: Nanos, policy: Policy) -> str:
    if kept := [name for name in nodes if name in (*policy.protected, *job.spec.protected)]:
        return f"node {', '.join(kept)} is protected: only a person may take it out"
    for one in job.proposals.values():
        if (
            one.state == "UNDONE"
            and one.by != AUTO
            and one.at > now - nanos(HOUR_S)
            and (again := set(one.nodes) & set(nodes))
        ):
            return f"{one.by} has just taken {one.id} back: only a person may take node {min(again)} out again"
    return ""


def taken_out(job: Job, now: Nanos) -> int:
    """Living nodes that were taken out of the job within the last hour, undone or not."""
    return sum(len(one.nodes) for one in job.proposals.values() if one.carried > now - nanos(HOUR_S))


def _against_breaker(job: Job, nodes: Collection[NodeId], now: Nanos, policy: Policy, own: str) -> str:
    waiting = sum(len(one.nodes) for one in job.proposals.values() if one.state == "APPROVED" and one.id != own)
    before = taken_out(job, now) + waiting
    ceiling = per_hour(job, policy)
    if before + len(nodes) <= ceiling:
        return ""
    more = f", {waiting} of them still to go" if waiting else ""
    return (
        f"the breaker is open: {before} living nodes within an hour{more}, "
        f"and {len(nodes)} more would pass evictions_per_hour {ceiling}"
    )


def _against_domain(job: Job, nodes: Collection[NodeId], policy: Policy, own: str) -> str:
    for rack in sorted({job.nodes[name].rack for name in nodes if name in job.nodes} - {""}):
        suspects = rack_suspects(job, rack, nodes, own)
        if len(suspects) > policy.evictions_per_domain:
            return (
                f"{len(suspects)} nodes of rack {rack} are suspect at the same time ({', '.join(suspects)}): "
                f"the rack is the suspect, not each of them (evictions_per_domain {policy.evictions_per_domain})"
            )
    return ""


def rack_suspects(job: Job, rack: str, nodes: Collection[NodeId] = (), own: str = "") -> list[NodeId]:
    """Nodes of one rack that are out, or about to go, or suspected, besides ``nodes`` themselves."""
    suspect = {*job.evicted, *nodes}
    suspect |= {name for one in job.proposals.values() if one.open and one.id != own for name in one.nodes}
    return sorted(name for name in suspect if name in job.nodes and job.nodes[name].rack == rack)


def _against_start(job: Job) -> str:
    if job.level == 0 and job.incident is None:
        return "the script does not call keepstep.init, so every process of the job would have to start anew"
    return ""


def _against_last(job: Job, nodes: Collection[NodeId]) -> str:
    """State in memory needs a second node that stays."""
    if job.roster is not None and not [at for at in job.roster.places if at.node not in nodes]:
        return "no other node of the job would stay, and their state in memory is nowhere else"
    return ""
