"""Checked: copies tensors out of a sealed slot, comparing every byte with its checksum on the way.

A chunk is compared and copied by the same thread, one after the other, while it is still in the processor's cache:
reading it twice costs little more than once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keepstep.checkpoint import sums
from keepstep.checkpoint.exceptions import SlotDamaged
from keepstep.checkpoint.slot import HEADER, Slot, TensorEntry
from keepstep.trainer.copier_torch import SMALL, Chunk, Copier, Run, move, move_small, plan, runs


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
        per_chunk: dict[int, list[Run]] = {number: [] for number in range(len(self._table))}
        for to, start, size in found:
            offset = start - self._base
            for number in _chunks(offset, offset + size):
                low, high = max(offset, self._start(number)), min(offset + size, self._start(number + 1))
                per_chunk[number].append(Run(to + low - offset, self._base + low, high - low))
        chunks = [self._chunk(number, parts) for number, parts in per_chunk.items()]
        self._copier.run(chunks, self._end)

    def _compare(self, numbers: Sequence[int]) -> None:
        if self._table is not None:
            todo = [number for number in numbers if number not in self._sound]
            self._copier.run([self._chunk(number, []) for number in todo], len(todo) * sums.CHUNK)

    def _chunk(self, number: int, parts: list[Run]) -> Chunk:
        def copy() -> None:
            if number not in self._sound:
                self._look(number)
            for to, start, size in parts:
                (move if size > SMALL else move_small)(to, start, size)

        return copy

    def _look(self, number: int) -> None:
        assert self._table is not None
        start, end = self._start(number), min(self._start(number + 1), self._end)
        with memoryview(self._slot.memory) as whole, whole[start:end] as part:
            if sums.digest(part) != self._table[number]:
                step = self._slot.version.step if self._slot.version else -1
                raise SlotDamaged(f"{self._slot.path} step {step}: bytes {start} to {end} do not match their checksum")
        self._sound.add(number)

    @staticmethod
    def _start(number: int) -> int:
        return HEADER + number * sums.CHUNK


def _chunks(start: int, end: int) -> range:
    """Numbers of the checksummed chunks that these bytes of the file lie in."""
    return range((start - HEADER) // sums.CHUNK, (end - 1 - HEADER) // sums.CHUNK + 1)
