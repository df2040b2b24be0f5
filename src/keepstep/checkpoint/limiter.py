"""Limiter: of notes that are alike the first passes at once, the newest surely, and never a flood of them. Pure."""

from __future__ import annotations

import msgspec

from keepstep.checkpoint.notes import Note

ALIKE_S = 5.0
"""Of notes that are alike one passes in this time."""
MAX_KINDS = 4096
"""Kinds of notes that are told apart; a note of yet another kind is dropped until older ones are forgotten."""

Kind = tuple[str, str, int | None]


class Limiter:
    """Which notes pass when. Pure: the caller brings the time."""

    def __init__(self, alike_s: float = ALIKE_S) -> None:
        self._alike_s = alike_s
        self._until: dict[Kind, float] = {}
        self._kept: dict[Kind, tuple[Note, int]] = {}

    def offer(self, note: Note, now: float) -> Note | None:
        """The note, if it may pass now; else it is kept in place of an older one of its kind."""
        kind: Kind = (note.what, note.tier, note.rank)
        if kind not in self._kept and self._until.get(kind, now) <= now:
            if kind not in self._until and len(self._until) >= MAX_KINDS and not self._forget(now):
                return None
            self._until[kind] = now + self._alike_s
            return note
        _, count = self._kept.get(kind, (note, 0))
        self._kept[kind] = (note, count + 1)
        return None

    def due(self, now: float) -> list[Note]:
        """Kept notes whose time has come."""
        ready = [kind for kind in self._kept if self._until[kind] <= now]
        for kind in ready:
            self._until[kind] = now + self._alike_s
        return [self._take(kind) for kind in ready]

    def all(self) -> list[Note]:
        """All kept notes, whatever the time: nobody will ask again."""
        return [self._take(kind) for kind in list(self._kept)]

    @property
    def next_due(self) -> float | None:
        return min((self._until[kind] for kind in self._kept), default=None)

    def _take(self, kind: Kind) -> Note:
        note, count = self._kept.pop(kind)
        if count == 1:
            return note
        more = f"{count - 1} more like this before it"
        return msgspec.structs.replace(note, why=f"{note.why}; {more}" if note.why else more)

    def _forget(self, now: float) -> bool:
        """Drop kinds that have been quiet; true when that made room."""
        for kind in [k for k, until in self._until.items() if until <= now and k not in self._kept]:
            del self._until[kind]
        return len(self._until) < MAX_KINDS
