"""Bit flips: one wrong bit anywhere in what lies in memory or in a tier is found before anything is restored from it.

Every byte of the small files is tried, and of the large ones a seeded sample together with both ends of every checksum
chunk. The seed is printed; ``KEEPSTEP_SEED`` sets it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint import archive, catalog, sums
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.exceptions import CheckpointError, SlotInvalid
from keepstep.checkpoint.generation import folder
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.tiers.memory import MemoryTier
from tests.checkpoint.states import Spec, write_slot

SEED = int(os.environ.get("KEEPSTEP_SEED", "20261"))
SMALL_FILE = 8 * 1024
"""Bytes up to which every byte is tried."""
SAMPLE = 120
SPECS: tuple[Spec, ...] = (("weight", "float32", (600_000,), 2_400_000), ("moment", "float32", (600_000,), 2_400_000))
STEPS = (100, 200)
HEADER_WORDS = 7
"""Of the slot's header: magic, state, step, epoch, length of data, length of description and its checksum."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> MemoryTier:
    """A full generation and a difference that rests on it."""
    pytest.importorskip("zstandard")
    tier, basis = MemoryTier(), Basis()
    path = tmp_path_factory.mktemp("slot") / "rank0.0"
    for step in STEPS:
        write_slot(path, Version(step, 1), specs=SPECS, salt=0 if step == 100 else 1)
        slot = Slot(path)
        source = Source.of_slot(slot)
        part = archive.write_part(tier, source, job="job", rank=0, world_size=1, basis=basis if basis.usable else None)
        basis.take(source, part)
        slot.close()
        archive.complete(tier, Version(step, 1), 1)
    assert all(generation.verified for generation in catalog.read(tier))
    return tier


def places(size: int, luck: random.Random) -> Iterator[int]:
    """Every byte of a small file; of a large one both ends of each chunk, and a sample."""
    if size <= SMALL_FILE:
        yield from range(size)
        return
    edges = {edge for start, end in sums.chunks(size) for edge in (start, end - 1)}
    yield from sorted(edges | {luck.randrange(size) for _ in range(SAMPLE)})


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (100, "rank00000.safetensors"),
        (100, "rank00000.json"),
        (100, "manifest.json"),
        (100, "verified.json"),
        (200, "rank00000.delta"),
        (200, "rank00000.json"),
        (200, "manifest.json"),
        (200, "verified.json"),
    ],
)
def test_no_flipped_bit_in_a_tier_goes_unnoticed(stored: MemoryTier, step: int, name: str) -> None:
    """Verification refuses the generation, or no longer believes the mark that it was verified."""
    print(f"KEEPSTEP_SEED={SEED}")
    luck = random.Random(f"{SEED}/{step}/{name}")
    version, full = Version(step, 1), f"{folder(Version(step, 1))}/{name}"
    original, tried = stored.objects[full], 0
    try:
        for at in places(len(original), luck):
            changed = bytearray(original)
            changed[at] ^= 1 << luck.randrange(8)
            stored.objects[full] = bytes(changed)
            assert _noticed(stored, version, name), f"byte {at} of {full}"
            tried += 1
    finally:
        stored.objects[full] = original
    assert tried > 100
    assert catalog.look(stored, version).verified


def _noticed(tier: MemoryTier, version: Version, name: str) -> bool:
    if name == "verified.json":
        return not catalog.look(tier, version).verified
    try:
        archive.verify(tier, version, write=False)
    except CheckpointError:
        return True
    return False


@pytest.mark.parametrize("cut", [0, 1, 7, 100])
@pytest.mark.parametrize("name", ["rank00000.safetensors", "rank00000.json", "manifest.json"])
def test_no_cut_off_end_goes_unnoticed(stored: MemoryTier, name: str, cut: int) -> None:
    """A truncated file is damage, not a shorter state."""
    full = f"{folder(Version(100, 1))}/{name}"
    original = stored.objects[full]
    try:
        for changed in (original[:cut], original[: len(original) - 1 - cut], original + b"x"):
            stored.objects[full] = changed
            with pytest.raises(CheckpointError):
                archive.verify(stored, Version(100, 1), write=False)
    finally:
        stored.objects[full] = original


def test_a_damaged_base_is_noticed_from_the_difference(stored: MemoryTier) -> None:
    """A generation whose base lost its manifest is not complete."""
    name = f"{folder(Version(100, 1))}/manifest.json"
    original = stored.objects[name]
    stored.objects[name] = original[:-10] + b"0" + original[-9:]
    try:
        assert not next(g for g in catalog.read(stored) if g.version.step == 200).complete
        assert not catalog.look(stored, Version(200, 1)).complete
    finally:
        stored.objects[name] = original


# -------------------------------------------------------------------- memory


def _spans(slot: Slot) -> dict[str, range]:
    return {
        "header": range(HEADER_WORDS * 8),
        "data": range(HEADER, slot.data_end),
        "description": range(slot.data_end, slot.used),
    }


@pytest.mark.parametrize("kind", ["header", "data", "description"])
def test_no_flipped_bit_in_a_slot_goes_unnoticed(tmp_path: Path, kind: str) -> None:
    """Identity words, tensors and description: neither verified nor written to a tier."""
    print(f"KEEPSTEP_SEED={SEED}")
    luck = random.Random(f"{SEED}/{kind}")
    path = tmp_path / "rank0.0"
    write_slot(path, Version(100, 1), specs=SPECS)
    slot = Slot(path)
    span = _spans(slot)[kind]
    slot.verify()
    for at in places(len(span), luck):
        bit = 1 << luck.randrange(8)
        slot.memory[span.start + at] ^= bit
        try:
            assert _refused(slot.verify) or _refused(slot.describe), f"byte {at} of the {kind}"
            assert _refused(lambda: _archive(path)), f"byte {at} of the {kind} reached a tier"
        finally:
            slot.memory[span.start + at] ^= bit
    slot.verify()
    slot.close()


def test_no_flipped_bit_in_a_table_of_checksums_goes_unnoticed(tmp_path: Path) -> None:
    """The checksums are checked themselves, and so is which version they are of."""
    print(f"KEEPSTEP_SEED={SEED}")
    luck = random.Random(f"{SEED}/table")
    path, table = tmp_path / "rank0.0", tmp_path / "rank0.0.sums"
    write_slot(path, Version(100, 1), specs=SPECS)
    slot = Slot(path)
    slot.verify()
    original = table.read_bytes()
    for at in range(len(original)):
        changed = bytearray(original)
        changed[at] ^= 1 << luck.randrange(8)
        table.write_bytes(changed)
        assert _refused(slot.verify), f"byte {at} of the table"
        assert _refused(lambda: _archive(path)), f"byte {at} of the table let the slot reach a tier"
    for wrong in (original[:-8], original + original[-8:], b""):
        table.write_bytes(wrong)
        assert _refused(slot.verify)
    table.write_bytes(original)
    slot.verify()
    slot.close()


def _archive(path: Path) -> None:
    slot = Slot(path)
    try:
        archive.write_part(MemoryTier(), Source.of_slot(slot), job="job", rank=0, world_size=1)
    finally:
        slot.close()


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except SlotInvalid:
        return True
    return False
