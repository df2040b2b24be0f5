"""Retention: which generations stay, each with the reason, and which may go. Pure.

Ages are told by the order of steps as much as by clocks: a generation is never taken to be older than one with a lower
step, and none is younger than now. So a clock that jumps keeps too much rather than too little.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.slot import Version
from keepstep.model.settings import CheckpointPolicy

UNFINISHED_S = 3600.0
"""What was left unfinished is removed when a newer generation is complete and its parts are older than this."""
_NS = 1_000_000_000


class Verdict(Struct, frozen=True, kw_only=True):
    """What happens to one generation, and why."""

    version: Version
    keep: bool
    why: str


def judge(
    generations: Sequence[Generation],
    policy: CheckpointPolicy,
    *,
    now_ns: int,
    writing: Collection[Version] = (),
    by_itself: bool = False,
) -> list[Verdict]:
    """A verdict for every generation, oldest first.

    Args:
        writing: generations that somebody is writing or reading now.
        by_itself: a node's own tier, where each part counts by itself: whatever has a whole part, and was not found
            damaged, is taken for complete. One more than ``keep`` stays there: another node may lack the newest.
    """
    ordered = sorted(generations, key=lambda generation: generation.version)
    sound = [g for g in ordered if g.complete or (by_itself and g.ranks and not g.damaged)]
    whole = [g for g in sound if not g.tainted]
    reasons: dict[Version, str] = {}

    def keep(version: Version, why: str) -> None:
        reasons.setdefault(version, why)

    if not whole:
        return [Verdict(version=g.version, keep=True, why="nothing is complete yet") for g in ordered]
    count = max(1, policy.keep) + (1 if by_itself else 0)
    made = _made(whole, now_ns)
    newest = whole[-1]
    keep(newest.version, "the newest complete one")
    for version in writing:
        keep(version, "being written")
    for generation in whole[-count:]:
        keep(generation.version, f"one of the newest {count}")
    for generation in sorted(whole, key=lambda g: (min(g.created_ns, now_ns), g.version))[-count:]:
        keep(generation.version, f"one of the last {count} to be written")
    for generation in whole:
        if policy.keep_every > 0 and generation.version.step % policy.keep_every == 0:
            keep(generation.version, f"its step is a multiple of {policy.keep_every}")
        if policy.keep_s > 0 and now_ns - made[generation.version] < policy.keep_s * _NS:
            keep(generation.version, f"younger than {policy.keep_s:g} s")
    if policy.sdc_window_s > 0:
        for version, why in _before_corruption(whole, made, policy.sdc_window_s, now_ns):
            keep(version, why)
    for generation in ordered:
        if generation not in whole and generation.version > newest.version:
            why = "damaged, and newer than all that are complete" if generation.damaged else "may still be completed"
            why = "tainted, and newer than all that are clean" if generation.tainted else why
            keep(generation.version, why)
    _keep_bases(ordered, reasons)
    return [
        Verdict(version=g.version, keep=g.version in reasons, why=reasons.get(g.version) or _why_not(g, whole))
        for g in ordered
    ]


def _made(whole: Sequence[Generation], now_ns: int) -> dict[Version, int]:
    """When each was made: not after now, and not before one of a lower step."""
    made, latest = {}, 0
    for generation in whole:
        latest = min(now_ns, max(latest, generation.created_ns))
        made[generation.version] = latest
    return made


def _before_corruption(
    whole: Sequence[Generation], made: dict[Version, int], window_s: float, now_ns: int
) -> list[tuple[Version, str]]:
    """The newest one from before the window, and the oldest within it, which will be that one day.

    Two are enough for ever: when the second leaves the window it takes the place of the first. Verified ones are
    preferred for both.
    """
    edge = now_ns - int(window_s * _NS)
    before = [g for g in whole if made[g.version] <= edge]
    within = [g for g in whole if made[g.version] > edge]
    found = []
    if before:
        chosen = next((g for g in reversed(before) if g.verified), before[-1])
        found.append((chosen.version, f"from before the last {window_s:g} s, in case corruption is found late"))
    if within:
        chosen = next((g for g in within if g.verified), within[0])
        found.append((chosen.version, f"will be the one from before the last {window_s:g} s"))
    return found


def _keep_bases(ordered: Sequence[Generation], reasons: dict[Version, str]) -> None:
    """What a kept difference rests on stays, newest first so that chains are followed to their end."""
    for generation in reversed(ordered):
        if generation.version in reasons:
            for base in generation.bases:
                reasons.setdefault(base, f"step {generation.version.step} rests on it")


def _why_not(generation: Generation, whole: Sequence[Generation]) -> str:
    return "not among those to keep" if generation in whole else (generation.why or "unfinished")
