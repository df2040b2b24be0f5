"""Agree: the newest step that everybody can stand on, and where each rank gets its state from. Pure.

Each rank says in a row of integers what it holds; every rank sees the same rows and comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from keepstep.checkpoint.slot import Version

Source = Literal["live", "local", "peer", "replica"]
_PAIRS = 5
ROW = 2 * _PAIRS + 1
"""Integers per rank."""


class Holdings(Struct, frozen=True, kw_only=True):
    """What one rank can provide.

    Attributes:
        live: the version its own memory holds exactly, with its private part at hand; ``None`` when half-done.
        full: complete versions in this node's memory.
        peer: complete versions of this rank at another node's keeper.
        replicated: parameters and optimizer state are the same on all ranks.
    """

    live: Version | None = None
    full: tuple[Version, ...] = ()
    peer: tuple[Version, ...] = ()
    replicated: bool = False

    def to_row(self) -> list[int]:
        row: list[int] = []
        for group, room in (
            ((self.live,) if self.live else (), 1),
            (self.full, 2),
            (self.peer, 2),
        ):
            padded: list[Version | None] = [*group, *[None] * room][:room]
            for version in padded:
                row += [-1, -1] if version is None else [version.step, version.epoch]
        row.append(1 if self.replicated else 0)
        return row

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Holdings:
        pairs = [Version(row[2 * i], row[2 * i + 1]) if row[2 * i] >= 0 else None for i in range(_PAIRS)]

        def some(start: int, end: int) -> tuple[Version, ...]:
            return tuple(version for version in pairs[start:end] if version is not None)

        return cls(live=pairs[0], full=some(1, 3), peer=some(3, 5), replicated=bool(row[2 * _PAIRS]))

    def all(self) -> frozenset[Version]:
        """Versions from which this rank alone can be brought back whole."""
        return frozenset(([self.live] if self.live else []) + list(self.full) + list(self.peer))


class Plan(Struct, frozen=True, kw_only=True):
    """Where to go on, and how each rank gets there.

    Attributes:
        sources: one per rank.
        root: the rank that hands its tensors to those with source ``replica``; -1 when nobody needs them.
        newest: the newest step anybody had committed.
    """

    version: Version
    sources: tuple[Source, ...]
    root: int
    newest: int


def choose(rows: Sequence[Holdings]) -> Plan | None:
    """The newest version with a holder for every rank, or ``None`` when there is none.

    With replicated state any rank's copy serves everybody; with sharded state each rank needs its own.
    """
    replicated = all(row.replicated for row in rows)
    everything = frozenset().union(*(row.all() for row in rows)) if rows else frozenset()
    newest = max((version.step for version in everything), default=0)
    for version in sorted(everything, reverse=True):
        sources = [_source(row, version) for row in rows]
        holders = [rank for rank, source in enumerate(sources) if source is not None]
        if not holders or (len(holders) < len(rows) and not replicated):
            continue
        root = -1
        if len(holders) < len(rows):
            root = next((rank for rank in holders if sources[rank] == "live"), holders[0])
        return Plan(
            version=version,
            sources=tuple(source or "replica" for source in sources),
            root=root,
            newest=newest,
        )
    return None


def explain(rows: Sequence[Holdings]) -> str:
    """Why there is no common step, in one sentence for the log."""
    parts = []
    for rank, row in enumerate(rows):
        steps = ",".join(str(version.step) for version in sorted(row.all()))
        parts.append(f"rank {rank} holds {steps or 'nothing'}")
    return "no step has a holder for every rank: " + "; ".join(parts[:16]) + ("; ..." if len(parts) > 16 else "")


def _source(row: Holdings, version: Version) -> Source | None:
    if row.live == version:
        return "live"
    if version in row.full:
        return "local"
    if version in row.peer:
        return "peer"
    return None
