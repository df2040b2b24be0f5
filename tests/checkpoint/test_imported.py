"""Imported: generations that come from elsewhere are written as any other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keepstep.checkpoint import archive, imported
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.memory import MemoryTier
from tests.checkpoint import durable_made as made

OLD, NEW = Version(1, 1), Version(2, 1)


class Listening(MemoryTier):
    """Remembers what was said about the size of each object beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: dict[str, int] = {}

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        if hint := getattr(chunks, "size_hint", 0):
            self.announced[name] = hint
        return super().put(name, chunks)


def test_a_copy_says_how_large_each_payload_will_be_and_rests_on_nothing() -> None:
    """An upload in ten thousand parts at most has to know that: a whole model may be one payload."""
    source, target = MemoryTier(), Listening()
    first, tensors = made.payload_of({"p/m/w": np.arange(300_000, dtype=np.float32)})
    second, _ = made.payload_of({"p/m/w": np.arange(300_000, dtype=np.float32) * 1.5})
    made.complete(source, OLD, [made.write_part(source, OLD, 0, first, tensors)])
    made.complete(source, NEW, [made.write_part(source, NEW, 0, second, tensors, base=(OLD, first))])
    manifest = imported.copy(Reader([source], NEW), target)
    assert manifest.bases == ()
    archive.verify(target, NEW, write=False)
    payloads = {name: len(data) for name, data in target.objects.items() if name.endswith(".safetensors")}
    assert target.announced == payloads
