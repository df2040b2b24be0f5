"""Chains: a full generation and nine differences, through the archive's writer and the reader, as a run leaves them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from keepstep.checkpoint import archive, catalog
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.generation import Part, folder, payload_name
from keepstep.checkpoint.reader import Damage, Reader
from keepstep.checkpoint.slot import Description, TensorEntry, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.tiers.memory import MemoryTier

SEED = 20262
LINKS = 10
FLIPPED = (0, 1, 5, 9)
"""Links of which each object has a bit flipped."""


def states() -> Iterator[tuple[Version, Description, bytes]]:
    """A training without torch: weights and moments that drift, a table that stands still, a counter, odd pieces."""
    rng = np.random.default_rng(SEED)
    weight = rng.normal(0, 0.02, 900_000).astype(np.float32)
    moment = np.abs(rng.normal(0, 1e-6, 100_001)).astype(np.float32)
    half = rng.integers(0, 2**16, 70_003, np.uint16)
    frozen = rng.integers(0, 256, 600_000, np.uint8)
    for number in range(LINKS):
        counter = np.array([number], np.int64)
        arrays = {"w": weight, "m": moment, "h": half, "f": frozen, "n": counter, "e": np.empty(0, np.float32)}
        kinds = {"w": "float32", "m": "float32", "h": "bfloat16", "f": "uint8", "n": "int64", "e": "float32"}
        body, entries = bytearray(b"head of a slot"), []
        for name, array in arrays.items():
            entries.append(TensorEntry(name, kinds[name], array.shape, len(body), array.nbytes))
            body += array.tobytes()
        yield Version(100 * (number + 1), 1), Description(tensors=tuple(entries), key="k"), bytes(body)
        if number == 6:
            continue  # and once nothing but the counter has changed
        weight = (weight + rng.normal(0, 1e-5, len(weight))).astype(np.float32)
        moment = (moment * np.float32(0.95)).astype(np.float32)
        half = half + rng.integers(0, 2, len(half), np.uint16)


Chain = tuple[MemoryTier, list[tuple[Part, bytes]]]


@pytest.fixture(scope="module")
def written() -> Chain:
    """Ten generations, and what each of them has to read as."""
    tier, basis, found = MemoryTier(), Basis(), []
    for version, description, data in states():
        source = Source.of_view(version, description, memoryview(data))
        rests = basis if basis.serves(source, LINKS) else None
        part = archive.write_part(tier, source, job="job", rank=0, world_size=1, basis=rests)
        basis.take(source, part)
        archive.complete(tier, version, 1)
        found.append((part, b"".join(bytes(piece) for piece in source.pieces())))
    return tier, found


def read(tier: MemoryTier, part: Part, damage: list[Damage] | None = None, *others: MemoryTier) -> bytes:
    reader = Reader([tier, *others], part.version, told=None if damage is None else damage.append)
    reader.manifest()
    return bytes(reader.stretch(0, 0, part.payload))


def test_every_link_is_its_state_bit_for_bit(written: Chain) -> None:
    """One full generation, nine that hold what changed, each less than the state; all restore to the very bits."""
    tier, chain = written
    assert [part.kind for part, _ in chain] == ["full"] + ["delta"] * (LINKS - 1)
    for part, payload in chain:
        assert read(tier, part) == payload
        assert part.kind == "full" or part.size < 0.7 * part.payload
    assert all(generation.verified for generation in catalog.read(tier))
    frozen = next(entry for entry in chain[-1][0].tensors if entry.name == "f")
    inside = [f for f in chain[-1][0].frames if frozen.offset <= f.start < frozen.offset + frozen.nbytes]
    assert {frame.codec for frame in inside} == {"same"}
    assert chain[7][0].size < 1000  # only the counter
    assert {frame.codec for part, _ in chain for frame in part.frames} >= {"same", "sub4+zstd", "sub2+zstd"}


def test_a_flipped_bit_anywhere_under_the_last_link_is_found(written: Chain) -> None:
    """Whatever link it hits, the last state is not restored from it, and a second tier's copy takes its place."""
    tier, chain = written
    last, payload = chain[-1]
    luck = random.Random(SEED)
    clean = MemoryTier(where="memory://second")
    clean.objects = dict(tier.objects)
    for part in (chain[number][0] for number in FLIPPED):
        for name in (payload_name(part.version, 0, part.kind), f"{folder(part.version)}/rank00000.json"):
            original = tier.objects[name]
            changed = bytearray(original)
            at = (
                luck.randrange(part.header, len(changed))
                if name.endswith("safetensors")
                else luck.randrange(len(changed))
            )
            changed[at] ^= 1 << luck.randrange(8)
            tier.objects[name] = bytes(changed)
            with pytest.raises(CheckpointError, match="step"):
                read(tier, last)
            damage: list[Damage] = []
            assert read(tier, last, damage, clean) == payload
            assert any(name in told.name or name in told.why for told in damage), f"byte {at} of {name}"
            tier.objects[name] = original
    assert read(tier, last) == payload


def test_a_chain_without_one_of_its_links_does_not_restore(written: Chain) -> None:
    """A link that was removed is missed by name, and the links below it are still whole."""
    tier, chain = written
    gone, _ = chain[4]
    removed = {name: data for name, data in tier.objects.items() if name.startswith(folder(gone.version))}
    try:
        for name in removed:
            del tier.objects[name]
        for part, payload in chain[:4]:
            assert read(tier, part) == payload
        for part, _ in chain[5:]:
            with pytest.raises(CheckpointError, match=r"step 500"):
                read(tier, part)
    finally:
        tier.objects.update(removed)


def test_differences_that_do_not_pay_are_left_for_a_while() -> None:
    """Noise on noise: after one difference as large as the state, ten full generations, and then one is tried again."""
    tier, basis, kinds = MemoryTier(), Basis(), []
    rng = np.random.default_rng(SEED)
    entries = (TensorEntry("x", "float32", (5000,), 0, 20_000),)
    for step in range(1, 15):
        source = Source.of_view(Version(step, 1), Description(tensors=entries, key="k"), memoryview(rng.bytes(20_000)))
        part = archive.write_part(
            tier, source, job="job", rank=0, world_size=1, basis=basis if basis.serves(source, 1000) else None
        )
        basis.take(source, part, took_s=0.01, at_s=float(step))
        archive.complete(tier, Version(step, 1), 1)
        kinds.append(part.kind)
    assert kinds == ["full", "delta"] + ["full"] * 10 + ["delta", "full"]
    assert basis.choice.verdict.reason == "full: a difference would take 100% of 0 MB, more than 90%"
