"""What the pulse says of standbys; time is a number that the test gives."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rig import bare_node

from keepstep.agent import proc
from keepstep.agent.beats import create_beat
from keepstep.agent.limits import AGENT_GAP_S, PARKED_SILENT_S
from keepstep.agent.pulse import Pulse
from keepstep.agent.slots import Slot
from keepstep.model.beat import LAYOUT, SIZE, Phase, Word
from keepstep.model.facts import RankStalled
from keepstep.model.ids import Epoch, Rank, SlotId


class Standby:
    """A parked standby (this process stands for it) under a pulse."""

    def __init__(self, node_dir: Path, run_dir: Path) -> None:
        self.node = bare_node(node_dir, run_dir)
        stat = proc.stat(os.getpid())
        assert stat is not None
        slot = Slot(id=SlotId("s0"), role="standby", out="", err="", pid=os.getpid(), start=stat.start, parked=True)
        self.node.table.add(slot)
        create_beat(node_dir, slot.id)
        with open(node_dir / "beat" / "s0", "r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("q")
        self.words[Word.PHASE], self.words[Word.LAYOUT], self.words[Word.BEAT_NS] = Phase.PARKED, LAYOUT, 1
        self.pulse = Pulse(self.node)
        self.ended: list[str] = []
        self.pulse.on_dead_standby = lambda slot, why: self.ended.append(why)
        self.now = 1000.0

    def look(self, seconds: float, *, beats: bool) -> None:
        """Look twice a second for so long."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.words[Word.BEAT_NS] += beats
            self.pulse.look(self.now)


@pytest.fixture
def standby(node_dir: Path, tmp_path: Path) -> Iterator[Standby]:
    made = Standby(node_dir, tmp_path)
    yield made
    made.node.outbox.close()


def test_parked_standby_without_a_sign_of_life_is_ended(standby: Standby) -> None:
    """Signs of life keep it for any time; once they stop, it is given up after the limit and not before."""
    standby.look(3 * PARKED_SILENT_S, beats=True)
    standby.look(PARKED_SILENT_S - 1, beats=False)
    assert standby.ended == []
    standby.look(2, beats=False)
    assert standby.ended
    assert "no sign of life" in standby.ended[0]


def test_agent_that_was_stopped_itself_blames_no_standby(standby: Standby) -> None:
    """After a pause of the whole node the standby gets the full limit again."""
    standby.look(2, beats=True)
    standby.now += 10 * PARKED_SILENT_S + AGENT_GAP_S
    standby.look(PARKED_SILENT_S - 1, beats=False)
    assert standby.ended == []


def test_standby_that_still_starts_may_be_silent(standby: Standby) -> None:
    """Imports and set-up take their time; only the parked one shows signs of life by itself."""
    slot = standby.node.table.get(SlotId("s0"))
    assert slot is not None
    slot.parked = False
    standby.look(3 * PARKED_SILENT_S, beats=False)
    assert standby.ended == []


@pytest.mark.parametrize(("silent_s", "waited_s", "stalls"), [(15, 0, True), (15, 12, False), (21, 18, True)])
def test_time_in_the_queue_for_a_processor_is_not_idle(
    node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_s: int, waited_s: int, stalls: bool
) -> None:
    """15 s without a beat are a stall for a limit of 10 s, but not when the machine let the rank run for 3 s only.

    Past twice the limit they are in any case: who loops on a busy machine stands in the queue most of the time.
    """
    standby = Standby(node_dir, tmp_path)
    slot = standby.node.table.get(SlotId("s0"))
    assert slot is not None
    slot.role, slot.rank, slot.epoch = "worker", Rank(0), Epoch(1)
    waited = 7_000_000_000
    monkeypatch.setattr(proc, "waited_for_cpu_ns", lambda pid: waited)
    monkeypatch.setattr("keepstep.agent.pulse.stall_limit_s", lambda *_: 10.0)
    told: list[object] = []
    monkeypatch.setattr(standby.node, "report", lambda kind, **_: told.append(kind))
    standby.words[Word.PHASE], standby.words[Word.EPOCH] = Phase.STEP, 1
    standby.words[Word.BEAT_NS] = time.monotonic_ns()
    standby.pulse.look(1.0)
    waited += waited_s * 1_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: standby.words[Word.BEAT_NS] + silent_s * 1_000_000_000)
    standby.pulse.look(2.0)
    standby.node.outbox.close()
    assert told == ([RankStalled] if stalls else [])
