"""Positions: reads where each group of a rank stands, from the flight memory that its trainer stores into.

The trainer is not asked and not stopped. What changes while we read is recognised: the table of groups by its
version, a stream by its count before and after, an entry by the number it bears.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from msgspec import Struct

from keepstep.model.env import FLIGHT_DIR
from keepstep.model.flight import (
    ENTRY_WORDS,
    HEAD_WORDS,
    LAYOUT,
    RING,
    ROW_WORDS,
    ROWS,
    SIZE,
    STRIDE,
    TEXT_AT,
    WORD,
    Entry,
    Head,
    Row,
    read_code,
)
from keepstep.model.ids import Rank, SlotId
from keepstep.model.position import Collective, GroupPosition, RankPosition
from keepstep.model.topology import Member

TRIES = 20
"""Looks at a table that changes at every one of them, before we give up."""
IDLE_KEPT = 6
"""Operations told of a group in which nothing is open: most groups of a large job, so that reports stay small."""

_WORDS = struct.Struct(f"={TEXT_AT // WORD}q")
_ONE = struct.Struct("=q")


class _Stream(Struct, frozen=True):
    launched: int
    finished: int
    known: tuple[Collective, ...]
    """The newest operations, oldest first."""
    open: tuple[int, ...]
    """Numbers of those among them that are not over."""


def take_positions(node_dir: Path, seats: Iterable[Member]) -> tuple[RankPosition, ...]:
    """Where the groups of these ranks stand; nothing of those that do not tell."""
    found = [read_positions(node_dir, seat.slot, seat.rank) for seat in seats]
    return tuple(position for position in found if position is not None)


def forget_positions(node_dir: Path, kept: Collection[SlotId]) -> None:
    """Remove what processes that are gone have left, except for the ``kept`` slots."""
    with contextlib.suppress(OSError):
        for file in (node_dir / FLIGHT_DIR).iterdir():
            if file.name not in kept:
                file.unlink(missing_ok=True)


def read_positions(node_dir: Path, slot: SlotId, rank: Rank, *, now_ns: int | None = None) -> RankPosition | None:
    """Where the groups of this slot's process stand; ``None`` where it does not tell (no SDK, or not yet).

    Args:
        now_ns: CLOCK_MONOTONIC, for ages.
    """
    try:
        fd = os.open(node_dir / FLIGHT_DIR / slot, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(TRIES):
            found = _read(fd, time.monotonic_ns() if now_ns is None else now_ns)
            if found is not None:
                return RankPosition(rank=rank, slot=slot, groups=found) if found else None
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def _read(fd: int, now_ns: int) -> tuple[GroupPosition, ...] | None:
    """All groups; empty where there are none, ``None`` where the table changed meanwhile."""
    data = os.pread(fd, SIZE, 0)
    if len(data) < SIZE:
        return ()
    words = _WORDS.unpack_from(data)
    if words[Head.LAYOUT] != LAYOUT:
        return ()
    version = words[Head.VERSION]
    collectives: dict[str, tuple[str, _Stream]] = {}
    messages: dict[str, _Stream] = {}
    for row in range(min(words[Head.ROWS], ROWS)):
        at = HEAD_WORDS + row * STRIDE
        if not words[at + Row.LENGTH]:
            continue
        begin = TEXT_AT + words[at + Row.TEXT]
        name, _, members = data[begin : begin + words[at + Row.LENGTH]].decode(errors="replace").partition("\0")
        stream = _stream(words, at, _word(fd, at + Row.LAUNCHED), now_ns)
        if words[at + Row.MESSAGES]:
            messages[name] = stream
        else:
            collectives[name] = members, stream
    if version % 2 or _word(fd, Head.VERSION) != version:
        return None
    return tuple(_group(name, members, stream, messages.get(name)) for name, (members, stream) in collectives.items())


def _group(name: str, members: str, stream: _Stream, messages: _Stream | None) -> GroupPosition:
    known = stream.known
    kept = known if stream.open else known[-IDLE_KEPT:]
    return GroupPosition(
        group=name,
        members=members,
        launched=stream.launched,
        finished=stream.finished,
        last=known[-1] if known and known[-1].sequence == stream.launched else None,
        recent=kept,
        pending=stream.open,
        messages=tuple(one for one in messages.known if one.sequence in messages.open) if messages else (),
    )


def _stream(words: tuple[int, ...], at: int, launched_after: int, now_ns: int) -> _Stream:
    """One row. The entry that is being written, and those that may have been written since, are left out."""
    launched, finished = words[at + Row.LAUNCHED], words[at + Row.FINISHED]
    known: list[Collective] = []
    pending: list[int] = []
    for number in range(max(1, launched_after + 2 - RING, launched + 1 - RING), launched + 1):
        entry = at + ROW_WORDS + number % RING * ENTRY_WORDS
        if words[entry + Entry.SEQUENCE] != number:
            continue
        op, dtype, peer = read_code(words[entry + Entry.CODE])
        known.append(
            Collective(
                sequence=number,
                op=op,
                elements=words[entry + Entry.ELEMENTS],
                dtype=dtype,
                peer=None if peer is None else Rank(peer),
                age_s=round(max(0, now_ns - words[entry + Entry.LAUNCHED_NS]) / 1e9, 3),
            )
        )
        if not words[entry + Entry.OVER]:
            pending.append(number)
    return _Stream(launched, finished, tuple(known), tuple(pending))


def _word(fd: int, index: int) -> int:
    return int(_ONE.unpack(os.pread(fd, WORD, index * WORD))[0])
