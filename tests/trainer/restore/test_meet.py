"""When durable tiers are asked, and what it means that they cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.slot import Description, Version
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Member, Place, Roster
from keepstep.trainer.exceptions import CannotResume
from keepstep.trainer.recovery_torch import Found, Restorer

ROSTER = Roster(
    job=JobId("j"), epoch=Epoch(9), origin="controller", mode="restart", world_size=1,
    members=(Member(rank=Rank(0), node=NodeId("n"), slot=SlotId("s"), local_rank=0),),
    places=(Place(node=NodeId("n"), host="h", keeper_port=0, peer_port=0),), store_host="h", store_port=1,
)  # fmt: skip


class Memory:
    """Snapshots of one world size; remembers what was loaded."""

    config = CheckpointConfig(job=JobId("j"), policy=CheckpointPolicy(dir="/nowhere"))
    notes: Any = None

    def __init__(self, *steps: int, world_size: int = 1) -> None:
        self._steps, self._world = steps, world_size
        self.loaded: list[int] = []

    def full(self) -> tuple[Version, ...]:
        return tuple(Version(step, 1) for step in self._steps)

    def private(self) -> frozenset[Version]:
        return frozenset(self.full())

    def describe(self, version: Version) -> Description:
        return Description(world_size=self._world)

    def load(self, state: Any, version: Version, *, shards: bool) -> None:
        self.loaded.append(version.step)

    def forget_after(self, version: Version) -> None:
        pass


class Tiers:
    """Durable tiers with some steps, or none that can be read; steps in ``bad`` cannot be brought."""

    where = "/nowhere"

    def __init__(self, *steps: int, away: bool = False, bad: tuple[int, ...] = ()) -> None:
        self._steps, self._away, self._bad = steps, away, bad
        self.looked = 0

    def look(self, rank: int, world_size: int) -> tuple[Version, ...]:
        self.looked += 1
        if self._away:
            raise CannotResume("the checkpoints in /nowhere cannot be used: it does not answer")
        return tuple(Version(step, 1) for step in self._steps)

    def bring(self, version: Version, world_size: int, *, mine: bool, key: str) -> str | None:
        return "a shard is damaged" if version.step in self._bad else None


class Clean:
    clean, replicated = True, False


def meet(memory: Memory, tiers: Tiers, *, all_new: bool, live: Version | None = None) -> Found:
    state: Any = Clean()
    snapshots: Any = memory
    restorer = Restorer(state, snapshots, "", Path(), lambda: False)
    durable: Any = tiers
    restorer._durable = durable
    restorer._exchange = lambda mine, world, rank: [mine]  # type: ignore[method-assign]
    return restorer.meet(ROSTER, 0, live, newcomer=all_new, all_new=all_new)


def test_a_running_job_asks_no_tier_while_memory_has_a_step() -> None:
    memory, tiers = Memory(7, 6), Tiers(9)
    found = meet(memory, tiers, all_new=False, live=Version(7, 1))
    assert (found.version, found.durable, tiers.looked) == (Version(7, 1), False, 0)


def test_a_running_job_asks_them_when_memory_has_none() -> None:
    found = meet(Memory(), Tiers(5), all_new=False)
    assert (found.version, found.source, found.durable) == (Version(5, 1), "saved", True)


def test_after_a_restart_the_newest_of_all_wins() -> None:
    assert meet(Memory(7), Tiers(5), all_new=True).source == "local"
    assert meet(Memory(5), Tiers(7), all_new=True).source == "saved"


def test_what_another_number_of_ranks_left_in_memory_is_not_used() -> None:
    found = meet(Memory(7, world_size=3), Tiers(5), all_new=True)
    assert (found.version, found.source) == (Version(5, 1), "saved")


def test_a_tier_that_is_away_does_not_hinder_a_restart_from_memory() -> None:
    """Where memory has nothing either, beginning anew has to be asked for."""
    assert meet(Memory(7), Tiers(away=True), all_new=True).version == Version(7, 1)
    with pytest.raises(CannotResume, match="does not answer"):
        meet(Memory(), Tiers(away=True), all_new=True)


def test_damage_leads_to_the_generation_before_and_never_to_the_beginning() -> None:
    memory = Memory()
    assert meet(memory, Tiers(9, 8, bad=(9,)), all_new=True).version == Version(8, 1)
    assert memory.loaded == [8]
    with pytest.raises(CannotResume, match=r"no checkpoint in /nowhere could be read: .*damaged.*--no-resume"):
        meet(Memory(), Tiers(9, 8, bad=(9, 8)), all_new=True)


def test_nothing_anywhere_is_a_first_start() -> None:
    assert meet(Memory(), Tiers(), all_new=True).version is None
