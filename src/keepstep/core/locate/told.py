"""Told: what the processes of an incident have written, read together by the engine of ``keepstep explain``.

Exits say how a process ended; its words may say why. The words of all ranks are read at once, since the loud ones are
mostly victims of a quiet one. The engine costs tens of microseconds a line, so what it is given is bounded by the
constants below, and the same words are not read twice.
"""

from __future__ import annotations

import functools
import re

from msgspec import Struct

from keepstep.core.diagnose.result import Diagnosis
from keepstep.core.locate.exits import echoes
from keepstep.core.state import Job, Seat, seat_key
from keepstep.model.facts import WorkerExited
from keepstep.model.ids import NodeId
from keepstep.model.records import Category

READ_VOICES = 12
"""Processes whose words are read; those that may name a cause come first."""
READ_LINES = 64
"""Of one process."""
READ_CHARS = 8_000
EVIDENCE_LINES = 4
EVIDENCE_CHARS = 240
SURE = 0.5
"""Confidence below which the words decide nothing."""
LEAVE_SURE = 0.75
"""Confidence from which on a node is left because its own words say that it is broken."""

_CATEGORIES: dict[str, Category] = {
    "infrastructure": "infrastructure",
    "user_code": "user_code",
    "data": "data",
    "transient": "transient",
}
_HARDWARE = re.compile(
    r"\bs?xid\b|nvrm|uncorrectable|fallen off|cuda error|cuda failure|hip error|\becc\b|nvlink|machine check"
)
"""Whoever says this is read first."""
_BETWEEN = re.compile(r"(?<!nv)link|(?<!nv)switch|nic_|_nic|port_|rdma|net_|network|fabric|peer|mount")
"""Causes that may lie between machines, by their names: the first to tell of them need not be the one at fault."""


class Voice(Struct, frozen=True):
    """One process and its words."""

    seat: Seat
    node: NodeId
    rank: int
    words: str


class Told(Struct, frozen=True, kw_only=True):
    """What the words say.

    Attributes:
        root_cause: a stable name, a colon, a sentence.
        code: for ``keepstep explain CODE``.
        seats: processes whose words hold the cause.
        echoes: processes that tell of nothing but somebody else's end.
        node: of this job, that is at fault; ``None`` for none.
        leave: the node itself has said that it is broken, so its ranks must not run there again.
    """

    category: Category
    root_cause: str
    code: str
    probability: float
    seats: frozenset[Seat] = frozenset()
    echoes: frozenset[Seat] = frozenset()
    node: NodeId | None = None
    leave: bool = False
    evidence: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return self.root_cause.partition(": ")[2]


def told(job: Job) -> Told | None:
    """Read what the ended processes have written, and with what words living ones say that collectives broke.

    ``None`` when they say nothing that is understood.
    """
    voices = _voices(job)
    if not voices:
        return None
    reading = _read(voices)
    found = reading.diagnosis
    category = _CATEGORIES.get(found.category, "unknown")
    known = category != "unknown" and found.confidence >= SURE and bool(reading.leading)
    if not known:
        return Told(category="unknown", root_cause="", code="", probability=0.0, echoes=reading.echoes)
    node, own = _node(job, found, voices, reading.leading)
    machine = category == "infrastructure" and found.action in ("replace_node", "isolate_and_verify")
    return Told(
        category=category,
        root_cause=found.root_cause,
        code=reading.code,
        probability=found.confidence,
        seats=reading.leading,
        echoes=reading.echoes - reading.leading,
        node=node if machine or (category == "infrastructure" and found.action == "restart_in_place") else None,
        leave=own
        and machine
        and not reading.shared
        and found.action == "replace_node"
        and found.confidence >= LEAVE_SURE,
        evidence=tuple(_line(one.source, voices, one.text) for one in found.evidence[:EVIDENCE_LINES]),
    )


def words_of(fact: WorkerExited) -> str:
    """All words of one ended process: the first errors, the last lines, the exception; nothing twice."""
    last = [line for line in fact.stderr_tail if line.strip()]
    lines = [line for line in fact.first_error if line not in set(last)] + last
    if (error := fact.error) is not None:
        closing = f"{error.type}: {error.message}"
        if not any(closing.splitlines()[0] in line for line in lines):
            stack = [part for text in error.traceback for part in text.splitlines()]
            if not stack and error.file:
                stack = [
                    "Traceback (most recent call last):",
                    f'  File "{error.file}", line {error.line}, in {error.function or "?"}',
                ]
            lines += [*(line for line in stack if line.strip() != closing), closing]
    return "\n".join(lines[:READ_LINES])[:READ_CHARS]


class _Reading(Struct, frozen=True):
    diagnosis: Diagnosis
    code: str
    leading: frozenset[Seat]
    echoes: frozenset[Seat]
    shared: bool
    """The cause is of a kind that another machine, or what lies between, may have brought about: network, storage."""


def _voices(job: Job) -> tuple[Voice, ...]:
    """Who is read: those nobody has judged yet, hardware and causes before echoes, each group in order of arrival."""
    named = set(job.incident.named) if job.incident else set[str]()
    found: list[tuple[bool, bool, Voice]] = []
    for key, fact in job.exits.items():
        if key not in job.seats or key in named or key in job.condemned or fact.code == 0 or fact.killed_by_us:
            continue
        if words := words_of(fact):
            found.append((_loud(words), echoes(fact), Voice(key, fact.node, job.seats[key], words)))
    for rank, broken in job.broken.items():
        seat = job.seat_of(rank)
        key = seat_key(seat.node, seat.slot)
        if key not in named and key not in job.exits and broken.error.strip():
            words = broken.error.strip()[:READ_CHARS]
            found.append((_loud(words), True, Voice(key, seat.node, rank, words)))
    found.sort(key=lambda one: (not one[0], one[1]))
    return tuple(voice for _, _, voice in found[:READ_VOICES])


def _loud(words: str) -> bool:
    return bool(_HARDWARE.search(words.lower()))


def warm() -> None:
    """Load the engine and its rules, which takes a tenth of a second, before they are needed in the first incident."""
    words = (
        'NVRM: Xid (PCI:0000:00:00): 0\nTraceback (most recent call last):\n  File "x.py", line 1, in x\nError: failed'
    )
    _read((Voice("", NodeId(""), 0, words),))


@functools.lru_cache(maxsize=64)
def _read(voices: tuple[Voice, ...]) -> _Reading:
    # Here and not above: a controller starts sooner without a few hundred rules. It calls ``warm`` when it has time.
    from keepstep.core.diagnose.decide import decide
    from keepstep.core.diagnose.named import code_of
    from keepstep.core.diagnose.observe import Log, Source, observe
    from keepstep.core.diagnose.rules_network import NETWORK
    from keepstep.core.diagnose.rules_storage import STORAGE

    log = Log()
    for voice in voices:
        observe([voice.words.encode()], Source(name=voice.seat, node=voice.node, rank=voice.rank), log)
    found = decide(log)
    causes: set[Seat] = set()
    echoing: set[Seat] = set()
    for id, findings in log.findings.items():
        (echoing if log.role(id) in ("cascade", "teardown") else causes).update(one.source for one in findings)
    cause = found.root_cause.partition(":")[0]
    lead = log.findings.get(cause, [])
    leading = {one.source for one in lead if one.rule.role in ("initiating", "symptom")}
    if not leading and found.evidence:
        leading = {found.evidence[0].source}
    shared = not lead or bool(_BETWEEN.search(cause)) or cause in {rule.id for rule in (*NETWORK, *STORAGE)}
    return _Reading(found, code_of(found), frozenset(leading), frozenset(echoing - causes), shared)


def _node(
    job: Job, found: Diagnosis, voices: tuple[Voice, ...], leading: frozenset[Seat]
) -> tuple[NodeId | None, bool]:
    """The node at fault, and whether it is one whose own processes say so.

    Words may call a machine by a name that is not the node's; then it is the speaker's, which is no proof. What several
    nodes tell of at the same time is more likely something that they share.
    """
    speakers = {voice.node for voice in voices if voice.seat in leading}
    name = found.culprit.node
    called = [
        node.node for node in job.nodes.values() if name and _short(name) in (_short(node.node), _short(node.host))
    ]
    if len(called) == 1:
        return called[0], speakers == {called[0]}
    if len(speakers) == 1:
        return next(iter(speakers)), not name
    return None, False


def _short(host: str) -> str:
    """Without the domain, unless it is an address."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0].lower()


def _line(seat: Seat, voices: tuple[Voice, ...], text: str) -> str:
    who = next((f"{voice.node}:r{voice.rank}" for voice in voices if voice.seat == seat), seat)
    half = EVIDENCE_CHARS // 2
    short = text if len(text) <= EVIDENCE_CHARS else f"{text[:half]} ... {text[-half:]}"
    return f"{who} | {short}"
