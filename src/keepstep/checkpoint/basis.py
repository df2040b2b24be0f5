"""Basis: the payload that a rank's next difference rests on, kept in the archiver's memory."""

from __future__ import annotations

from keepstep.checkpoint import delta, sums
from keepstep.checkpoint.exceptions import SlotDamaged
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.slot import TensorEntry, Version
from keepstep.checkpoint.source import Source


class Basis:
    """One payload in memory. Its bytes are replaced in place, so that there is never a second one.

    Attributes:
        version: what it holds; meaningless while ``usable`` is false.
        chain: differences in a row up to and with this version.
        choice: whether differences have been paying.
    """

    def __init__(self) -> None:
        self.payload = bytearray()
        self.version = Version(-1, -1)
        self.chain = 0
        self.usable = False
        self._tensors: tuple[TensorEntry, ...] = ()
        self.choice = delta.Choice()
        if why := delta.missing():
            self.choice.verdict = delta.Verdict(False, why)

    def serves(self, source: Source, full_every: int) -> bool:
        """Whether a difference to this may be written: same layout, later step, and the chain is not too long."""
        return (
            self.usable
            and self.choice.verdict.worth
            and self.chain + 1 < full_every
            and self.version < source.version
            and self._tensors == source.tensors
        )

    def take(self, source: Source, part: Part, *, took_s: float = 0.0, at_s: float = 0.0) -> None:
        """Hold what ``part`` was made of.

        Args:
            took_s: seconds that writing it took; 0 where it was there already.
            at_s: time of a clock that does not jump.

        Raises:
            SlotDamaged: the source no longer matches the part; this then holds nothing.
            SlotInvalid: the slot was overwritten.
        """
        follows = self.usable and part.base == self.version
        self.usable = False
        if part.kind == "delta" and not follows:  # found there after a restart: how long its chain is, is not known
            self.drop()
            return
        if len(self.payload) != source.size:
            self.payload = bytearray(source.size)
        at = 0
        with memoryview(self.payload) as view:
            for piece in source.pieces():
                view[at : at + len(piece)] = piece
                at += len(piece)
            if sums.damaged(view, list(part.payload_sums)):
                raise SlotDamaged(f"rank {part.rank} step {part.version.step}: the state changed after it was written")
        self.version, self._tensors = part.version, part.tensors
        self.chain = 0 if part.kind == "full" else self.chain + 1
        full = part.kind == "full"
        self.choice.wrote(full=full, payload=part.payload, size=part.size, took_s=took_s, at_s=at_s)
        self.usable = True

    def drop(self) -> None:
        """Free the memory; the next generation is full."""
        self.payload, self.usable = bytearray(), False
