"""Heartbeat memory as the agent sees it: creates a slot's page before the process starts, reads it without locks."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from keepstep.model.beat import LAYOUT, SIZE, WORDS, Phase, Word
from keepstep.model.env import BEAT_DIR
from keepstep.model.ids import SlotId

_WORDS = struct.Struct(f"={WORDS}q")


def create_beat(node_dir: Path, slot: SlotId) -> None:
    """An empty page; the trainer maps it when it attaches."""
    folder = node_dir / BEAT_DIR
    folder.mkdir(exist_ok=True)
    fd = os.open(folder / slot, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(fd, SIZE)
    finally:
        os.close(fd)


class Beat:
    """One slot's page, mapped for reading."""

    def __init__(self, node_dir: Path, slot: SlotId) -> None:
        with open(node_dir / BEAT_DIR / slot, "rb") as file:
            self._map = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)

    def read(self) -> tuple[int, ...] | None:
        """All words, or ``None`` before the trainer has attached."""
        words = _WORDS.unpack(self._map)
        return words if words[Word.LAYOUT] == LAYOUT else None

    def close(self) -> None:
        self._map.close()


def committed(node_dir: Path, slot: SlotId) -> int:
    """Steps that the process of this slot has committed; 0 when it never said.

    Raises:
        OSError: there is no such page.
    """
    words = _read_once(node_dir, slot)
    return words[Word.STEP] if words else 0


def read_beat(node_dir: Path, slot: SlotId) -> tuple[int, ...] | None:
    """One look at a page that is not kept mapped; ``None`` where there is none, or before the trainer has attached."""
    try:
        return _read_once(node_dir, slot)
    except (OSError, ValueError):
        return None


def _read_once(node_dir: Path, slot: SlotId) -> tuple[int, ...] | None:
    page = Beat(node_dir, slot)
    try:
        return page.read()
    finally:
        page.close()


def phase_of(words: tuple[int, ...]) -> Phase:
    try:
        return Phase(words[Word.PHASE])
    except ValueError:
        return Phase.OTHER
