"""Archive: how a part, and then a generation, comes to be in a durable tier, and how it is found to be whole.

The order is the guarantee. A part: payload, read back, description. A generation: every part, manifest, ``verified``.
Whatever is interrupted leaves something that does not count; whatever counts has been read back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from msgspec import structs

from keepstep.checkpoint import catalog, sums, tainted
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.bodies import Body, Copied, Delta, Full, size_of, sound_chunks
from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.exceptions import (
    BaseDamaged,
    GenerationIncomplete,
    ManifestDamaged,
    PayloadDamaged,
    TierMissing,
)
from keepstep.checkpoint.generation import (
    DAMAGED,
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
    seal,
    unseal,
    verified_name,
)
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.safetensors_header import header
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.source import Source
from keepstep.ports.tier import Tier

READERS = 8
"""Descriptions that are read at the same time."""
Now = Callable[[], int]


def write_part(
    tier: Tier,
    source: Source,
    *,
    job: str,
    rank: int,
    world_size: int,
    run: str = "",
    basis: Basis | None = None,
    pace: Pace | None = None,
    now: Now = time.time_ns,
) -> Part:
    """Write one rank's part and read it back. A second call for the same state is a quiet success.

    Args:
        basis: an earlier payload of this rank that is whole in this tier; only what changed since is written.

    Raises:
        SlotDamaged: the state itself does not match its checksums; nothing of it was written.
        SlotInvalid: the trainer took the slot back meanwhile.
        PayloadDamaged: what was read back is not what was written.
        TierError: the tier's own troubles.
    """
    version = source.version
    part = Part(
        job=job,
        rank=rank,
        world_size=world_size,
        version=version,
        kind="full" if basis is None else "delta",
        base=None if basis is None else basis.version,
        file="",
        size=0,
        sums=(),
        payload=source.size,
        payload_sums=(),
        tensors=source.tensors,
        plain=source.description.plain,
        replicated=source.description.replicated,
        key=source.description.key,
        run=run,
    )
    there = _make_way(tier, part)
    if there is not None:
        return there
    name = payload_name(version, rank, part.kind)
    if basis is None:
        head = header(part)
        body: Body = Full(source, head, pace)
        part = structs.replace(part, header=len(head))
    else:
        body = Delta(source, basis, pace)
    size = tier.put(name, body)
    source.check()
    part = structs.replace(
        part,
        file=name.rpartition("/")[2],
        size=size,
        sums=body.file.finish(),
        payload_sums=body.payload.finish(),
        frames=tuple(body.frames),
        written_ns=now(),
        read_back=True,
    )
    return _describe(tier, part, pace)


def copy_part(source: Tier, tier: Tier, part: Part, *, pace: Pace | None = None, now: Now = time.time_ns) -> Part:
    """Bring a part that is whole in one tier into another; each chunk is compared with its checksum on the way.

    Raises:
        PayloadDamaged: the copy in ``source`` has changed since it was written, or what arrived differs.
        TierError: either tier's troubles.
    """
    there = _make_way(tier, part)
    if there is not None:
        return there
    name = payload_name(part.version, part.rank, part.kind)
    tier.put(name, Copied(source, name, part, pace))
    return _describe(tier, structs.replace(part, written_ns=now()), pace)


def _make_way(tier: Tier, part: Part) -> Part | None:
    """The part if it is there; else end the existence of another history's generation of this version."""
    try:
        there = catalog.part(tier, part.version, part.rank)
        whole = _serves(there, part) and tier.size(f"{folder(part.version)}/{there.file}") == there.size
        if whole and (there.base is None or catalog.look(tier, there.base).complete) and not _is_marked(tier, there):
            return there
    except (GenerationIncomplete, ManifestDamaged, TierMissing):
        pass
    for name in (manifest_name(part.version), verified_name(part.version), part_name(part.version, part.rank)):
        tier.remove(name)
    return None


def _is_marked(tier: Tier, part: Part) -> bool:
    """Whether these very bytes have been found damaged or are tainted: then they are written anew."""
    every = (*catalog.marks(tier, part.version), *tainted.marks(tier, part.version))
    bad = {one.sum for one in every if one.rank == part.rank}
    return bool(bad) and sums.digest(tier.get(part_name(part.version, part.rank))) in bad


def _serves(there: Part, part: Part) -> bool:
    """Whether ``there`` is the same rank's part of the same state.

    Within a run a version is one state. A rank that was replaced may save it again with another plain part; the first
    one stays. Where no run is named, equal words have to do.
    """
    same = there.history == part.history and there.world_size == part.world_size and there.tensors == part.tensors
    return same and there.read_back and bool(part.run or (there.key == part.key and there.plain == part.plain))


def _describe(tier: Tier, part: Part, pace: Pace | None) -> Part:
    """Read the payload back, within the same budget of bytes, and only then say that it is there."""
    for chunk in sound_chunks(tier, payload_name(part.version, part.rank, part.kind), part):
        if pace is not None:
            pace.wait(len(chunk))
    name, data = part_name(part.version, part.rank), seal(part)
    tier.put(name, [data])
    if tier.get(name) != data:
        raise ManifestDamaged(f"{tier.where}/{name}: reads back otherwise than it was written")
    return part


# -------------------------------------------------------------------- generations


def complete(tier: Tier, version: Version, world_size: int, *, now: Now = time.time_ns) -> Manifest:
    """Make a generation exist, once all its parts are there. Any number of nodes may do so at once.

    The manifest follows from the parts alone, so that two writers write the same bytes.

    Raises:
        GenerationIncomplete: names the ranks whose part is not there.
        ManifestDamaged, PayloadDamaged: a part is damaged, or of another history than the rest.
    """
    names = {name.rpartition("/")[2] for name in tier.names(f"{folder(version)}/")}
    absent = catalog.missing_ranks(catalog.whole_ranks(names), world_size)
    if absent:
        raise GenerationIncomplete(f"{tier.where}/{folder(version)}: the parts of ranks {absent} are not there")
    parts, refs = _gather(tier, version, range(world_size))
    _agree(tier, parts, world_size)
    if DAMAGED in names and (bad := catalog.marked(catalog.marks(tier, version), refs)):
        raise PayloadDamaged(f"{tier.where}/{folder(version)}: damaged: {bad[0].why}")
    bases = sorted({part.base for part in parts if part.base is not None})
    for base in bases:
        under = catalog.look(tier, base)
        if not under.complete:
            raise (BaseDamaged if under.damaged else GenerationIncomplete)(
                f"{tier.where}/{folder(version)}: rests on step {base.step}, which is not complete: {under.why}"
            )
    wanted = Manifest(
        job=parts[0].job,
        version=version,
        world_size=world_size,
        created_ns=max(part.written_ns for part in parts),
        parts=tuple(refs),
        bases=tuple(bases),
        replicated=parts[0].replicated,
    )
    data = seal(wanted)
    name = manifest_name(version)
    if _get(tier, name) != data:
        tier.put(name, [data])
    if _get(tier, name) != data:
        raise ManifestDamaged(f"{tier.where}/{name}: reads back otherwise than it was written")
    if all(part.read_back for part in parts) and not catalog.is_verified(tier, version, sums.digest(data)):
        _write_verified(tier, wanted, data, now())
    if DAMAGED in names:
        tier.remove(damaged_name(version))  # it was about parts that have been written anew since
    return wanted


def verify(
    tier: Tier,
    version: Version,
    *,
    write: bool = True,
    found: Generation | None = None,
    progress: Callable[[int], None] = lambda _: None,
    now: Now = time.time_ns,
) -> Verified:
    """Read everything of a generation back and compare it, then say so in ``verified.json``.

    All parts are read, also behind a damaged one, so that ``damaged.json`` names them all; both are only written where
    ``write`` is set. One that is marked damaged is read again, and the mark goes when it turns out to be sound.

    Args:
        found: what the catalog says of it, where that is known; looked up otherwise.
        progress: called with the number of bytes as they have been compared.

    Raises:
        GenerationIncomplete: it is not complete, or rests on one that is not.
        ManifestDamaged, PayloadDamaged: name what differs. A former ``verified.json`` is then removed.
    """
    try:
        found = found or catalog.look(tier, version)
        if not found.complete and not found.damaged:
            raise GenerationIncomplete(f"{tier.where}/{folder(version)}: {found.why}")
        data = tier.get(manifest_name(version))
        manifest = unseal(data, Manifest, f"{tier.where}/{manifest_name(version)}")
        bad, first = _read_back(tier, manifest, progress)
        if first is not None:
            if write and _get(tier, manifest_name(version)) == data:  # else it is being removed, or written anew
                tier.put(damaged_name(version), [seal(Damaged(version=version, at_ns=now(), parts=tuple(bad)))])
            raise first
    except (GenerationIncomplete, ManifestDamaged, PayloadDamaged):
        if write:
            tier.remove(verified_name(version))
        raise
    if not write:
        return _verified(manifest, data, now())
    mark = _write_verified(tier, manifest, data, now())
    tier.remove(damaged_name(version))
    return mark


def _read_back(
    tier: Tier, manifest: Manifest, progress: Callable[[int], None]
) -> tuple[list[Bad], ManifestDamaged | PayloadDamaged | GenerationIncomplete | None]:
    """Parts that are not what the manifest names, and the error about the first of them."""
    bad: list[Bad] = []
    first: ManifestDamaged | PayloadDamaged | GenerationIncomplete | None = None
    sample: Part | None = None
    for named in sorted(manifest.parts, key=lambda ref: ref.rank):
        try:
            (part,), (ref,) = _gather(tier, manifest.version, [named.rank])
            if ref != named:
                name = part_name(manifest.version, named.rank)
                raise ManifestDamaged(f"{tier.where}/{name}: is not what the manifest names")
            sample = sample or part
            _agree(tier, [sample, part], manifest.world_size)
            for chunk in sound_chunks(tier, payload_name(part.version, part.rank, part.kind), part):
                progress(len(chunk))
        except (GenerationIncomplete, ManifestDamaged, PayloadDamaged) as error:
            first = first or error
            bad.append(Bad(rank=named.rank, sum=named.sum, why=str(error)))
    return bad, first


def _gather(tier: Tier, version: Version, ranks: Iterable[int]) -> tuple[list[Part], list[PartRef]]:
    """Descriptions of these ranks, whose payloads are there in full length, and how a manifest names them."""

    def one(rank: int) -> tuple[Part, PartRef]:
        name = part_name(version, rank)
        data = _get(tier, name)
        if data is None:
            raise GenerationIncomplete(f"{tier.where}/{name}: there is no such part")
        part = catalog.check_part(data, f"{tier.where}/{name}", version, rank)
        size = size_of(tier, payload_name(version, rank, part.kind))
        if size != part.size:
            raise PayloadDamaged(f"{tier.where}/{name}: its payload has {size} bytes, {part.size} were written")
        return part, PartRef(rank=rank, sum=sums.digest(data), size=len(data), bytes=part.size)

    wanted = list(ranks)
    if len(wanted) <= READERS // 2:
        found = [one(rank) for rank in wanted]
    else:
        with ThreadPoolExecutor(READERS, thread_name_prefix="parts") as pool:
            found = list(pool.map(one, wanted))
    return [part for part, _ in found], [ref for _, ref in found]


def _agree(tier: Tier, parts: list[Part], world_size: int) -> None:
    for part in parts:
        where = f"{tier.where}/{part_name(part.version, part.rank)}"
        if part.world_size != world_size:
            raise ManifestDamaged(f"{where}: is one of {part.world_size} ranks, this generation has {world_size}")
        if part.history != parts[0].history:
            raise ManifestDamaged(
                f"{where}: belongs to another history ({' '.join(part.history)}) than rank {parts[0].rank}'s part "
                f"({' '.join(parts[0].history)}); do two jobs write to the same place?"
            )
        if part.file != payload_name(part.version, part.rank, part.kind).rpartition("/")[2]:
            raise ManifestDamaged(f"{where}: names {part.file!r} as its payload")


def _verified(manifest: Manifest, data: bytes, at_ns: int) -> Verified:
    total = sum(ref.bytes + ref.size for ref in manifest.parts) + len(data)
    return Verified(version=manifest.version, at_ns=at_ns, bytes=total, manifest_sum=sums.digest(data))


def _write_verified(tier: Tier, manifest: Manifest, data: bytes, at_ns: int) -> Verified:
    found = _verified(manifest, data, at_ns)
    tier.put(verified_name(manifest.version), [seal(found)])
    return found


def _get(tier: Tier, name: str) -> bytes | None:
    try:
        return tier.get(name)
    except TierMissing:
        return None
