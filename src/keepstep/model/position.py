"""Positions: which collective each group of a rank has come to, as the rank itself saw it.

A synchronous program launches the same operations in the same order on all members of a group. Comparing what each
member launched last therefore tells who has not come, and who has launched something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from keepstep.model.ids import Rank, SlotId
from keepstep.model.topology import fold_ranks


class Collective(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation.

    Attributes:
        sequence: its number within the group, from 1.
        op: ``all_reduce``, ``all_gather``, ``barrier``, ``send``... as torch names it.
        elements: of the input of this rank; 0 where the operation has none.
        dtype: ``float32``...; empty where the operation has no tensor.
        peer: the other rank of a point-to-point operation.
        age_s: since it was launched.
    """

    sequence: int
    op: str
    elements: int = 0
    dtype: str = ""
    peer: Rank | None = None
    age_s: float = 0.0

    @property
    def signature(self) -> tuple[str, int, str]:
        """Equal on all members for operations that take the same input everywhere."""
        return self.op, self.elements, self.dtype


class GroupPosition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group.

    Attributes:
        group: torch's name of it.
        members: its members by their rank in the world, as ``fold_members`` writes them: a large group has many, and
            each of them tells its position.
        launched, finished: operations of all members together (collectives) since the group was last connected.
        last: the newest one that was launched.
        recent: the newest ones, oldest first.
        pending: sequence numbers among ``recent`` that are not over.
        messages: point-to-point operations that are not over; they are counted by themselves, since two members do
            them without the others.
    """

    group: str
    members: str
    launched: int
    finished: int
    last: Collective | None = None
    recent: tuple[Collective, ...] = ()
    pending: tuple[int, ...] = ()
    messages: tuple[Collective, ...] = ()

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Its members; read anew at each use."""
        return unfold_members(self.members)

    @property
    def inside(self) -> Collective | None:
        """The oldest collective that was launched and is not over, as far as it is known."""
        if self.launched <= self.finished:
            return None
        return next((one for one in self.recent if one.sequence in self.pending), self.last)


def fold_members(ranks: Sequence[int]) -> str:
    """``0-7``, ``0-56:8`` for every eighth, ``0-3,12`` for what is not regular."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) == 1 and (step := steps.pop()) > 1:
        return f"{ranks[0]}-{ranks[-1]}:{step}"
    return fold_ranks(ranks)


def unfold_members(folded: str) -> tuple[Rank, ...]:
    """The opposite; what is no number is left out."""
    return tuple(Rank(rank) for part in folded.split(",") for rank in _span(part))


def _span(part: str) -> range:
    ends, _, step = part.partition(":")
    first, _, last = ends.partition("-")
    if not all(word.isdecimal() for word in (first, last or first, step or "1")) or int(step or 1) < 1:
        return range(0)
    return range(int(first), int(last or first) + 1, int(step or 1))


class RankPosition(Struct, frozen=True, kw_only=True):
    """All groups of one rank. ``source``: the SDK's own hook, or torch's flight recorder."""

    rank: Rank
    slot: SlotId
    groups: tuple[GroupPosition, ...]
    source: Literal["sdk", "flight-recorder"] = "sdk"


class Link(Struct, frozen=True, kw_only=True):
    """A connection of a rank's process whose other end does not answer: the kernel sends the same bytes again.

    Attributes:
        local, peer: ``address:port``.
        unacked: bytes sent and not acknowledged.
        timeouts: in a row, without an answer. A peer that is merely busy or stopped still acknowledges.
    """

    rank: Rank
    local: str
    peer: str
    unacked: int
    timeouts: int
