"""What a job's page says of its pace: who is slow now, and how each rank's last window went."""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.controlplane.moments import when
from keepstep.core.state import Job
from keepstep.model.topology import fold_ranks

View = dict[str, Any]


def straggler_rows(job: Job) -> list[View]:
    """Those that are slow now, the dearest first."""
    return [
        {
            "cause": one.cause,
            "ranks": fold_ranks(one.ranks),
            "nodes": list(one.nodes),
            "peer": one.peer,
            "since": when(one.at),
            "slowdown": one.slowdown,
            "cost_share": round(1.0 - 1.0 / one.slowdown, 4) if one.slowdown > 0 else 0.0,
            "probability": one.probability,
            "why": one.why,
            "evidence": list(one.evidence),
        }
        for one in sorted(job.stragglers.values(), key=lambda one: -one.slowdown)
    ]


def pace_rows(job: Job) -> list[View]:
    """The newest window of each rank, seconds per step; empty before the first one is in."""
    newest = {pace.rank: (told[-1].window, pace) for told in job.paces.values() for pace in told[-1].ranks}
    return [
        {"window": window, **msgspec.to_builtins(pace), "own_s": round(pace.own_s, 9)}
        for _, (window, pace) in sorted(newest.items())
    ]
