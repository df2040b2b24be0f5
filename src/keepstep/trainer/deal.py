"""Deal: which part of which shard each rank reads, in this pass and after a change of the number of ranks.

Pure. A *piece* is part of one shard in one pass; the pieces of all ranks and the passes that nobody has been dealt yet
are together exactly what is still to be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keepstep.trainer.places import Permutation
from keepstep.trainer.reader import Mark


class Piece(NamedTuple):
    """Samples ``start`` to ``stop`` of the shard at ``place``."""

    place: int
    """Number of the pass times the number of shards, plus the shard's place within the pass."""
    start: int
    stop: int | None
    """``None``: to the shard's end, wherever that is."""
    mark: Mark | None = None
    """A place at or before ``start`` that the shard's own reader can go to."""


class Dealer:
    """Deals shards to ranks, pass by pass.

    Args:
        lengths: samples per shard. Where they are known, shards are cut so that all ranks get as many samples, one
            more or less; else each shard goes to one rank as a whole.
    """

    def __init__(self, shards: int, *, seed: int, shuffle: bool, lengths: Sequence[int] | None) -> None:
        self.shards, self._seed, self._shuffle = shards, seed, shuffle
        self._lengths = tuple(lengths) if lengths is not None else None
        self.samples = sum(self._lengths) if self._lengths is not None else None
        """Of one pass, where known."""
        self._order = -1, Permutation(shards, "")

    def shard_at(self, place: int) -> int:
        turn, within = divmod(place, self.shards)
        if not self._shuffle:
            return within
        if self._order[0] != turn:
            self._order = turn, Permutation(self.shards, f"{self._seed}/{turn}")
        return self._order[1][within]

    def length_at(self, place: int) -> int | None:
        return None if self._lengths is None else self._lengths[self.shard_at(place)]

    def deal(self, turn: int, rank: int, world_size: int) -> list[Piece]:
        """The pieces of pass ``turn`` for ``rank``. The share that is one larger goes round from pass to pass."""
        seat = (rank + turn) % world_size
        first = turn * self.shards
        if self.samples is None:
            return [Piece(first + within, 0, None) for within in range(seat, self.shards, world_size)]
        whole = [Piece(place, 0, self.length_at(place)) for place in range(first, first + self.shards)]
        return cut(whole, self.samples * seat // world_size, self.samples * (seat + 1) // world_size)

    def deal_again(self, left: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
        """What ``rank`` of ``world_size`` gets of the pieces that the ranks before have left."""
        joined = join(left)
        if self.samples is None:
            return joined[rank::world_size]
        total = count(joined)
        return cut(joined, total * rank // world_size, total * (rank + 1) // world_size)

    def least_and_most(self, left: int, turns: int, world_size: int) -> tuple[int, int]:
        """Bounds of what any rank gets of ``left`` samples dealt again and ``turns`` whole passes."""
        assert self.samples is not None
        whole = self.samples * turns
        return left // world_size + whole // world_size, -(-left // world_size) - (-whole // world_size)


def cut(pieces: Sequence[Piece], first: int, last: int) -> list[Piece]:
    """What lies between the ``first`` and the ``last`` sample of ``pieces``, whose lengths are known."""
    found, at = [], 0
    for piece in pieces:
        assert piece.stop is not None
        size = piece.stop - piece.start
        low, high = max(first - at, 0), min(last - at, size)
        if low < high:
            found.append(piece._replace(start=piece.start + low, stop=piece.start + high))
        at += size
    return found


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """In order, neighbours of one shard as one piece. Raises ``ValueError`` where two overlap."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.place, piece.start)):
        before = found[-1] if found else None
        if before is not None and before.place == piece.place:
            if before.stop is None or before.stop > piece.start:
                raise ValueError(f"samples {piece.start} and on of the shard at place {piece.place} are dealt twice")
            if before.stop == piece.start:
                found[-1] = before._replace(stop=piece.stop)
                continue
        found.append(piece)
    return found


def count(pieces: Iterable[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces if piece.stop is not None)
