"""Catalog: what a durable tier holds, judged by what is there and not by what was meant to be.

A generation is complete when its manifest is there, is what was written, everything that it names is there, and nobody
has found a part of it damaged. All else is unfinished, being removed, or damaged, and is never restored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct, structs

from keepstep.checkpoint import tainted
from keepstep.checkpoint.exceptions import GenerationIncomplete, ManifestDamaged, TierMissing
from keepstep.checkpoint.generation import (
    DAMAGED,
    MANIFEST,
    VERIFIED,
    Bad,
    Damaged,
    Manifest,
    Part,
    PartRef,
    Verified,
    damaged_name,
    folder,
    manifest_name,
    part_name,
    payload_name,
    unseal,
    verified_name,
    version_of,
)
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.sums import digest
from keepstep.ports.tier import Tier

RESTS, NOT_COMPLETE, IN_THE_END = "rests on step ", ", which is not complete: ", ", which in the end "
"""Of the reason why a difference is not complete although all of its own parts are there."""
MAX_NAMED = 8
"""Ranks that a sentence names before it says how many more there are."""


class Generation(Struct, frozen=True, kw_only=True):
    """One generation of a tier.

    Attributes:
        complete: it may be restored.
        verified: everything in it has been read back.
        tainted: it is sound, and may hold what a machine has computed wrongly; restores pass it over.
        damaged: somebody has read it, or what it rests on, and found it to differ from what was written.
        ranks: whose part is whole here. On a node's own tier these are the parts of that node's ranks, and each counts
            by itself: no manifest says so.
        why: why it is not complete, for people.
    """

    version: Version
    complete: bool = False
    verified: bool = False
    damaged: bool = False
    tainted: bool = False
    job: str = ""
    world_size: int = 0
    created_ns: int = 0
    bytes: int = 0
    bases: tuple[Version, ...] = ()
    ranks: tuple[int, ...] = ()
    replicated: bool = False
    why: str = ""


def read(tier: Tier) -> list[Generation]:
    """Everything that the tier holds, newest first. One listing, and the manifests.

    Raises:
        TierError: the tier cannot be listed. A damaged manifest is no error, only a generation that is not complete.
    """
    found: dict[Version, set[str]] = defaultdict(set)
    for name in tier.names("step-"):
        head, slash, tail = name.partition("/")
        version = version_of(head)
        if version is not None and slash:
            found[version].add(tail)
    judged = {version: _judge(tier, version, found[version]) for version in sorted(found)}
    for version, generation in judged.items():  # oldest first, so that a broken chain is passed on
        judged[version] = _rest(generation, [judged.get(base) or Generation(version=base) for base in generation.bases])
    return list(reversed(judged.values()))


def look(tier: Tier, version: Version) -> Generation:
    """One generation; not complete and without ranks where there is nothing. All that it rests on is looked at once."""
    found: dict[Version, Generation] = {}
    todo = [version]
    while todo:
        at = todo.pop()
        prefix = f"{folder(at)}/"
        found[at] = _judge(tier, at, {name.removeprefix(prefix) for name in tier.names(prefix)})
        todo += [base for base in found[at].bases if base not in found and base not in todo]
    for at in sorted(found):  # a manifest names older generations only
        found[at] = _rest(found[at], [found[base] for base in found[at].bases])
    return found[version]


def _rest(generation: Generation, bases: Iterable[Generation]) -> Generation:
    """A difference is worth what it rests on."""
    for base in bases:
        if not base.complete and generation.complete:
            why = f"{RESTS}{base.version.step}{NOT_COMPLETE}{base.why or 'it is gone'}"
            if base.why.startswith(RESTS):  # one sentence with the first cause, however long the chain is
                why = f"{RESTS}{base.version.step}{IN_THE_END}{base.why.rpartition(IN_THE_END)[2]}"
            return structs.replace(generation, complete=False, verified=False, damaged=base.damaged, why=why)
    return generation


def newest(generations: Iterable[Generation]) -> Generation | None:
    """The newest complete one that is not tainted."""
    return max((g for g in generations if g.complete and not g.tainted), key=lambda g: g.version, default=None)


def manifest(tier: Tier, version: Version) -> Manifest:
    """Raises ``GenerationIncomplete`` where there is none, ``ManifestDamaged`` when it is not what was written."""
    return _manifest(tier, version)[0]


def part(tier: Tier, version: Version, rank: int) -> Part:
    """The description of one rank's part.

    Raises:
        GenerationIncomplete: it is not there.
        ManifestDamaged: it is not what was written, or describes something else.
    """
    name = part_name(version, rank)
    try:
        data = tier.get(name)
    except TierMissing as error:
        raise GenerationIncomplete(f"{tier.where}/{name}: there is no such part") from error
    return check_part(data, f"{tier.where}/{name}", version, rank)


def check_part(data: bytes, name: str, version: Version, rank: int) -> Part:
    """Unseal, and see that it is the part of this rank and version.

    Raises:
        ManifestDamaged: it is not.
    """
    found = unseal(data, Part, name)
    if found.version != version or found.rank != rank:
        raise ManifestDamaged(
            f"{name}: describes rank {found.rank} of step {found.version.step}, not what its name says"
        )
    return found


def is_verified(tier: Tier, version: Version, manifest_sum: int) -> bool:
    """Whether ``verified.json`` is there, whole, and about this very manifest."""
    name = verified_name(version)
    try:
        found = unseal(tier.get(name), Verified, name)
    except (TierMissing, ManifestDamaged):
        return False
    return found.version == version and found.manifest_sum == manifest_sum


def marks(tier: Tier, version: Version) -> tuple[Bad, ...]:
    """Parts that were found damaged. A mark that cannot be read counts for none."""
    name = damaged_name(version)
    try:
        found = unseal(tier.get(name), Damaged, name)
    except (TierMissing, ManifestDamaged):
        return ()
    return found.parts if found.version == version else ()


def marked(bad: Iterable[Bad], refs: Iterable[PartRef]) -> list[Bad]:
    """Those of the marks that are about these very parts."""
    named = {(ref.rank, ref.sum) for ref in refs}
    return [one for one in bad if (one.rank, one.sum) in named]


def missing_ranks(present: Iterable[int], world_size: int) -> str:
    """``2, 5 and 3 more``."""
    there = set(present)
    ranks = [rank for rank in range(world_size) if rank not in there]
    text = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    return f"{text} and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else text


def whole_ranks(names: set[str]) -> tuple[int, ...]:
    """Ranks of which description and payload are named."""
    ranks = []
    for name in names:
        stem, _, kind = name.partition(".")
        payload = f"{stem}.safetensors" in names or f"{stem}.delta" in names
        if payload and kind == "json" and stem.startswith("rank") and stem[4:].isdigit():
            ranks.append(int(stem[4:]))
    return tuple(sorted(ranks))


def _manifest(tier: Tier, version: Version) -> tuple[Manifest, bytes]:
    name = manifest_name(version)
    try:
        data = tier.get(name)
    except TierMissing as error:
        raise GenerationIncomplete(f"{tier.where}/{folder(version)}: has no manifest: unfinished") from error
    found = unseal(data, Manifest, f"{tier.where}/{name}")
    if found.version != version:
        raise ManifestDamaged(f"{tier.where}/{name}: describes step {found.version.step}, not what its folder says")
    if sorted(ref.rank for ref in found.parts) != list(range(found.world_size)):
        raise ManifestDamaged(f"{tier.where}/{name}: does not name one part per rank")
    if any(not base < version for base in found.bases):
        raise ManifestDamaged(f"{tier.where}/{name}: rests on a later step than its own")
    return found, data


def _judge(tier: Tier, version: Version, names: set[str]) -> Generation:
    ranks = whole_ranks(names)
    if MANIFEST not in names:
        return Generation(version=version, ranks=ranks, why="unfinished: has no manifest")
    try:
        found, data = _manifest(tier, version)
    except (ManifestDamaged, GenerationIncomplete) as error:
        return Generation(version=version, ranks=ranks, why=str(error))
    absent = missing_ranks(ranks, found.world_size)
    bad = marked(marks(tier, version), found.parts) if DAMAGED in names else []
    why = f"parts of ranks {absent} are gone" if absent else ""
    if bad:
        why = f"damaged: {bad[0].why}" + (f"; and {len(bad) - 1} more parts" if len(bad) > 1 else "")
    spoilt = tainted.reasons(tainted.marks(tier, version), found.parts) if tainted.TAINTED in names else ()
    if spoilt and not why:
        why = f"tainted: {', '.join(spoilt)}"
    complete = not absent and not bad
    return Generation(
        version=version,
        complete=complete,
        verified=complete and VERIFIED in names and is_verified(tier, version, digest(data)),
        damaged=bool(bad),
        tainted=bool(spoilt),
        job=found.job,
        world_size=found.world_size,
        created_ns=found.created_ns,
        bytes=sum(ref.bytes for ref in found.parts),
        bases=found.bases,
        ranks=ranks,
        replicated=found.replicated,
        why=why,
    )


def objects(names: Iterable[str], version: Version) -> list[str]:
    """Names of a generation's objects in the order in which they may be removed: what makes it exist goes first."""
    order = {MANIFEST: 0, VERIFIED: 1}
    prefix = f"{folder(version)}/"
    inside = [name for name in names if name.startswith(prefix)]
    return sorted(inside, key=lambda name: (order.get(name[len(prefix) :], 2 + (not name.endswith(".json"))), name))


def payload_of(found: Part) -> str:
    """Name of the object that holds a part's payload."""
    return payload_name(found.version, found.rank, found.kind)
