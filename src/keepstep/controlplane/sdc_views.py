"""View of investigations into silent data corruption."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepstep.controlplane.moments import when
from keepstep.core.cases import Investigation
from keepstep.core.locate.investigation_machine import INVESTIGATION
from keepstep.core.locate.sdc_orders import number_of
from keepstep.core.state import Job
from keepstep.model.topology import fold_ranks


def investigations_view(jobs: Iterable[Job]) -> dict[str, Any]:
    """Investigations of some jobs, oldest first; ``next`` is where each may go from here."""
    rows = [_row(job, one) for job in jobs for one in job.investigations.values()]
    return {"schema": "keepstep.v1/InvestigationList", "investigations": rows}


def _row(job: Job, one: Investigation) -> dict[str, Any]:
    tests = [test for test in job.selftests.values() if test.request == number_of(one)]
    return {
        "id": one.id,
        "job": job.id,
        "state": one.state,
        "open": one.open,
        "next": list(INVESTIGATION.moves[one.state]),
        "ranks": fold_ranks(one.ranks),
        "nodes": list(one.nodes),
        "tensor": one.tensor,
        "step": one.step,
        "clean_step": one.since,
        "probability": one.probability,
        "incident": one.incident,
        "why": one.why,
        "history": list(one.history),
        "selftests": [
            {"node": test.node, "passed": test.passed, "digest": test.digest, "rounds": test.rounds,
             "seconds": test.seconds, "failed": list(test.failed), "why": test.why}
            for test in tests
        ],
        "opened_at": when(one.opened),
        "at": when(one.at),
    }  # fmt: skip
