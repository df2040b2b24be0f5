"""Similar: which incidents of the past were like this one, what was done about them, and how that ended.

Likeness is exact and can be told in words: the same cause, the same code, the same place in the user's code, the same
node. Nothing is weighed that a reader could not check.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

SHOWN = 5
GENERAL = frozenset({"", "unknown", "python_exception", "only_consequences", "process_killed"})
"""Causes that say too little for two incidents to be alike for them alone."""


class Case(Struct, frozen=True, kw_only=True):
    """What one incident is compared by; an empty field is not known.

    Attributes:
        cause: name of the root cause, without its sentence.
        code: for ``keepstep explain CODE``.
        place: ``job/train.py:41``, the end of a path and a line in the user's code.
    """

    cause: str = ""
    code: str = ""
    place: str = ""
    node: str = ""
    gpu: str = ""


class Past(Struct, frozen=True, kw_only=True):
    """An incident that is over, or at least older.

    Attributes:
        at: seconds since 1970; 0 when not known.
        done: what was done, in words.
        ended: how that ended, in words.
        took_s: from the first evidence to a new step; ``None`` when there was none.
    """

    id: str
    case: Case
    at: float = 0.0
    job: str = ""
    title: str = ""
    category: str = ""
    done: str = ""
    ended: str = ""
    took_s: float | None = None


class Match(Struct, frozen=True, kw_only=True):
    """A past incident and what it has in common with the present one, such as ``("cause", "node")``."""

    past: Past
    same: tuple[str, ...]


def similar(case: Case, history: Iterable[Past], *, limit: int = SHOWN) -> tuple[Match, ...]:
    """Past incidents that are like this one: those of the same cause first, then those of the node alone; newest first.

    Args:
        history: in any order; the same incident (id and time) counts once.
    """
    found: dict[tuple[str, float], Match] = {}
    for past in history:
        if same := common(case, past.case):
            found.setdefault((past.id, past.at), Match(past=past, same=same))
    ordered = sorted(found.values(), key=lambda match: (match.same == ("node",), -match.past.at, match.past.id))
    return tuple(ordered[:limit])


def common(one: Case, other: Case) -> tuple[str, ...]:
    """What both have in common, the strongest first; a general cause alone is nothing."""
    same = []
    if one.cause and one.cause == other.cause and one.cause not in GENERAL:
        same.append("cause")
    if one.code and one.code == other.code and one.code not in GENERAL and one.code != one.cause:
        same.append("code")
    if one.place and one.place == other.place:
        same.append("place")
    if one.node and one.node == other.node:
        same.append("node")
        if one.gpu and one.gpu == other.gpu:
            same.append("gpu")
    return tuple(same)
