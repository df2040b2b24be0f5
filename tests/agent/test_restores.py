"""What the agent tells of ranks that bring their state: while bytes arrive, and nothing else."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
from agent_rig import bare_node

from keepstep.agent.beats import create_beat
from keepstep.agent.restores import Restores
from keepstep.agent.slots import Slot
from keepstep.model.beat import LAYOUT, SIZE, Phase, Word
from keepstep.model.facts import RestoreMoved
from keepstep.model.ids import Epoch, Rank, SlotId


def rank(node: Any, number: int) -> memoryview:
    """A worker in the middle of its recovery into epoch 7."""
    slot = Slot(id=SlotId(f"s{number}"), role="worker", out="", err="", pid=1, rank=Rank(number), epoch=Epoch(7))
    node.table.add(slot)
    create_beat(node.dir, slot.id)
    with open(node.dir / "beat" / slot.id, "r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
    words[Word.PHASE], words[Word.LAYOUT], words[Word.EPOCH] = Phase.RECOVERING, LAYOUT, 7
    return words


def test_bytes_that_arrive_are_told_once_for_all_ranks(
    node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks restore: each look tells their sum and who is at it; a look without news, or at a rank that trains or
    stands in another epoch, tells nothing."""
    node = bare_node(node_dir, tmp_path)
    first, second = rank(node, 0), rank(node, 1)
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        node, "report", lambda kind, *, epoch, ranks, bytes: told.append((kind, int(epoch), ranks, bytes))
    )
    look = Restores(node).look
    look()
    assert told == []  # communicators are still being built
    first[Word.ARRIVED], first[Word.RESTORING] = 100, 1
    look()
    look()
    assert told == [(RestoreMoved, 7, (0,), 100)]
    second[Word.ARRIVED], first[Word.RESTORING] = 50, 0
    look()
    assert told[1:] == [(RestoreMoved, 7, (), 150)]
    first[Word.ARRIVED], first[Word.PHASE] = 900, Phase.STEP
    second[Word.ARRIVED], second[Word.EPOCH] = 900, 6
    look()
    assert len(told) == 2
    node.outbox.close()
