"""An agent whose ranks leave without a fault waits for the end of their step, and not for ever."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from pathlib import Path
from typing import Any

from agent_rig import bare_node

from keepstep.agent import boundary, proc
from keepstep.agent.beats import create_beat
from keepstep.agent.slots import Slot
from keepstep.model.beat import LAYOUT, SIZE, Word
from keepstep.model.ids import Epoch, Rank, SlotId


def worker(node: Any, rank: int) -> memoryview:
    stat = proc.stat(os.getpid())
    assert stat is not None
    slot = Slot(
        id=SlotId(f"r{rank}"), role="worker", out="", err="", pid=os.getpid(), start=stat.start, rank=Rank(rank),
        epoch=Epoch(1),
    )  # fmt: skip
    node.table.add(slot)
    create_beat(node.dir, slot.id)
    with open(node.dir / "beat" / slot.id, "r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
    words[Word.LAYOUT], words[Word.STEP] = LAYOUT, 7
    return words


def test_every_rank_of_the_node_has_to_commit(node_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """One commit of one of two ranks is not enough; the second one's ends the wait, and then the copy has its time."""
    monkeypatch.setattr(boundary, "COPY_S", 0.05)
    node = bare_node(node_dir, tmp_path)
    first, second = worker(node, 0), worker(node, 1)

    async def story() -> None:
        waiting = asyncio.ensure_future(boundary.committed(node, limit_s=20.0))
        await asyncio.sleep(0.1)
        first[Word.STEP] += 1
        await asyncio.sleep(0.1)
        assert not waiting.done()
        second[Word.STEP] += 1
        began = time.monotonic()
        await waiting
        assert time.monotonic() - began >= 0.05

    asyncio.run(story())
    node.outbox.close()


def test_a_step_without_end_is_not_waited_for(node_dir: Path, tmp_path: Path) -> None:
    """After the limit the ranks leave as they are; without ranks there is nothing to wait for."""
    node = bare_node(node_dir, tmp_path)
    worker(node, 0)
    began = time.monotonic()
    asyncio.run(boundary.committed(node, limit_s=0.2))
    assert 0.2 <= time.monotonic() - began < 5.0
    node.outbox.close()
