"""Whom a newcomer asks for its state: those who should have it, and all others only where nobody else can help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import PeerUnreachable, SlotInvalid
from keepstep.checkpoint.slot import Version
from keepstep.model.beat import Word
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Member, Place, Roster
from keepstep.trainer import recovery_torch
from keepstep.trainer.beat import Beat
from keepstep.trainer.recovery_torch import Restorer

NODES = tuple(NodeId(f"n{i}") for i in range(50))


class Asked:
    """Stands for all keepers; ``holds`` says which node has what."""

    holds: ClassVar[dict[int, tuple[Version, ...]]] = {}
    ports: ClassVar[list[int]] = []

    def __init__(self, *, port: int, **_: Any) -> None:
        self.port = port

    def have(self, rank: int) -> tuple[Version, ...]:
        Asked.ports.append(self.port)
        if self.port not in Asked.holds:
            raise PeerUnreachable("gone")
        return Asked.holds[self.port]


class Local:
    config = CheckpointConfig(job=JobId("j"))

    def __init__(self, *versions: Version) -> None:
        self.versions = versions

    def full(self) -> tuple[Version, ...]:
        return self.versions


def roster(replica_node: NodeId | None) -> Roster:
    homes = dict(zip(NODES, [*NODES[1:], NODES[0]], strict=True))
    return Roster(
        job=JobId("j"), epoch=Epoch(1 << 16), origin="controller", mode="in_process", world_size=50,
        members=tuple(
            Member(rank=Rank(i), node=n, slot=SlotId("s"), local_rank=0, replica_node=replica_node)
            for i, n in enumerate(NODES)
        ),
        places=tuple(
            Place(node=n, host="h", keeper_port=1000 + i, peer_port=0, buddy=homes[n]) for i, n in enumerate(NODES)
        ),
        store_host="h", store_port=1,
    )  # fmt: skip


def ask(monkeypatch: pytest.MonkeyPatch, local: Local, replica_node: NodeId | None, holds: dict[int, int]) -> set[int]:
    """Steps that rank 0 on n0 finds elsewhere; the ports it asked are in ``Asked.ports``."""
    monkeypatch.setattr(recovery_torch, "PeerClient", Asked)
    Asked.holds, Asked.ports = {port: (Version(step, 1),) for port, step in holds.items()}, []
    state: Any = None
    snapshots: Any = local
    restorer = Restorer(state, snapshots, "", Path(), lambda: False)
    return {version.step for version in restorer._peers(roster(replica_node), 0)}


def test_a_process_fault_asks_the_buddy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local keeper has the state, so the size of the job does not matter."""
    assert ask(monkeypatch, Local(Version(7, 1)), None, {1001: 7}) == {7}
    assert Asked.ports == [1001]


def test_a_moved_rank_asks_the_holder_that_the_roster_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named keeper comes first, and is enough."""
    assert ask(monkeypatch, Local(), NodeId("n30"), {1030: 7, 1040: 6}) == {7}
    assert Asked.ports == [1030]


def test_everybody_is_asked_where_the_named_ones_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from an earlier placement is found wherever it is."""
    assert ask(monkeypatch, Local(), NodeId("n30"), {1040: 6}) == {6}
    assert Asked.ports[:2] == [1030, 1001]


class Damaged:
    """Snapshots of steps 6 and 7, of which 7 cannot be read; remembers what was tried."""

    config = CheckpointConfig(job=JobId("j"))

    def __init__(self) -> None:
        self.tried: list[int] = []

    def full(self) -> tuple[Version, ...]:
        return (Version(7, 1), Version(6, 1))

    def private(self) -> frozenset[Version]:
        return frozenset(self.full())

    def load(self, state: Any, version: Version, *, shards: bool) -> None:
        self.tried.append(version.step)
        if version.step == 7:
            raise SlotInvalid("rank0.1: damaged")

    def forget_after(self, version: Version) -> None:
        pass


class Clean:
    clean, replicated = True, False


def test_a_survivor_whose_own_step_cannot_be_restored_does_not_offer_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is at step 7 but the private part of it is damaged: the second round goes on from step 6."""
    monkeypatch.setattr(recovery_torch, "everybody", lambda good: good)
    snapshots: Any = Damaged()
    state: Any = Clean()
    restorer = Restorer(state, snapshots, "", Path(), lambda: False)
    monkeypatch.setattr(restorer, "_exchange", lambda mine, world, rank: [mine])
    found = restorer.meet(roster(None), 0, Version(7, 1), newcomer=False)
    assert (found.version, found.source) == (Version(6, 1), "local")
    assert snapshots.tried == [7, 6]


def test_a_fetch_moves_the_heartbeat_with_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks whether this rank stands still sees the bytes come, those that are asked for twice as well."""
    state: Any = Clean()
    snapshots: Any = Damaged()
    restorer = Restorer(state, snapshots, "", Path(), lambda: False, beat := Beat())
    seen: list[tuple[int, int]] = []

    class Holder:
        def fetch(self, rank: int, version: Version, directory: Path, progress: Callable[[int, int], None]) -> None:
            for done in (10, 30, 5, 40):
                progress(done, 40)
                seen.append((beat.read(Word.ARRIVED), beat.read(Word.RESTORING)))

    holders: Any = {Version(7, 1): Holder()}
    restorer._fetch(holders, 0, Version(7, 1))
    assert seen == [(10, 1), (30, 1), (30, 1), (65, 1)]
    assert beat.read(Word.RESTORING) == 0
