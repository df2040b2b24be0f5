"""One line of text per decision about living nodes, for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from keepstep.model.records import (
    AnyRecord,
    AutomationMoved,
    IncidentMarked,
    InvestigationMoved,
    ProposalMoved,
    StragglerNoted,
)
from keepstep.model.topology import fold_ranks

Decision = ProposalMoved | AutomationMoved | IncidentMarked | InvestigationMoved | StragglerNoted


def decision_words(record: Decision) -> str:
    match record:
        case ProposalMoved():
            what = f"{record.kind} {', '.join(record.nodes)} " if record.nodes else ""
            held = f" (held: {record.held})" if record.held else ""
            return f"proposal  {record.proposal} {what}{record.to} by {record.by}: {record.why}{held}"
        case AutomationMoved():
            return f"mode      {record.to} by {record.by}: {record.why}"
        case IncidentMarked():
            into = f" into {record.other}" if record.other else ""
            return f"incident  {record.incident} {record.mark}{into} by {record.by}: {record.why}"
        case InvestigationMoved():
            who = f" rank {fold_ranks(record.ranks)}" if record.ranks else ""
            more = "".join(f"; {line}" for line in record.evidence)
            return f"sdc       {record.investigation}{who} {record.to}: {record.why}{more}"
        case StragglerNoted():
            who = f"rank {fold_ranks(record.ranks)}" if record.ranks else f"node {', '.join(record.nodes)}"
            if record.over:
                return f"pace      {who}: no longer slow ({record.cause}): {record.why}"
            return f"pace      {who} slow ({record.cause}), the job takes {record.slowdown:.2f} x as long: {record.why}"
        case _:
            assert_never(record)


def investigation_lines(records: Iterable[AnyRecord]) -> list[str]:
    """How investigations of silent corruption went on, one line per state, for the page of the incident they are of."""
    moves = [record for record in records if isinstance(record, InvestigationMoved)]
    lines = []
    for move in moves:
        more = "".join(f"; {line}" for line in move.evidence)
        lines.append(f"sdc:    {move.investigation} {move.to}: {move.why}{more}")
    return lines


def proposal_lines(records: Iterable[AnyRecord]) -> list[str]:
    """What became of each proposal in these records, and how a person can decide otherwise."""
    first: dict[str, ProposalMoved] = {}
    last: dict[str, ProposalMoved] = {}
    for record in records:
        if isinstance(record, ProposalMoved):
            first.setdefault(record.proposal, record)
            last[record.proposal] = record
    lines = []
    for name, move in last.items():
        opened = first[name]
        what = f"{opened.kind} of node {', '.join(opened.nodes)} " if opened.nodes else ""
        match move.to:
            case "PROPOSED":
                held = f"{opened.held}; " if opened.held else ""
                way_out = f"{held}keepstep approve {name} | keepstep reject {name}"
            case "APPROVED":
                way_out = f"waits for a spare node and a calm moment; keepstep reject {name}"
            case "CARRIED_OUT":
                way_out = f"approved by {move.by}; keepstep undo {name}"
            case "REJECTED" | "EXPIRED" | "UNDONE":
                way_out = move.why
        lines.append(f"asked:  {name} {what}{move.to}: {way_out}")
    return lines
