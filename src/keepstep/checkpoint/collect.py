"""Collect: remove generations so that one that is half gone is never taken for whole.

What makes a generation exist goes first, then its parts' descriptions, then the bytes. A collector may be killed
anywhere, and several may work at once: the next one finds leftovers and goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct, structs

from keepstep.checkpoint import catalog
from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.exceptions import GenerationIncomplete, ManifestDamaged
from keepstep.checkpoint.generation import folder, part_name
from keepstep.checkpoint.retention import UNFINISHED_S, Verdict, judge
from keepstep.checkpoint.slot import Version
from keepstep.model.settings import CheckpointPolicy
from keepstep.ports.tier import Tier

LEFTOVER_S = 3600.0
"""Temporary files of other hosts are removed when they are older than this."""
_NS = 1_000_000_000
Now = Callable[[], int]


class Collected(Struct, frozen=True, kw_only=True):
    """What a collection did, or would do. ``leftovers``: objects of interrupted writers."""

    removed: tuple[Verdict, ...] = ()
    kept: tuple[Verdict, ...] = ()
    leftovers: int = 0


def plan(
    tier: Tier,
    policy: CheckpointPolicy,
    *,
    writing: Collection[Version] = (),
    by_itself: bool = False,
    now: Now = time.time_ns,
) -> tuple[list[Verdict], list[Generation]]:
    """What is to be kept and removed, and what is there.

    A generation that is not complete only goes when nobody can be writing it any more.
    """
    found = catalog.read(tier)
    if by_itself:
        found = _passed_on([_from_parts(tier, generation) for generation in found])
    verdicts = judge(found, policy, now_ns=now(), writing=writing, by_itself=by_itself)
    by_version = {generation.version: generation for generation in found}
    settled = []
    for verdict in verdicts:
        generation = by_version[verdict.version]
        unfinished = not generation.complete and not (by_itself and generation.ranks) and not generation.damaged
        if not verdict.keep and unfinished and _may_be_written(tier, generation, now()):
            verdict = Verdict(version=verdict.version, keep=True, why="unfinished, and may still be completed")
        settled.append(verdict)
    return settled, found


def collect(
    tier: Tier,
    policy: CheckpointPolicy,
    *,
    writing: Collection[Version] = (),
    by_itself: bool = False,
    now: Now = time.time_ns,
    dry_run: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Collected:
    """Remove what retention does not keep, oldest first, and what interrupted writers left.

    Args:
        check: called before each removal; what it raises ends the collection.

    Raises:
        TierError: the tier's own troubles; what was done until then stays done.
    """
    verdicts, _ = plan(tier, policy, writing=writing, by_itself=by_itself, now=now)
    going = tuple(verdict for verdict in verdicts if not verdict.keep)
    kept = tuple(verdict for verdict in verdicts if verdict.keep)
    if dry_run:
        return Collected(removed=going, kept=kept)
    for verdict in reversed(going):  # a difference before what it rests on
        check()
        remove(tier, verdict.version)
    return Collected(removed=going, kept=kept, leftovers=tier.sweep(LEFTOVER_S))


def remove(tier: Tier, version: Version) -> None:
    """Remove one generation, whole or not. Quiet where there is nothing."""
    for name in catalog.objects(tier.names(f"{folder(version)}/"), version):
        tier.remove(name)


def remove_parts(tier: Tier, version: Version, ranks: Iterable[int]) -> None:
    """Remove what some ranks have written of a generation that will not be complete."""
    stems = {part_name(version, rank).rpartition("/")[2].partition(".")[0] for rank in ranks}
    for name in catalog.objects(tier.names(f"{folder(version)}/"), version):
        if name.rpartition("/")[2].partition(".")[0] in stems:
            tier.remove(name)


def _from_parts(tier: Tier, generation: Generation) -> Generation:
    """What a manifest would say, from the parts that are here: when they were written, and what they rest on.

    Ranks of one node choose each for itself between a difference and everything, so that each has to be asked.
    """
    if generation.complete:
        return generation
    parts = []
    for rank in generation.ranks:
        with contextlib.suppress(GenerationIncomplete, ManifestDamaged):
            parts.append(catalog.part(tier, generation.version, rank))
    if not parts:
        return structs.replace(generation, ranks=())
    return structs.replace(
        generation,
        created_ns=max(part.written_ns for part in parts),
        verified=all(part.read_back for part in parts),
        bases=tuple(sorted({part.base for part in parts if part.base is not None})),
    )


def _passed_on(found: Sequence[Generation]) -> list[Generation]:
    """Damage is passed on to what rests on it, newest first in and out. A manifest has done so already."""
    damaged: set[Version] = set()
    told = []
    for generation in reversed(found):
        if not generation.damaged and not damaged.isdisjoint(generation.bases):
            generation = structs.replace(generation, damaged=True, why="rests on a damaged one")
        if generation.damaged:
            damaged.add(generation.version)
        told.append(generation)
    return told[::-1]


def _may_be_written(tier: Tier, generation: Generation, now_ns: int) -> bool:
    """Whether the youngest part is younger than ``UNFINISHED_S``. Where no part is whole, steps have decided."""
    for rank in generation.ranks:
        try:
            part = catalog.part(tier, generation.version, rank)
        except (GenerationIncomplete, ManifestDamaged):
            continue
        if now_ns - min(part.written_ns, now_ns) < UNFINISHED_S * _NS:
            return True
    return False
