"""Checked: copies tensors out of a sealed slot, comparing every byte with its checksum on the way.

A chunk's bytes are added up and copied block by block by the same thread, so that the second reading comes from the
core's own cache. Whether they were right is known at the chunk's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepstep.checkpoint import sums
from keepstep.checkpoint.exceptions import SlotDamaged
from keepstep.checkpoint.slot import HEADER, Slot, TensorEntry
from keepstep.trainer.copier_torch import SMALL, Chunk, Copier, Run, move, move_small, plan, runs

BLOCK = 1024 * 1024
"""Bytes that are added up and then copied; fits a core's own cache. A chunk is a whole number of blocks."""


class Checked:
    """Copies out of one version of a slot.

    Args:
        table: the version's checksums; without them bytes are copied as they are.
    """

    def __init__(self, slot: Slot, table: Sequence[int] | None, copier: Copier) -> None:
        self._slot, self._table, self._copier = slot, table, copier
        self._base = torch.frombuffer(slot.memory, dtype=torch.uint8, count=1).data_ptr()
        self._end = slot.used
        self._sound: set[int] = set()

    def check(self, entries: Sequence[TensorEntry]) -> None:
        """Raises ``SlotDamaged`` when bytes of these tensors, or of the description, are not what was written."""
        wanted = {number for e in entries if e.nbytes for number in _chunks(e.offset, e.offset + e.nbytes)}
        wanted.update(_chunks(self._slot.data_end, self._end))
        self._compare(sorted(wanted))

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy views of the slot into tensors. After ``SlotDamaged`` the tensors hold nothing of use."""
        found, odd = runs(targets, sources)
        if self._table is None or odd:
            self._compare(range(len(self._table or ())))
            self._copier.run(plan(found, odd), sum(run.size for run in found))
            return
        blocks: dict[int, list[Run]] = {}
        for to, start, size in found:
            offset = start - self._base
            for block in range((offset - HEADER) // BLOCK, (offset + size - 1 - HEADER) // BLOCK + 1):
                low, high = max(offset, HEADER + block * BLOCK), min(offset + size, HEADER + (block + 1) * BLOCK)
                blocks.setdefault(block, []).append(Run(to + low - offset, self._base + low, high - low))
        per_chunk = sums.CHUNK // BLOCK
        self._copier.run(
            [
                self._chunk(number, [blocks.get(number * per_chunk + i, []) for i in range(per_chunk)])
                for number in range(len(self._table))
            ],
            self._end,
        )

    def _compare(self, numbers: Sequence[int]) -> None:
        if self._table is not None:
            todo = [number for number in numbers if number not in self._sound]
            self._copier.run([self._chunk(number, []) for number in todo], len(todo) * sums.CHUNK)

    def _chunk(self, number: int, blocks: Sequence[Sequence[Run]]) -> Chunk:
        def copy() -> None:
            start, end = self._start(number), min(self._start(number + 1), self._end)
            found = sums.running() if number not in self._sound else None
            with memoryview(self._slot.memory) as whole:
                for index, parts in enumerate(blocks or [()] * (sums.CHUNK // BLOCK)):
                    low = start + index * BLOCK
                    if found is not None and low < end:
                        with whole[low : min(low + BLOCK, end)] as block:
                            found.update(block)
                    for to, source, size in parts:
                        (move if size > SMALL else move_small)(to, source, size)
            if found is not None:
                self._judge(number, found.intdigest(), start, end)

        return copy

    def _judge(self, number: int, found: int, start: int, end: int) -> None:
        assert self._table is not None
        if found != self._table[number]:
            step = self._slot.version.step if self._slot.version else -1
            raise SlotDamaged(f"{self._slot.path} step {step}: bytes {start} to {end} do not match their checksum")
        self._sound.add(number)

    @staticmethod
    def _start(number: int) -> int:
        return HEADER + number * sums.CHUNK


def _chunks(start: int, end: int) -> range:
    """Numbers of the checksummed chunks that these bytes of the file lie in."""
    return range((start - HEADER) // sums.CHUNK, (end - 1 - HEADER) // sums.CHUNK + 1)
