"""All that is known about an incident, with where it comes from: facts, words of processes, conclusions, stacks."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from keepstep.core.summary import of_incident
from keepstep.core.summary_lines import clock, evidence_line
from keepstep.model.facts import StacksTaken
from keepstep.model.ids import Nanos
from keepstep.model.records import AnyRecord, IncidentOpened, Observed, SuspectNamed
from keepstep.model.stacks import ProcessStacks


class Piece(Struct, frozen=True, kw_only=True):
    """One line of evidence.

    Attributes:
        at: the observer's clock for a fact, the controller's for a conclusion.
        source: who says so: ``process``, ``kernel``, ``progress``, ``trainer``, ``node``, ``deputy``, ``guard``; or
            ``verdict``, what the mind took from them.
        since_ms: since the first evidence of the incident, by the controller's clock.
        fact: the kind of fact; empty for a verdict.
    """

    at: Nanos
    since_ms: float
    source: str
    node: str
    fact: str
    words: str


def incident_evidence(records: Iterable[AnyRecord], incident: str) -> list[Piece]:
    """Every line of evidence in the order of the log; nothing is left out and nothing is said twice.

    Args:
        records: of the incident's job, from before its opening on; others are passed over.
    """
    own = of_incident(records, incident)
    opened = next((record for record in own if isinstance(record, IncidentOpened)), None)
    if opened is None:
        return []
    pieces: list[Piece] = []
    said: set[str] = set()
    for record in own:
        since = (record.at - opened.onset) / 1_000_000
        if isinstance(record, Observed) and (line := evidence_line(record.fact)):
            _, source, words = line.split(maxsplit=2)
            fact = record.fact
            piece = Piece(
                at=fact.at, since_ms=since, source=source, node=fact.node, fact=type(fact).__name__, words=words
            )
            pieces.append(piece)
            said.add(words)
        elif isinstance(record, SuspectNamed):
            for words in record.evidence:
                if words not in said:
                    said.add(words)
                    pieces.append(
                        Piece(
                            at=record.at, since_ms=since, source="verdict", node=record.node or "", fact="", words=words
                        )
                    )
    return pieces


def evidence_lines(pieces: Iterable[Piece]) -> list[str]:
    """One line of text per piece."""
    return [f"{clock(one.at)}  {one.since_ms:+10.1f} ms  {one.source:<9} {one.words}" for one in pieces]


def incident_stacks(records: Iterable[AnyRecord], incident: str) -> tuple[ProcessStacks, ...]:
    """Where the processes stood when they were last looked at in the course of this incident; often nobody had to."""
    looks: dict[str, StacksTaken] = {}
    for record in of_incident(records, incident):
        if isinstance(record, Observed) and isinstance(record.fact, StacksTaken):
            known = looks.get(record.fact.node)
            if known is None or (record.fact.epoch, record.fact.request) >= (known.epoch, known.request):
                looks[record.fact.node] = record.fact
    newest = max((fact.request for fact in looks.values()), default=0)
    return tuple(process for fact in looks.values() if fact.request == newest for process in fact.processes)
