"""Saved: which generations a world can restore, told from what each rank's node can read. Pure but for the listing.

The shared tier is read by all nodes; a generation counts there when its manifest does. On a node's own disk each
part counts by itself, and a generation is had when the nodes together have all of its parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from keepstep.checkpoint import catalog, tainted
from keepstep.checkpoint.agree import MAX_SAVED
from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.slot import Version
from keepstep.ports.tier import Tier

LOOK = 2 * MAX_SAVED
"""Newest generations of a tier that are looked at."""
TRIES = 4
"""Descriptions of a generation that are tried before it is left out."""
UNFINISHED = "unfinished"
"""How the catalog's reason begins where there is no manifest."""
History = tuple[str, str]


class Saved(Struct, frozen=True):
    """A generation as all ranks see it; ``readers`` are the ranks whose node can read each old rank's part."""

    version: Version
    world_size: int
    history: History
    readers: Mapping[int, Sequence[int]]
    shared: bool


class Seen(Struct, frozen=True, array_like=True):
    """What one rank shows of one generation; ``everywhere`` where every node reads the same tier."""

    step: int
    epoch: int
    world_size: int
    history: History
    ranks: tuple[int, ...]
    everywhere: bool


def on_shared(tier: Tier, *, allow_tainted: bool = False) -> tuple[list[Seen], list[str]]:
    """Generations with a manifest, and why others that have one are of no use.

    One of which parts are gone may be completed by nodes' own disks. One that is tainted is passed over.
    """
    seen: list[Seen] = []
    lost: list[str] = []
    for found in catalog.read(tier)[:LOOK]:
        fit = found.complete or not (found.bases or found.damaged)
        if found.tainted and not allow_tainted:
            lost.append(f"step {found.version.step}: {found.why} (KEEPSTEP_ALLOW_TAINTED=1 takes it)")
            continue
        part = _any_part(tier, found) if found.world_size and fit else None
        if part is not None:
            seen.append(_seen(found, part, found.ranks, everywhere=True))
        if not found.complete and found.why and not found.why.startswith(UNFINISHED):
            lost.append(f"step {found.version.step}: {found.why}")
    return seen, lost


def _any_part(tier: Tier, found: Generation) -> Part | None:
    """A description that tells which history the generation is of."""
    for rank in found.ranks[:TRIES]:
        try:
            return catalog.part(tier, found.version, rank)
        except CheckpointError as error:
            print(f"keepstep: {error}", file=sys.stderr, flush=True)
    return None


def on_node(tier: Tier, *, allow_tainted: bool = False) -> list[Seen]:
    """Parts on a node's own disk: each counts by itself, with what it rests on."""
    listed = catalog.read(tier)
    listed = [found for found in listed if not found.damaged]
    ranks = {found.version: set(found.ranks) for found in listed}
    seen: list[Seen] = []
    for found in listed[:LOOK]:
        rows: dict[tuple[int, History], list[Part]] = {}
        spoilt = frozenset() if allow_tainted else tainted.of_parts(tier, found.version, found.ranks)
        for rank in found.ranks:
            if rank in spoilt:
                continue
            try:
                part = catalog.part(tier, found.version, rank)
                if _rests_well(tier, part, ranks):
                    rows.setdefault((part.world_size, part.history), []).append(part)
            except CheckpointError as error:
                print(f"keepstep: {error}", file=sys.stderr, flush=True)
        for parts in rows.values():
            seen.append(_seen(found, parts[0], tuple(part.rank for part in parts), everywhere=False))
    return seen


def _rests_well(tier: Tier, part: Part, ranks: Mapping[Version, set[int]]) -> bool:
    """Whether everything that a difference rests on is there."""
    while part.base is not None:
        if part.base >= part.version or part.rank not in ranks.get(part.base, ()):
            return False
        part = catalog.part(tier, part.base, part.rank)
    return True


def _seen(found: Generation, part: Part, ranks: tuple[int, ...], *, everywhere: bool) -> Seen:
    return Seen(found.version.step, found.version.epoch, part.world_size, part.history, ranks, everywhere)


def complete(every: Sequence[Iterable[Seen]], world_size: int) -> list[Saved]:
    """Generations of which each part can be read by somebody; where two histories reached one version, the shared."""
    readers: dict[tuple[Version, int, History], dict[int, set[int]]] = {}
    shared: dict[tuple[Version, int, History], set[int]] = {}
    for rank, rows in enumerate(every):
        for row in rows:
            at = Version(row.step, row.epoch), row.world_size, row.history
            who = range(world_size) if row.everywhere else (rank,)
            for old in row.ranks:
                readers.setdefault(at, {}).setdefault(old, set()).update(who)
            if row.everywhere:
                shared.setdefault(at, set()).update(row.ranks)
    found: dict[Version, Saved] = {}
    for at in sorted(readers, key=lambda at: (len(shared.get(at, ())) < at[1], at)):
        version, old_world, history = at
        if version not in found and readers[at].keys() >= set(range(old_world)):
            everywhere = len(shared.get(at, ())) >= old_world
            by_part = {old: sorted(ranks) for old, ranks in readers[at].items()}
            found[version] = Saved(version, old_world, history, by_part, everywhere)
    return list(found.values())
