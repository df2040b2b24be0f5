"""Views of what is decided about living nodes: proposals, and what automation may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepstep.controlplane.moments import when
from keepstep.core.cases import Proposal
from keepstep.core.decide.limits import mode_of, per_hour
from keepstep.core.state import Job
from keepstep.model.settings import Policy
from keepstep.model.topology import fold_ranks


def proposals_view(jobs: Iterable[Job]) -> dict[str, Any]:
    """Proposals of some jobs, oldest first."""
    rows = [_proposal_row(job, one) for job in jobs for one in job.proposals.values()]
    return {"schema": "keepstep.v1/ProposalList", "proposals": rows}


def automation_row(job: Job, policy: Policy) -> dict[str, Any]:
    """What automation may do to the job's living nodes, and what it has done."""
    return {
        "mode": mode_of(job, policy),
        "proposals_open": [one.id for one in job.proposals.values() if one.open],
        "evicted": sorted(job.evicted),
        "evictions_per_hour": per_hour(job, policy),
        "protected": sorted({*policy.protected, *job.spec.protected}),
    }


def _proposal_row(job: Job, one: Proposal) -> dict[str, Any]:
    return {
        "id": one.id,
        "job": job.id,
        "state": one.state,
        "open": one.open,
        "kind": one.kind,
        "nodes": list(one.nodes),
        "ranks": fold_ranks(one.ranks),
        "probability": one.probability,
        "reason": one.reason,
        "held": one.held,
        "evidence": list(one.evidence),
        "rejected": list(one.rejected),
        "cost_if_wrong": one.cost_if_wrong,
        "incident": one.incident,
        "by": one.by,
        "why": one.why,
        "opened_at": when(one.opened),
        "at": when(one.at),
        "carried_out_at": when(one.carried),
    }
