"""Fold of decisions about living nodes: proposals, automation, marks of people, investigations, stragglers."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from keepstep.core.cases import Investigation, Proposal
from keepstep.core.decide.proposal_machine import PROPOSAL
from keepstep.core.locate.investigation_machine import INVESTIGATION
from keepstep.core.state import HISTORY_KEPT, INVESTIGATIONS_KEPT, PROPOSALS_KEPT, Job
from keepstep.model.records import (
    AutomationMoved,
    IncidentMarked,
    InvestigationMoved,
    ProposalMoved,
    StragglerNoted,
)

BREAKER_NS = 3_600 * 1_000_000_000
"""Evictions of the last hour are remembered whatever comes after them: the breaker counts them."""


def fold_decision(
    job: Job, record: ProposalMoved | AutomationMoved | IncidentMarked | InvestigationMoved | StragglerNoted
) -> None:
    """Change ``job`` by one of these records.

    Raises:
        IllegalMove: a transition that the machine's table does not have.
    """
    match record:
        case ProposalMoved():
            _proposal(job, record)
        case AutomationMoved():
            if record.to == "frozen" and job.automation != "frozen":
                job.thawed = job.automation
            job.automation = record.to
        case IncidentMarked():
            _marked(job, record)
        case InvestigationMoved():
            _investigation(job, record)
        case StragglerNoted():
            key = straggler_key(record)
            job.stragglers.pop(key, None)
            if not record.over:
                job.stragglers[key] = record
        case _:
            assert_never(record)


def straggler_key(record: StragglerNoted) -> str:
    return f"{record.cause}:{','.join(map(str, record.ranks))}"


def _proposal(job: Job, record: ProposalMoved) -> None:
    known = job.proposals.get(record.proposal)
    if known is None:
        job.proposal_count += 1
        job.proposals[record.proposal] = Proposal(
            id=record.proposal,
            state=record.to,
            kind=record.kind,
            incident=record.incident,
            nodes=record.nodes,
            ranks=record.ranks,
            probability=record.probability,
            reason=record.why,
            evidence=record.evidence,
            rejected=record.rejected,
            cost_if_wrong=record.cost_if_wrong,
            held=record.held,
            testable=record.testable,
            origin=record.origin,
            opened=record.at,
            at=record.at,
            by=record.by,
            why=record.why,
        )
        surplus = max(0, len(job.proposals) - PROPOSALS_KEPT)
        over = [one.id for one in job.proposals.values() if not (one.open or one.carried > record.at - BREAKER_NS)]
        for old in over[:surplus]:
            del job.proposals[old]
        return
    PROPOSAL.check(known.state, record.to)
    job.proposals[known.id] = replace(
        known,
        state=record.to,
        at=record.at,
        by=record.by,
        why=record.why,
        held=record.held or (known.held if record.to == "PROPOSED" else ""),
        incident=record.incident or known.incident,
        carried=record.at if record.to == "CARRIED_OUT" else known.carried,
    )
    if record.to == "CARRIED_OUT":
        for node in known.nodes:
            job.evicted[node] = record.at


def _marked(job: Job, record: IncidentMarked) -> None:
    incident = job.incidents.get(record.incident)
    if incident is None:
        return
    if record.mark == "merged":
        job.incidents[incident.id] = replace(incident, merged=record.other)
    elif record.mark == "acked":
        job.incidents[incident.id] = replace(incident, acked=record.by)


def _investigation(job: Job, record: InvestigationMoved) -> None:
    known = job.investigations.get(record.investigation)
    line = f"{record.to}: {record.why}" + "".join(f"; {text}" for text in record.evidence)
    if known is None:
        job.investigation_count += 1
        job.investigations[record.investigation] = Investigation(
            id=record.investigation,
            state=record.to,
            ranks=record.ranks,
            nodes=record.nodes,
            tensor=record.tensor,
            step=record.step,
            since=record.since,
            probability=record.probability,
            opened=record.at,
            at=record.at,
            why=record.why,
            history=(line,),
            incident=record.incident,
        )
        surplus = max(0, len(job.investigations) - INVESTIGATIONS_KEPT)
        for old in [one.id for one in job.investigations.values() if not one.open][:surplus]:
            del job.investigations[old]
        return
    INVESTIGATION.check(known.state, record.to)
    job.investigations[known.id] = replace(
        known,
        state=record.to,
        ranks=record.ranks or known.ranks,
        nodes=record.nodes or known.nodes,
        probability=record.probability or known.probability,
        at=record.at,
        why=record.why,
        history=(*known.history, line)[-HISTORY_KEPT:],
        incident=record.incident or known.incident,
    )
