"""Tainted: generations that were saved while some machine may have computed wrongly. Their bytes are sound.

``tainted.json`` in a generation's folder names the very parts that it is about, each with the reason: a part that is
written anew is another one, and clean. A restore passes them over (``KEEPSTEP_ALLOW_TAINTED=1`` takes them), and
retention does not count them among what it has to keep. Memory is left alone: what ranks hold there is what they train
on, and the guard's own roll-back has dealt with it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from keepstep.checkpoint.exceptions import GenerationIncomplete, ManifestDamaged, TierMissing
from keepstep.checkpoint.generation import (
    Bad,
    Damaged,
    Part,
    PartRef,
    folder,
    part_name,
    seal,
    unseal,
    version_of,
)
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.sums import digest
from keepstep.model.env import ALLOW_TAINTED
from keepstep.ports.tier import Tier

TAINTED = "tainted.json"


def allowed(environ: Mapping[str, str] | None = None) -> bool:
    """Whether somebody wants tainted generations all the same."""
    environ = os.environ if environ is None else environ
    return environ.get(ALLOW_TAINTED, "") not in ("", "0")


def mark(tier: Tier, *, since: int, until: int, why: str, now_ns: int, before_ns: int = 0) -> list[Version]:
    """Mark what the tier holds of steps after ``since`` up to ``until``; marking again adds nothing.

    Args:
        why: one word that names the reason, an investigation for example; ``clear`` takes it away again.
        before_ns: parts that were written after this time stay clean; 0 marks all.

    Returns:
        The versions of which parts are marked now.

    Raises:
        TierError: the tier's own troubles.
    """
    found = []
    for version, names in _folders(tier).items():
        if not since < version.step <= until:
            continue
        there = marks(tier, version) if TAINTED in names else ()
        fresh = [Bad(rank=rank, sum=sum_, why=why) for rank, sum_ in _parts(tier, version, names, before_ns)]
        added = [one for one in fresh if one not in there]
        if added:
            _write(tier, version, (*there, *added), now_ns)
        if fresh:
            found.append(version)
    return found


def clear(tier: Tier, *, why: str, now_ns: int) -> list[Version]:
    """Take all marks with this reason away; those with another one stay."""
    found = []
    for version, names in _folders(tier).items():
        there = marks(tier, version) if TAINTED in names else ()
        left = tuple(one for one in there if one.why != why)
        if len(left) == len(there):
            continue
        found.append(version)
        if left:
            _write(tier, version, left, now_ns)
        else:
            tier.remove(_name(version))
    return found


def marks(tier: Tier, version: Version) -> tuple[Bad, ...]:
    """Parts that are marked. A mark that cannot be read counts for none."""
    try:
        found = unseal(tier.get(_name(version)), Damaged, _name(version))
    except (TierMissing, ManifestDamaged):
        return ()
    return found.parts if found.version == version else ()


def reasons(bad: Iterable[Bad], refs: Iterable[PartRef]) -> tuple[str, ...]:
    """Why these very parts are marked; empty where they are not."""
    named = {(ref.rank, ref.sum) for ref in refs}
    return tuple(dict.fromkeys(one.why for one in bad if (one.rank, one.sum) in named))


def of_parts(tier: Tier, version: Version, ranks: Collection[int]) -> frozenset[int]:
    """Of these ranks' parts, those that are marked; for tiers in which each part counts by itself."""
    bad = {(one.rank, one.sum) for one in marks(tier, version) if one.rank in ranks}
    found = set()
    for rank in {rank for rank, _ in bad}:
        try:
            if (rank, digest(tier.get(part_name(version, rank)))) in bad:
                found.add(rank)
        except TierMissing:
            pass
    return frozenset(found)


def _folders(tier: Tier) -> dict[Version, set[str]]:
    found: dict[Version, set[str]] = {}
    for name in tier.names("step-"):
        head, _, tail = name.partition("/")
        if tail and (version := version_of(head)) is not None:
            found.setdefault(version, set()).add(tail)
    return found


def _parts(tier: Tier, version: Version, names: set[str], before_ns: int) -> list[tuple[int, int]]:
    """Rank and checksum of each part that was written before that time."""
    found = []
    for name in sorted(names):
        stem, _, kind = name.partition(".")
        if kind != "json" or not (stem.startswith("rank") and stem[4:].isdigit()):
            continue
        try:
            data = tier.get(f"{folder(version)}/{name}")
            part = unseal(data, Part, name)
        except (TierMissing, ManifestDamaged, GenerationIncomplete):
            continue
        if before_ns == 0 or part.written_ns < before_ns:
            found.append((int(stem[4:]), digest(data)))
    return found


def _write(tier: Tier, version: Version, parts: tuple[Bad, ...], now_ns: int) -> None:
    tier.put(_name(version), [seal(Damaged(version=version, at_ns=now_ns, parts=parts))])


def _name(version: Version) -> str:
    return f"{folder(version)}/{TAINTED}"
