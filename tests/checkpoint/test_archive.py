"""Archive: parts are standard files whose bytes were checked on the way, generations exist when their manifest does."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import archive, catalog, sums
from keepstep.checkpoint import delta as codec
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.bodies import READ_BYTES
from keepstep.checkpoint.exceptions import (
    GenerationIncomplete,
    ManifestDamaged,
    PayloadDamaged,
    SlotDamaged,
    SlotInvalid,
    TierFull,
)
from keepstep.checkpoint.generation import Part, folder, manifest_name, part_name, payload_name, verified_name
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.checkpoint.source import GATHER, Running, Source
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.ports.tier import Tier
from tests.checkpoint.states import SMALL, Spec, bytes_of, write_slot

V = Version(100, 1)
LARGE: tuple[Spec, ...] = (
    ("odd", "uint8", (7,), 7),
    ("large", "float32", (2_500_000,), 10_000_000),
    *((f"small{n}", "float16", (50,), 100) for n in range(40)),
    ("middle", "float64", (200_000,), 1_600_000),
)


def put(
    tier: Tier,
    path: Path,
    version: Version = V,
    *,
    rank: int = 0,
    world_size: int = 1,
    specs: Iterable[Spec] = SMALL,
    basis: Basis | None = None,
    job: str = "job",
    run: str = "",
    key: str = "e1/controller",
    salt: int = 0,
    hold: Basis | None = None,
) -> tuple[Part, dict[str, bytes]]:
    """Fill a slot and write it as a trainer and an archiver would."""
    want = write_slot(path, version, rank=rank, world_size=world_size, specs=tuple(specs), key=key, salt=salt)
    slot = Slot(path)
    source = Source.of_slot(slot)
    part = archive.write_part(tier, source, job=job, run=run, rank=rank, world_size=world_size, basis=basis)
    if hold is not None:
        hold.take(source, part)
    slot.close()
    return part, want


@pytest.mark.parametrize("specs", [SMALL, LARGE])
def test_a_part_is_a_safetensors_file_that_its_own_library_reads(tmp_path: Path, specs: tuple[Spec, ...]) -> None:
    """Names, types, shapes and bytes as the trainer had them; step, epoch and rank in the metadata."""
    safetensors = pytest.importorskip("safetensors")
    numpy = pytest.importorskip("numpy")
    tier = DirectoryTier(tmp_path / "tier", create=True)
    part, want = put(tier, tmp_path / "rank0.0", specs=specs)
    path = tmp_path / "tier" / payload_name(V, 0, "full")
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(want)
        assert file.metadata()["step"] == "100"
        for name, dtype, shape, _ in specs:
            assert list(file.get_slice(name).get_shape()) == list(shape)
            if dtype != "bfloat16":  # numpy has none
                found = file.get_tensor(name)
                assert found.tobytes() == want[name]
                assert found.dtype == numpy.dtype(dtype)
    data = path.read_bytes()
    assert part.read_back
    assert struct.unpack("<Q", data[:8])[0] + 8 == part.header
    assert part.header % 8 == 0
    for entry in part.tensors:
        start = part.header + entry.offset
        assert data[start : start + entry.nbytes] == want[entry.name]


def test_wider_elements_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    """A file may be mapped and used in place."""
    part, _ = put(MemoryTier(), tmp_path / "rank0.0", specs=LARGE)
    width = {"uint8": 1, "float16": 2, "float32": 4, "float64": 8}
    for entry in part.tensors:
        assert (part.header + entry.offset) % width[entry.dtype] == 0


def test_a_type_that_the_format_lacks_is_stored_as_bytes(tmp_path: Path) -> None:
    """The record keeps what it is; the file stays readable for everybody."""
    tier = MemoryTier()
    part, want = put(tier, tmp_path / "rank0.0", specs=[("c", "complex128", (3,), 48)])
    head = msgspec.json.decode(tier.objects[payload_name(V, 0, "full")][8 : part.header])
    assert head["c"] == {"dtype": "U8", "shape": [48], "data_offsets": [0, 48]}
    assert part.tensors[0].dtype == "complex128"
    assert tier.objects[payload_name(V, 0, "full")][part.header :] == want["c"]


def test_what_another_rank_writes_is_left_out(tmp_path: Path) -> None:
    """Of equal copies one is written; the plain part goes with every rank."""
    want = write_slot(tmp_path / "rank0.0", V, others=("weight",))
    slot = Slot(tmp_path / "rank0.0")
    part = archive.write_part(MemoryTier(), Source.of_slot(slot), job="job", rank=1, world_size=2)
    assert {entry.name for entry in part.tensors} == set(want) == {"flag", "half", "empty"}
    assert part.plain == b"plain 100 0 0"


def test_a_damaged_slot_is_not_written(tmp_path: Path) -> None:
    """End to end: the keeper's checksum, made before anything travelled, is compared before anything is written."""
    write_slot(tmp_path / "rank0.0", V, specs=LARGE)
    slot = Slot(tmp_path / "rank0.0")
    slot.memory[HEADER + 6_000_000] ^= 16
    tier = DirectoryTier(tmp_path / "tier", create=True)
    with pytest.raises(SlotDamaged, match="step 100"):
        archive.write_part(tier, Source.of_slot(slot), job="job", rank=0, world_size=1)
    assert list(tier.names()) == []


def test_a_slot_that_the_trainer_takes_back_becomes_no_part(tmp_path: Path) -> None:
    """Bytes of two steps must never meet in one file."""

    class TakenBack(MemoryTier):
        def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
            size = super().put(name, chunks)
            if name.endswith("safetensors"):
                slot.begin()
            return size

    write_slot(tmp_path / "rank0.0", V)
    slot = Slot(tmp_path / "rank0.0")
    tier = TakenBack()
    with pytest.raises(SlotInvalid, match="overwritten"):
        archive.write_part(tier, Source.of_slot(slot), job="job", rank=0, world_size=1)
    assert part_name(V, 0) not in tier.objects
    assert catalog.look(tier, V).ranks == ()


def test_a_tier_that_keeps_other_bytes_than_it_was_given_is_found_out(tmp_path: Path) -> None:
    """Read-back: nothing is described that does not read back as it was written."""

    class Lying(MemoryTier):
        def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
            size = super().put(name, chunks)
            data = bytearray(self.objects[name])
            data[len(data) // 2] ^= 1
            self.objects[name] = bytes(data)
            return size

    tier = Lying()
    with pytest.raises(PayloadDamaged, match="do not match their checksum"):
        put(tier, tmp_path / "rank0.0")
    assert part_name(V, 0) not in tier.objects


def test_a_generation_exists_from_its_manifest_on(tmp_path: Path) -> None:
    """The ranks that are missing are named; the last part makes it possible."""
    tier = MemoryTier()
    for rank in (0, 2):
        put(tier, tmp_path / f"rank{rank}.0", rank=rank, world_size=4)
        with pytest.raises(GenerationIncomplete, match="ranks 1"):
            archive.complete(tier, V, 4)
    assert not catalog.look(tier, V).complete
    for rank in (1, 3):
        put(tier, tmp_path / f"rank{rank}.0", rank=rank, world_size=4)
    archive.complete(tier, V, 4)
    (found,) = catalog.read(tier)
    assert (found.complete, found.verified, found.world_size, found.ranks) == (True, True, 4, (0, 1, 2, 3))
    assert archive.verify(tier, V).bytes > found.bytes


def test_two_who_complete_write_the_same_bytes(tmp_path: Path) -> None:
    """The manifest follows from the parts, whoever writes it and however often."""
    tier = MemoryTier()
    put(tier, tmp_path / "rank0.0")
    archive.complete(tier, V, 1, now=lambda: 1)
    before = dict(tier.objects)
    del tier.objects[manifest_name(V)]
    archive.complete(tier, V, 1, now=lambda: 2)
    assert tier.objects[manifest_name(V)] == before[manifest_name(V)]
    archive.complete(tier, V, 1, now=lambda: 3)
    assert tier.objects == before


def test_writing_the_same_again_is_a_quiet_success(tmp_path: Path) -> None:
    """An archiver that died before it lifted the pin writes nothing twice."""
    tier = MemoryTier()
    first, _ = put(tier, tmp_path / "rank0.0")
    archive.complete(tier, V, 1)
    before = dict(tier.objects)
    again, _ = put(tier, tmp_path / "rank0.0")
    assert again == first
    assert tier.objects == before


def test_parts_of_two_runs_never_become_one_generation(tmp_path: Path) -> None:
    """A run that reaches the same version again ends the old generation first, and waits for all new parts."""
    tier = MemoryTier()
    for rank in (0, 1):
        put(tier, tmp_path / f"rank{rank}.0", rank=rank, world_size=2, run="1")
    archive.complete(tier, V, 2)
    put(tier, tmp_path / "rank0.0", rank=0, world_size=2, run="2", salt=1)
    assert not catalog.look(tier, V).complete
    with pytest.raises(ManifestDamaged, match="another history"):
        archive.complete(tier, V, 2)
    put(tier, tmp_path / "rank1.0", rank=1, world_size=2, run="2", salt=1)
    archive.complete(tier, V, 2)
    assert catalog.look(tier, V).verified
    archive.verify(tier, V)


def test_a_version_saved_again_by_a_replaced_rank_leaves_the_generation_alone(tmp_path: Path) -> None:
    """Its parameters came from a live replica, its random state may differ: what is complete stays as it is."""
    tier = MemoryTier()
    for rank in (0, 1):
        put(tier, tmp_path / f"rank{rank}.0", rank=rank, world_size=2, run="1")
    archive.complete(tier, V, 2)
    before = dict(tier.objects)
    write_slot(tmp_path / "rank1.1", V, rank=1, world_size=2, key="e2/controller", plain=b"other")
    slot = Slot(tmp_path / "rank1.1")
    archive.write_part(tier, Source.of_slot(slot), job="job", run="1", rank=1, world_size=2)
    assert tier.objects == before


def test_without_a_run_to_go_by_other_words_mean_another_state(tmp_path: Path) -> None:
    """Nothing names the run: a part that differs is written anew."""
    tier = MemoryTier()
    put(tier, tmp_path / "rank0.0")
    archive.complete(tier, V, 1)
    part, _ = put(tier, tmp_path / "rank0.0", salt=1)
    assert part.plain == b"plain 100 0 1"
    assert not catalog.look(tier, V).complete


def test_a_part_of_another_world_size_is_refused(tmp_path: Path) -> None:
    """Half of a larger world is not a smaller one."""
    tier = MemoryTier()
    put(tier, tmp_path / "rank0.0", rank=0, world_size=2)
    with pytest.raises(ManifestDamaged, match="one of 2 ranks"):
        archive.complete(tier, V, 1)


def test_a_difference_restores_every_byte_and_rests_on_its_base(tmp_path: Path) -> None:
    """Decoded down the chain the payload is the state, bit for bit."""
    pytest.importorskip("zstandard")
    tier, basis = MemoryTier(), Basis()
    payloads = {}
    for step in (100, 200, 300):
        rests = basis if basis.usable else None
        part, want = put(tier, tmp_path / "rank0.0", Version(step, 1), specs=LARGE, basis=rests, hold=basis)
        payloads[step] = (part, b"".join(want[entry.name] for entry in part.tensors))
        archive.complete(tier, Version(step, 1), 1)
        archive.verify(tier, Version(step, 1))
    assert [part.kind for part, _ in payloads.values()] == ["full", "delta", "delta"]
    held = bytearray(payloads[100][1])
    for step in (200, 300):
        part, want_bytes = payloads[step]
        with memoryview(held) as out:
            file = memoryview(tier.objects[payload_name(part.version, 0, "delta")])
            codec.decode(part.frames, file, out, out)
        assert bytes(held) == want_bytes
        assert tuple(sums.table(memoryview(held))) == part.payload_sums
    generations = {g.version.step: g for g in catalog.read(tier)}
    assert generations[300].bases == (Version(200, 1),)
    tier.remove(manifest_name(Version(100, 1)))
    broken = {g.version.step: g for g in catalog.read(tier)}
    assert [broken[step].complete for step in (100, 200, 300)] == [False, False, False]
    assert "rests on step 200" in broken[300].why
    with pytest.raises(GenerationIncomplete, match="rests on"):
        archive.verify(tier, Version(300, 1))


def test_a_basis_serves_only_what_it_fits(tmp_path: Path) -> None:
    """A later step, the same layout, a chain that is short enough."""
    tier, basis = MemoryTier(), Basis()
    put(tier, tmp_path / "rank0.0", Version(100, 1), hold=basis)

    def serves(version: Version, specs: tuple[Spec, ...], full_every: int) -> bool:
        write_slot(tmp_path / "rank0.1", version, specs=specs)
        slot = Slot(tmp_path / "rank0.1")
        try:
            return basis.serves(Source.of_slot(slot), full_every)
        finally:
            slot.close()

    assert serves(Version(200, 1), SMALL, 2)
    assert not serves(Version(200, 1), SMALL, 1)
    assert not serves(Version(100, 1), SMALL, 2)
    assert not serves(Version(200, 1), LARGE, 2)


def test_a_basis_found_after_a_restart_is_not_trusted_with_a_chain(tmp_path: Path) -> None:
    """How long the chain of a difference is that somebody else wrote is not known; the next one is full."""
    tier, basis = MemoryTier(), Basis()
    put(tier, tmp_path / "rank0.0", Version(100, 1), hold=basis)
    archive.complete(tier, Version(100, 1), 1)
    put(tier, tmp_path / "rank0.0", Version(200, 1), basis=basis)
    fresh = Basis()
    part, _ = put(tier, tmp_path / "rank0.0", Version(200, 1), hold=fresh)
    assert part.kind == "delta"
    assert not fresh.usable


def test_a_copy_is_the_same_part(tmp_path: Path) -> None:
    """The second tier gets the first one's bytes, compared on the way."""
    near, far = MemoryTier(), MemoryTier()
    part, _ = put(near, tmp_path / "rank0.0", specs=LARGE)
    archive.copy_part(near, far, part)
    archive.complete(far, V, 1)
    archive.verify(far, V)
    name = payload_name(V, 0, "full")
    assert near.objects[name] == far.objects[name]
    data = bytearray(near.objects[name])
    data[5_000_000] ^= 1
    near.objects[name] = bytes(data)
    other = MemoryTier()
    with pytest.raises(PayloadDamaged):
        archive.copy_part(near, other, part)
    assert other.objects == {}


def test_a_rate_holds_for_writing_and_for_reading_back(tmp_path: Path) -> None:
    """``--ckpt-rate-remote``: twice the size in bytes, never faster than agreed."""
    paused: list[float] = []
    pace = Pace(1_000_000, clock=lambda: sum(paused), sleep=paused.append)
    write_slot(tmp_path / "rank0.0", V, specs=LARGE)
    slot = Slot(tmp_path / "rank0.0")
    part = archive.write_part(MemoryTier(), Source.of_slot(slot), job="job", rank=0, world_size=1, pace=pace)
    assert sum(paused) >= (2 * part.size - READ_BYTES) / 1_000_000 - 1


def test_a_full_tier_keeps_what_is_complete(tmp_path: Path) -> None:
    """No room for the next generation: it leaves nothing, the one before stays whole."""

    class Full(MemoryTier):
        room = 10**9

        def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
            data = b"".join(bytes(chunk) for chunk in chunks)
            if len(data) > self.room:
                raise TierFull(f"{name}: no space left")
            return super().put(name, [data])

    tier = Full()
    put(tier, tmp_path / "rank0.0")
    archive.complete(tier, V, 1)
    tier.room = 10
    with pytest.raises(TierFull):
        put(tier, tmp_path / "rank0.0", Version(200, 1))
    assert [g.version.step for g in catalog.read(tier) if g.complete] == [100]
    archive.verify(tier, V, write=False)


@given(pieces=st.lists(st.integers(0, 3 * sums.CHUNK // 2), max_size=6))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_running_checksums_are_those_of_the_whole(pieces: list[int]) -> None:
    """However the bytes come, the table is the same."""
    data = bytes_of(1, 1000) * (sum(pieces) // 1000 + 1)
    running, at = Running(), 0
    for size in pieces:
        running.add(memoryview(data)[at : at + size])
        at += size
    assert list(running.finish()) == sums.table(memoryview(data)[:at])


@given(sizes=st.lists(st.sampled_from([0, 1, 7, 64, 4096, GATHER - 1, GATHER, sums.CHUNK + 3]), max_size=8))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_pieces_and_groups_are_the_payload(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    """Both ways of going through a slot give every primary byte once and in order."""
    path = tmp_path_factory.mktemp("slot") / "rank0.0"
    want = write_slot(path, V, specs=[(f"t{n}", "uint8", (size,), size) for n, size in enumerate(sizes)])
    slot = Slot(path)
    source = Source.of_slot(slot)
    payload = b"".join(want[entry.name] for entry in source.tensors)
    assert b"".join(bytes(piece) for piece in source.pieces()) == payload
    assert b"".join(bytes(group.data) for group in source.groups()) == payload
    for group in source.groups():
        for entry in group.tensors:
            assert bytes(group.data[entry.offset : entry.offset + entry.nbytes]) == want[entry.name]
    assert source.size == len(payload)


def test_a_verified_mark_that_is_no_longer_true_is_taken_back(tmp_path: Path) -> None:
    """``verify`` finds what rotted after writing, and says so for the next reader too."""
    tier = MemoryTier()
    put(tier, tmp_path / "rank0.0")
    archive.complete(tier, V, 1)
    name = payload_name(V, 0, "full")
    tier.objects[name] = tier.objects[name][:-1] + b"?"
    with pytest.raises(PayloadDamaged, match=folder(V)):
        archive.verify(tier, V)
    assert verified_name(V) not in tier.objects
