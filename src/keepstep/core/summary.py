"""Summary: one incident as a block of text that a tired reader understands, and as the list of what happened.

Everything is read from the log's records, so a live controller, an offline log and a test show the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from keepstep.core.summary_cause import cause_lines, said_lines
from keepstep.core.summary_copies import copies_lines
from keepstep.core.summary_decisions import investigation_lines, proposal_lines
from keepstep.core.summary_lines import clock, evidence_line, record_words, rejections, stalled_line, stands
from keepstep.model.facts import RankStalled
from keepstep.model.ids import IncidentId
from keepstep.model.records import (
    AnyRecord,
    EpochOpened,
    IncidentMeasured,
    IncidentMoved,
    IncidentOpened,
    JobMoved,
    NodeMoved,
    Observed,
    PlanMade,
    SuspectNamed,
)
from keepstep.model.topology import Roster, fold_ranks

__all__ = ["AnyRecord", "incident_block", "incident_timeline", "of_incident"]

EVIDENCE_SHOWN = 8
"""Lines of evidence in a block; the timeline has them all."""
VERDICT_SHOWN = 4
"""Lines of a hang's evidence that only the verdict has: positions, stacks, connections."""
_IDLE = re.compile(r"rank \d+ idle ")
"""What the verdict repeats of the ranks' own reports."""


def incident_block(records: Iterable[AnyRecord], incident: str) -> list[str]:
    """The incident in the style of a compiler's error: what, who, where, evidence, action, cost, next command.

    Args:
        records: of the incident's job, from before its opening on; others are passed over.
    """
    own = of_incident(records, incident)
    opened = next((r for r in own if isinstance(r, IncidentOpened)), None)
    if opened is None:
        return [f"there is no incident {incident} in these records"]
    suspects = [r for r in own if isinstance(r, SuspectNamed)]
    guilty = _guilty(suspects)
    who = f"culprit: {guilty.category}  p={guilty.probability:.2f}" if guilty else "culprit: not known yet"
    title = guilty.reason if guilty else opened.title
    lines = [f"error[{incident}]: {title:<64}  {who}", f"  --> {_where(own, opened, suspects)}"]
    lines += [f"   |  {line}" for line in (*said_lines(suspects), *_evidence(own, guilty))]
    lines += [f"  = {line}" for line in (*cause_lines(guilty), *_outcome(own))]
    lines.append(f"  help: keepstep incident {incident} --timeline | keepstep logs {opened.job} --first-error")
    return lines


def incident_timeline(records: Iterable[AnyRecord], incident: str) -> list[str]:
    """Every record of the incident, one line each: time of the day, milliseconds since the first evidence, words."""
    own = of_incident(records, incident)
    opened = next((r for r in own if isinstance(r, IncidentOpened)), None)
    if opened is None:
        return [f"there is no incident {incident} in these records"]
    guilty = _guilty([r for r in own if isinstance(r, SuspectNamed)])
    lines = [f"{incident}: {guilty.reason if guilty else opened.title}"]
    for record in own:
        if words := record_words(record):
            since = (record.at - opened.onset) / 1_000_000
            lines.append(f"{clock(record.at)}  {since:+10.1f} ms  {words}")
    return lines


def _guilty(suspects: Sequence[SuspectNamed]) -> SuspectNamed | None:
    """The first culprit; the first victim where nobody else was named."""
    return next((s for s in suspects if s.category != "transient"), suspects[0] if suspects else None)


def of_incident(records: Iterable[AnyRecord], incident: str) -> list[AnyRecord]:
    """The piece of the log from the fact that opened the incident to its end, and what was said of it later."""
    own: list[AnyRecord] = []
    before: Observed | None = None
    job = None
    over = False
    for record in records:
        if not own:
            if isinstance(record, Observed):
                before = record
            elif isinstance(record, IncidentOpened) and record.incident == IncidentId(incident):
                own = [before, record] if before else [record]
                job = record.job
            continue
        if record.job != job:
            continue
        over = over or _after_end(own, record, incident)
        if not over or getattr(record, "incident", None) == incident:
            own.append(record)
    return own


def _after_end(own: Sequence[AnyRecord], record: AnyRecord, incident: str) -> bool:
    """The decision that ends an incident still belongs to it; the next fact does not."""
    if isinstance(record, IncidentOpened):
        return True
    if not isinstance(record, Observed):
        return False
    ends = ("RESOLVED", "ESCALATED")
    return any(isinstance(r, IncidentMoved) and r.incident == incident and r.to in ends for r in own)


def _where(own: Sequence[AnyRecord], opened: IncidentOpened, suspects: Sequence[SuspectNamed]) -> str:
    ranks = sorted({rank for s in suspects if s.category != "transient" for rank in s.ranks})
    parts = [f"{clock(opened.onset)}Z"]
    if (step := _step(own)) is not None:
        parts.insert(0, f"step {step}")
    roster = _last_roster(own)
    if ranks:
        parts.append(f"rank {fold_ranks(ranks)}" + (f" of {roster.world_size}" if roster else ""))
    return ", ".join(parts)


def _step(own: Sequence[AnyRecord]) -> int | None:
    """The step that was under way: what evidence says, else what was resumed from."""
    for record in own:
        if isinstance(record, Observed):
            step = getattr(record.fact, "step", None)
            if isinstance(step, int):
                return step
    return None


def _evidence(own: Sequence[AnyRecord], guilty: SuspectNamed | None) -> list[str]:
    """What was observed; of a hang, which all ranks report alike, also what told one from the others."""
    lines: list[str] = []
    stalled = [r.fact for r in own if isinstance(r, Observed) and isinstance(r.fact, RankStalled)]
    for record in own:
        fact = record.fact if isinstance(record, Observed) else None
        alike = [f for f in stalled if isinstance(fact, RankStalled) and stands(f) == stands(fact)]
        line = stalled_line(alike) if alike else evidence_line(fact) if fact is not None else ""
        if line and line not in lines:
            lines.append(line)
        if record is guilty and guilty is not None and stalled:
            told = [words for words in guilty.evidence if not _IDLE.match(words)]
            lines += [f"{clock(guilty.at)}  verdict   {words}" for words in told[:VERDICT_SHOWN]]
    if not lines and guilty is not None:  # a planned swap: what speaks against the node was seen before
        lines = [f"{clock(guilty.at)}  verdict   {words}" for words in guilty.evidence]
    if len(lines) > EVIDENCE_SHOWN:
        left = len(lines) - EVIDENCE_SHOWN
        return [*lines[:EVIDENCE_SHOWN], f"and {left} more"]
    return lines


def _outcome(own: Sequence[AnyRecord]) -> list[str]:
    lines = []
    plans = [r for r in own if isinstance(r, PlanMade)]
    for number, plan in enumerate(plans, 1):
        label = "action:" if len(plans) == 1 else f"action {number}:"
        lines.append(f"{label} {plan.rung}. {plan.reason}")
        lines += [f"        not {line}" for line in rejections(plan.rejected)]
    lines += [f"node:   {r.node} -> {r.to}: {r.why}" for r in own if isinstance(r, NodeMoved) and r.to == "QUARANTINED"]
    lines += investigation_lines(own)
    lines += proposal_lines(own)
    lines += copies_lines(own)
    measured = next((r for r in own if isinstance(r, IncidentMeasured)), None)
    ended = next((r for r in own if isinstance(r, IncidentMoved) and r.to in ("RESOLVED", "ESCALATED")), None)
    if measured is not None:
        lines += _cost(measured)
    elif ended is not None:
        code = next((r.exit_code for r in own if isinstance(r, JobMoved) and r.exit_code is not None), None)
        lines.append(f"end:    {ended.to}" + (f", the job leaves with code {code}" if code is not None else ""))
    else:
        lines.append("cost:   still going on")
    return lines


def _cost(m: IncidentMeasured) -> list[str]:
    spans = {"detect": m.detect_ms, "locate": m.locate_ms, "decide": m.decide_ms, "recover": m.recover_ms}
    steps = f"{m.steps_lost} step{'s' if m.steps_lost != 1 else ''} lost"
    kept = f"{m.survivors_kept} of {m.survivors_possible} survivors kept their processes"
    lines = [
        f"cost:   {sum(spans.values()) / 1000:.2f} s from the first evidence to a new step, {steps}; {kept}",
        "time:   " + " | ".join(f"{name} {ms:.1f}" for name, ms in spans.items()) + " ms",
    ]
    if m.phases:
        lines.append("        of it " + " | ".join(f"{name} {ms:.1f}" for name, ms in m.phases.items()))
    return lines


def _last_roster(own: Sequence[AnyRecord]) -> Roster | None:
    return next((r.roster for r in reversed(own) if isinstance(r, EpochOpened)), None)
