"""Fold of notes about checkpoints: what there is to fall back on, and what has gone wrong since. Decides nothing.

Notes may be lost on their way, and come late: a newer step counts. Of troubles there is one per place and kind, however
often it happens, and a place that works again clears it.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from keepstep.core.state import Gap, Job, Mishap, Saved
from keepstep.model.facts import CheckpointNoted

MISHAPS = 64
"""Troubles kept of one job; the one that was heard of longest ago goes first."""
WHY = 300
"""Characters of an explanation that are kept; the log has all of them."""
_DURABLE = ("local", "remote")


def fold_checkpoint(job: Job, fact: CheckpointNoted) -> None:
    """Write one note onto the board."""
    place = _place(fact)
    held = job.saved.get(place)
    match fact.what:
        case "saved":
            if held is None or fact.step >= held.step:
                job.saved[place] = Saved(step=fact.step, at=fact.at, bytes=fact.bytes, seconds=fact.seconds)
            _clear(job, fact, place)
        case "verified":
            if held is None or fact.step > held.step:
                held = Saved(step=fact.step, at=fact.at, bytes=fact.bytes)
            if fact.step == held.step:
                job.saved[place] = replace(held, verified=True)
            _clear(job, fact, place)
        case "gap":
            if fact.rank is not None:
                job.gaps[fact.rank] = Gap(step=fact.step, at=fact.at, why=fact.why)
        case "closed":
            if fact.rank is not None:
                job.gaps.pop(fact.rank, None)
        case "interval":
            job.pace = fact.why
        case "skipped" | "damaged":
            _mishap(job, fact, place, fact.what)
        case "expired" | "restored":
            pass
        case _:
            assert_never(fact.what)


def _place(fact: CheckpointNoted) -> str:
    """``remote`` is one for all nodes; every other tier is a node's own."""
    return "remote" if fact.tier == "remote" else f"{fact.tier}/{fact.node}"


def _mishap(job: Job, fact: CheckpointNoted, place: str, what: str) -> None:
    held = job.saved.get(place)
    if held is not None and (fact.step < held.step or (fact.step == held.step and what == "skipped")):
        return  # late: the place has a newer one since
    key = f"{what} {place}"
    before = job.mishaps.pop(key, None)
    again = before is not None and fact.step > before.step
    job.mishaps[key] = Mishap(
        first_step=fact.step if before is None else min(before.first_step, fact.step),
        step=fact.step if before is None else max(before.step, fact.step),
        since=fact.at if before is None else before.since,
        at=fact.at,
        steps=1 if before is None else before.steps + again,
        rank=fact.rank,
        why=fact.why[:WHY],
    )
    if len(job.mishaps) > MISHAPS:
        del job.mishaps[next(iter(job.mishaps))]


def _clear(job: Job, fact: CheckpointNoted, place: str) -> None:
    """A generation ends the troubles that are older: those of its place, and those of the memory that it was made from.

    One that was left out is made up for by the same step, too; one that was damaged only by a later one.
    """
    if fact.tier not in _DURABLE:
        return
    made_from = [f"{tier}/" if fact.tier == "remote" else f"{tier}/{fact.node}" for tier in ("memory", "peer")]
    memories = [key for key in job.mishaps if key.partition(" ")[2].startswith(tuple(made_from))]
    for key in (f"skipped {place}", f"damaged {place}", *memories):
        found = job.mishaps.get(key)
        if found is not None and (fact.step > found.step or (key == f"skipped {place}" and fact.step == found.step)):
            del job.mishaps[key]
