"""A diagnosis as a page: who, how sure, why, what to do."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from keepstep.core.diagnose.codes import Meaning
from keepstep.core.diagnose.result import Culprit, Diagnosis
from keepstep.core.diagnose.similar import Match

LINE_SHOWN = 160
"""Characters of an evidence line."""
SURE = ((0.9, "nearly certain"), (0.75, "very likely"), (0.55, "likely"), (0.35, "possible"), (0.0, "a guess"))
_COLOUR = {"infrastructure": "31", "user_code": "35", "data": "36", "transient": "33", "none": "32", "unknown": "37"}


def page(diagnosis: Diagnosis, similar: Sequence[Match] = (), *, colour: bool = False) -> str:
    """The whole page, its last line without a newline.

    Args:
        similar: past incidents that were like this one.
    """
    id, _, sentence = diagnosis.root_cause.partition(": ")
    word = next(word for least, word in SURE if diagnosis.confidence >= least)
    head = f"{diagnosis.category}: {who(diagnosis.culprit)}"
    if colour:
        head = f"\x1b[1;{_COLOUR[diagnosis.category]}m{head}\x1b[0m"
    out = [head, f"  {id}: {sentence}", f"  {word} ({diagnosis.confidence:.2f}){_again(diagnosis.transient)}"]
    if diagnosis.evidence:
        out.append("  evidence:")
        several = any(one.source for one in diagnosis.evidence)
        labels = [f"{one.source}:{one.line_number}" if several else str(one.line_number) for one in diagnosis.evidence]
        width = max(map(len, labels))
        out += [
            f"    {label:>{width}} | {_short(one.text)}" for label, one in zip(labels, diagnosis.evidence, strict=True)
        ]
    if diagnosis.cascade:
        counts = ", ".join(f"{count} x {kind}" for kind, count in diagnosis.cascade.items())
        out.append(f"  only consequences: {counts}")
    out += [f"  not the cause: {one.root_cause}: {one.why}" for one in diagnosis.rejected]
    if diagnosis.alternatives:
        others = ", ".join(f"{one.root_cause} {one.probability:.2f}" for one in diagnosis.alternatives)
        out.append(f"  also possible: {others}")
    out += [f"  before: {_before(match)}" for match in similar]
    out.append(f"  do: {diagnosis.action}. {diagnosis.advice}")
    if diagnosis.category in ("infrastructure", "user_code", "data", "transient"):
        out.append(f"  next: {_next(diagnosis, id)}")
    return "\n".join(out)


def _before(match: Match) -> str:
    """``lm-i3 (same cause and node, 2026-01-31 02:14Z): replace_node, RESOLVED in 31.0 s``"""
    past = match.past
    at = datetime.datetime.fromtimestamp(past.at, datetime.UTC).strftime(", %Y-%m-%d %H:%MZ") if past.at else ""
    took = f" in {past.took_s:.1f} s" if past.took_s is not None else ""
    ended = past.ended.partition(":")[0]
    outcome = ", ".join(part for part in (past.done, f"{ended}{took}" if ended else "") if part)
    return f"{past.id} (same {' and '.join(match.same)}{at}): {outcome or past.title or 'nothing more is known'}"


def who(culprit: Culprit) -> str:
    """The culprit in a few words."""
    parts = [culprit.node]
    parts += [f"GPU {culprit.gpu}"] if culprit.gpu else []
    parts += [f"link {culprit.link}"] if culprit.link else []
    parts += [f"rank {culprit.rank}"] if culprit.rank is not None else []
    place = f"{culprit.file}:{culprit.line}" if culprit.line else culprit.file
    parts += [place, culprit.thing, f"peer {culprit.peer}" if culprit.peer else ""]
    return ", ".join(part for part in parts if part) or "nobody is named by this log"


def page_of_codes(known: Sequence[Meaning]) -> str:
    """All readings of a code, the most likely one first; how to ask for one of them alone."""
    out = []
    for number, one in enumerate(known):
        order = "" if len(known) == 1 else "  (most likely)" if number == 0 else "  (or)"
        out += [f"{one.code}{order}", f"  what: {one.what}"]
        out += [f"  whose: {one.category}"] if one.category else []
        out += [f"  do: {one.action}. {one.advice}"] if one.action else []
        out.append(f"  source: {one.source}")
    if len(asks := dict.fromkeys(one.ask for one in known)) > 1:
        out.append(f"to ask for one reading only: {' | '.join(asks)}")
    return "\n".join(out)


def _again(transient: bool | None) -> str:
    if transient is None:
        return ""
    return "; a new try would probably succeed" if transient else "; a new try alone would not help"


def _next(diagnosis: Diagnosis, id: str) -> str:
    if diagnosis.category == "infrastructure" and diagnosis.culprit.node:
        return f"look at the kernel log of {diagnosis.culprit.node} around this time, and pipe it in too"
    return f"keepstep explain --json FILE shows all fields of {id}"


def _short(text: str) -> str:
    half = LINE_SHOWN // 2
    return text if len(text) <= LINE_SHOWN else f"{text[:half]} ... {text[-half:]}"
