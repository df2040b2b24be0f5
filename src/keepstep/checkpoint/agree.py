"""Agree: the newest step that everybody can stand on, and where each rank gets its state from. Pure.

Each rank says in a row of integers what it holds; every rank sees the same rows and comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from keepstep.checkpoint.slot import Version

Source = Literal["live", "local", "peer", "replica"]
_PAIRS = 7
ROW = 2 * _PAIRS + 1
"""Integers per rank."""
EXACT_WITHIN = 1
"""Steps that may be done again so that every rank goes on with its own random state."""


class Holdings(Struct, frozen=True, kw_only=True):
    """What one rank can provide.

    Attributes:
        live: the version its own memory holds exactly, with its private part at hand; ``None`` when half-done.
        full: complete versions in this node's memory.
        private: private parts (buffers, random state, data position) in this node's memory, also of full versions.
        peer: complete versions of this rank at another node's keeper.
        replicated: parameters and optimizer state are the same on all ranks.
    """

    live: Version | None = None
    full: tuple[Version, ...] = ()
    private: tuple[Version, ...] = ()
    peer: tuple[Version, ...] = ()
    replicated: bool = False

    def to_row(self) -> list[int]:
        row: list[int] = []
        for group, room in (
            ((self.live,) if self.live else (), 1),
            (self.full, 2),
            (tuple(sorted(self.private, reverse=True)), 2),
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

        return cls(
            live=pairs[0], full=some(1, 3), private=some(3, 5), peer=some(5, 7), replicated=bool(row[2 * _PAIRS])
        )

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

    With replicated state any rank's copy serves everybody; with sharded state each rank needs its own. A replicated
    version for which some rank's private part is lost is only taken when it saves more than ``EXACT_WITHIN`` steps.
    """
    everything: frozenset[Version] = frozenset().union(*(row.all() for row in rows))
    plans = [plan for version in sorted(everything, reverse=True) if (plan := _plan(rows, version)) is not None]
    if not plans:
        return None
    exact = next((plan for plan in plans if _exact(rows, plan)), None)
    if exact is not None and exact.version.step >= plans[0].version.step - EXACT_WITHIN:
        return exact
    return plans[0]


def _plan(rows: Sequence[Holdings], version: Version) -> Plan | None:
    sources = [_source(row, version) for row in rows]
    holders = [rank for rank, source in enumerate(sources) if source is not None]
    root = -1
    if len(holders) < len(rows):
        if not holders or not all(row.replicated for row in rows):
            return None
        root = next((rank for rank in holders if sources[rank] == "live"), holders[0])
    newest = max(held.step for row in rows for held in row.all())
    return Plan(version=version, sources=tuple(source or "replica" for source in sources), root=root, newest=newest)


def _exact(rows: Sequence[Holdings], plan: Plan) -> bool:
    pairs = zip(rows, plan.sources, strict=True)
    return all(source != "replica" or plan.version in row.private for row, source in pairs)


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
