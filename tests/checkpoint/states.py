"""Small states in slots, as a trainer would leave them, for the tests of the durable tiers. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from keepstep.checkpoint import pair
from keepstep.checkpoint.slot import Description, Slot, TensorEntry, Version, lay_out

KEY = "e1/controller"
Spec = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, bytes."""
SMALL: tuple[Spec, ...] = (
    ("flag", "bool", (3,), 3),
    ("weight", "float32", (20, 10), 800),
    ("half", "bfloat16", (7,), 14),
    ("empty", "float32", (0,), 0),
)


def bytes_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def write_slot(
    path: Path,
    version: Version,
    *,
    rank: int = 0,
    world_size: int = 1,
    specs: Sequence[Spec] = SMALL,
    others: Sequence[str] = (),
    salt: int = 0,
    seal: bool = True,
    pin: bool = True,
    key: str = KEY,
    steady: bool = False,
    plain: bytes = b"",
) -> dict[str, bytes]:
    """Fill a slot with bytes that follow from version, rank and name.

    Args:
        others: names of tensors that other ranks write.
        steady: only the first bytes of each tensor differ from step to step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    slot = Slot(path, create=True)
    slot.begin()
    offsets, end = lay_out([nbytes for _, _, _, nbytes in specs])
    slot.grow(end)
    found, entries = {}, []
    for number, ((name, dtype, shape, nbytes), offset) in enumerate(zip(specs, offsets, strict=True)):
        data = bytes_of(version.step * 1000 + rank * 100 + number + salt * 7919, nbytes)
        if steady:
            data = data[:64] + bytes_of(rank * 100 + number, max(0, nbytes - 64))
        slot.memory[offset : offset + nbytes] = data
        entries.append(TensorEntry(name, dtype, shape, offset, nbytes, primary=name not in others))
        if name not in others:
            found[name] = data
    plain = plain or f"plain {version.step} {rank} {salt}".encode()
    slot.complete(version, end, Description(tensors=tuple(entries), plain=plain, key=key, world_size=world_size))
    if seal:
        slot.seal()
    if pin:
        slot.pin()
    slot.close()
    return found


def slot_path(node_dir: Path, rank: int, index: int = 0) -> Path:
    return pair.paths(node_dir / "snap", rank)[index]
