"""Agree: the newest step that everybody can stand on, and where each rank gets its state from. Pure.

Each rank says in a row of integers what it holds; every rank sees the same rows and comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from keepstep.checkpoint.slot import Version

Source = Literal["live", "local", "peer", "saved", "replica"]
_ROOM = {"live": 1, "full": 3, "private": 4, "peer": 3, "saved": 4}
"""How many versions of each kind a rank shows, the newest first."""
MAX_SAVED = _ROOM["saved"]
ROW = 2 * sum(_ROOM.values()) + 1
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
        saved: generations of durable tiers from which this rank can be brought back.
        replicated: parameters and optimizer state are the same on all ranks.
    """

    live: Version | None = None
    full: tuple[Version, ...] = ()
    private: tuple[Version, ...] = ()
    peer: tuple[Version, ...] = ()
    saved: tuple[Version, ...] = ()
    replicated: bool = False

    def to_row(self) -> list[int]:
        row: list[int] = []
        kinds = {
            "live": (self.live,) if self.live else (),
            "full": self.full,
            "private": self.private,
            "peer": self.peer,
            "saved": self.saved,
        }
        for kind, room in _ROOM.items():
            shown = sorted(kinds[kind], reverse=True)[:room]
            for version in shown:
                row += [version.step, version.epoch]
            row += [-1, -1] * (room - len(shown))
        row.append(1 if self.replicated else 0)
        return row

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Holdings:
        kinds, at = {}, 0
        for kind, room in _ROOM.items():
            numbers = row[at : at + 2 * room]
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            kinds[kind] = tuple(Version(step, epoch) for step, epoch in pairs if step >= 0)
            at += 2 * room
        live = kinds.pop("live")
        return cls(live=live[0] if live else None, replicated=bool(row[at]), **kinds)

    def all(self) -> frozenset[Version]:
        """Versions from which this rank alone can be brought back whole."""
        return frozenset(([self.live] if self.live else []) + list(self.full) + list(self.peer) + list(self.saved))


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
    if version in row.saved:
        return "saved"
    return None
