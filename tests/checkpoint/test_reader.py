"""The reader: any range of any part, verified, from the next tier when one is damaged, and through chains of deltas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import generation, reshard, sums
from keepstep.checkpoint.exceptions import GenerationIncomplete, ManifestDamaged, PayloadDamaged
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.reader import Damage, Reader
from keepstep.checkpoint.reshard import Piece
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from tests.checkpoint import durable_made as made

V = Version(100, 1)
CHUNK = 64


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    """Many chunks in little data."""
    before, sums.CHUNK = sums.CHUNK, CHUNK
    yield
    sums.CHUNK = before


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    luck = np.random.default_rng(seed)
    return {
        "p/m/a": luck.standard_normal((13, 7), dtype="float32"),
        "p/m/b": luck.integers(0, 255, 101, dtype="uint8"),
        "o/o/0/0/exp_avg": luck.standard_normal((40,), dtype="float32"),
    }


def one_part(tier: MemoryTier | DirectoryTier, version: Version = V, seed: int = 0) -> bytes:
    payload, entries = made.payload_of(arrays(seed))
    made.complete(tier, version, [made.write_part(tier, version, 0, payload, entries)])
    return payload


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_range_is_read_alike_from_memory_disk_and_chain(data: st.DataObject) -> None:
    payload = PAYLOADS[9]
    start = data.draw(st.integers(0, len(payload)))
    end = data.draw(st.integers(start, len(payload)))
    assert bytes(CHAIN.stretch(0, start, end)) == payload[start:end]


def chain(tier: MemoryTier | DirectoryTier) -> list[bytes]:
    """A full generation and nine that rest on each other."""
    payloads: list[bytes] = []
    luck, state = np.random.default_rng(3), arrays()
    for number in range(10):
        payload, entries = made.payload_of(state)
        base = (Version(number, 1), payloads[-1]) if number else None
        part = made.write_part(tier, Version(number + 1, 1), 0, payload, entries, base=base)
        made.complete(tier, Version(number + 1, 1), [part])
        payloads.append(payload)
        state = {name: (array + luck.integers(0, 2, array.shape)).astype(array.dtype) for name, array in state.items()}
    return payloads


CHAIN_TIER = MemoryTier()
sums.CHUNK, _usual = CHUNK, sums.CHUNK
PAYLOADS = chain(CHAIN_TIER)
sums.CHUNK = _usual
CHAIN = Reader([CHAIN_TIER], Version(10, 1))


def test_each_link_of_a_chain_is_its_own_state() -> None:
    for number, payload in enumerate(PAYLOADS):
        assert bytes(Reader([CHAIN_TIER], Version(number + 1, 1)).stretch(0, 0, len(payload))) == payload


def test_a_flipped_bit_anywhere_in_a_chain_is_found() -> None:
    """Every object of the chain, a random bit of each: never other bytes, always an error that names the place."""
    luck = random.Random(7)
    for name, whole in list(CHAIN_TIER.objects.items()):
        if name.endswith((generation.MANIFEST, generation.VERIFIED)):
            continue
        tier = MemoryTier()
        tier.objects = dict(CHAIN_TIER.objects)
        first = Reader([CHAIN_TIER], Version(1, 1)).part(0).header if name.endswith(".safetensors") else 0
        for _ in range(6 if whole else 0):
            broken, at = bytearray(whole), luck.randrange(first, len(whole))
            broken[at] ^= 1 << luck.randrange(8)
            tier.objects[name] = bytes(broken)
            told: list[Damage] = []
            with pytest.raises(PayloadDamaged, match=r"step \d+"):
                Reader([tier], Version(10, 1), told=told.append).stretch(0, 0, len(PAYLOADS[9]))
            assert any(name in damage.name or name in damage.why for damage in told)


def test_a_directory_is_read_like_an_object_store(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, create=True)
    payload = one_part(tier)
    assert bytes(Reader([tier], V).stretch(0, 5, 600)) == payload[5:600]


class Counting(MemoryTier):
    """Remembers which bytes of payloads were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int | None]] = []

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if not name.endswith(".json"):
            self.asked.append((start, length))
        return super().get(name, start, length)


def test_only_the_chunks_that_a_range_touches_are_read() -> None:
    tier = Counting()
    one_part(tier)
    reader = Reader([tier], V)
    reader.stretch(0, 70, 130)
    assert tier.asked == [(reader.part(0).header + 64, 128)]


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "json", "json gone"])
def test_a_damaged_copy_falls_to_the_next_tier_and_is_told_once(harm: str) -> None:
    near, far = MemoryTier("local"), MemoryTier("remote")
    payload = one_part(near)
    one_part(far)
    file, json = generation.payload_name(V, 0, "full"), generation.part_name(V, 0)
    if harm == "flip":
        near.objects[file] = near.objects[file][:-9] + bytes([near.objects[file][-9] ^ 4]) + near.objects[file][-8:]
    elif harm == "cut":
        near.objects[file] = near.objects[file][:-1]
    elif harm == "gone":
        del near.objects[file]
    elif harm == "json":
        near.objects[json] = near.objects[json].replace(b'"rank":0', b'"rank":1')
    else:
        del near.objects[json]
    told: list[Damage] = []
    reader = Reader([near, far], V, told=told.append)
    for _ in range(2):
        assert bytes(reader.stretch(0, 0, len(payload))) == payload
    assert [damage.tier for damage in told] == ([] if harm == "json gone" else ["local"])
    assert reader.from_tier == {"remote": 2 * len(payload)}


def test_without_a_whole_copy_all_reasons_are_given() -> None:
    near, far = MemoryTier("local", "disk"), MemoryTier("remote", "bucket")
    payload = one_part(near)
    one_part(far)
    for tier in (near, far):
        file = generation.payload_name(V, 0, "full")
        tier.objects[file] = tier.objects[file][:-1] + b"~"
    reader = Reader([near, far], V)
    with pytest.raises(PayloadDamaged, match=r"(?s)rank 0.*disk.*bytes 576 to.*bucket"):
        reader.stretch(0, 0, len(payload))
    assert bytes(Reader([near, far], V).stretch(0, 0, 576)) == payload[:576]


def test_a_part_that_the_manifest_does_not_name_is_not_used() -> None:
    """Another writer's part under the same name: sound by itself, but not of this generation."""
    tier = MemoryTier()
    one_part(tier)
    payload, entries = made.payload_of(arrays(5))
    made.write_part(tier, V, 0, payload, entries)
    with pytest.raises(PayloadDamaged, match="is not what the manifest names"):
        Reader([tier], V).part(0)


def test_what_is_not_there_is_said() -> None:
    tier = MemoryTier()
    with pytest.raises(GenerationIncomplete, match=r"step 100 is not complete in memory://"):
        Reader([tier], V).manifest()
    with pytest.raises(GenerationIncomplete, match="rank 3's part is not in memory://"):
        Reader([tier], V).part(3)
    one_part(tier)
    assert Reader([tier], V).manifest().world_size == 1
    tier.objects[generation.manifest_name(V)] = b"{}"
    with pytest.raises(ManifestDamaged):
        Reader([tier], V).manifest()


def test_a_chain_that_bites_its_tail_is_refused() -> None:
    tier = MemoryTier()
    payload, entries = made.payload_of(arrays())
    other = made.payload_of(arrays(1))[0]
    made.write_part(tier, V, 0, payload, entries, base=(V, other))
    with pytest.raises(PayloadDamaged, match="claims to rest on step 100"):
        Reader([tier], V).stretch(0, 0, 10)


def test_a_plan_is_carried_out_by_many_threads(tmp_path: Path) -> None:
    """Two ranks' halves of a matrix, by columns, into one: with progress to the last byte."""
    tier = DirectoryTier(tmp_path, create=True)
    whole = np.random.default_rng(2).standard_normal((300, 64), dtype="float32")
    parts: list[Part] = []
    for rank, half in enumerate(np.split(whole, 2, axis=1)):
        entry = made.entry("p/m/w", half, 0, global_shape=(300, 64), corner=(0, 32 * rank))
        parts.append(made.write_part(tier, V, rank, half.tobytes(), [entry], world_size=2))
    made.complete(tier, V, parts)
    reader = Reader([tier], V)
    held = [
        Piece("w", "float32", (300, 64), (0, 32 * rank), (300, 32), 0, 4, rank)
        for rank in (part.rank for part in parts)
    ]
    blocks = reshard.plan([Piece("w", "float32", (300, 64), (0, 0), (300, 64), 0, 4)], {"w": held})
    target, done = bytearray(whole.nbytes), []
    reader.fill(reshard.reads(blocks, limit=1000), memoryview(target), done.append)
    assert bytes(target) == whole.tobytes()
    assert sum(done) == whole.nbytes
