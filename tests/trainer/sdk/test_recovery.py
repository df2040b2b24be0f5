"""The SDK end to end: real worker processes, a fake agent, kill -9."""

from __future__ import annotations

import functools
import signal

import pytest

from keepstep.checkpoint.config import CheckpointConfig, write
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.wire import WorkerAdvanced, WorkerDone, WorkerJoined, WorkerResumed
from tests.trainer.sdk.fake_agent import FakeAgent

TOTAL = 7


@functools.cache
def undisturbed(kind: str, world: int) -> dict[int, dict[int, str]]:
    with FakeAgent(world, KIND=kind, TOTAL=str(TOTAL)) as agent:
        agent.start()
        for rank in range(world):
            assert agent.wait_exit(rank) == 0, agent.errors()
        return agent.losses()


@pytest.mark.parametrize(
    ("kind", "world", "at"),
    [
        ("ddp", 2, "1:0:commit"),
        ("ddp", 3, "1:3:opt"),
        ("plain", 2, "0:3:fwd"),
        ("fsdp", 2, "1:3:after"),
        ("fsdp", 3, "0:4:opt"),
    ],
)
def test_losses_after_a_replacement_are_bitwise_equal(kind: str, world: int, at: str) -> None:
    """A rank kills itself in mid-step; a parked standby takes its place; no loss of any rank differs in any bit,
    survivors keep their processes, and every rank tells that it joined, resumed, advanced and finished."""
    victim, step = int(at.split(":")[0]), int(at.split(":")[1])
    with FakeAgent(world, KIND=kind, TOTAL=str(TOTAL), DIE=at) as agent:
        agent.start(standbys=1)
        assert agent.wait_exit(victim) == -signal.SIGKILL
        before = {rank: slot for rank, slot in agent.slots.items() if rank != victim}
        roster = agent.replace(victim)
        agent.wait_frames(WorkerDone, world, roster.epoch)
        for rank in range(world):
            assert agent.wait_exit(rank) == 0, agent.errors()
        assert {rank: agent.slots[rank] for rank in before} == before
        assert agent.losses() == undisturbed(kind, world)
        resumed = agent.frames(WorkerResumed, roster.epoch)
        assert {rank for rank, _ in resumed} == set(range(world))
        assert len({frame.step for _, frame in resumed}) == 1
        assert resumed[0][1].step in (step, step + 1)
        assert {frame.source for rank, frame in resumed if rank == victim} == {"local"}
        assert {rank for rank, _ in agent.frames(WorkerJoined, roster.epoch)} == set(range(world))
        assert all({"abort", "reset", "swap", "agree", "restore"} <= set(f.phases) for _, f in resumed)
        if step < TOTAL - 1:
            assert {rank for rank, _ in agent.frames(WorkerAdvanced, roster.epoch)} == set(range(world))


def test_ranks_choose_one_interval_and_a_recovery_begins_anew() -> None:
    """With a tiny budget both ranks agree after ten steps on snapshots every many steps and say so once; a rank that
    is killed afterwards is replaced, and no loss differs in any bit."""
    total, policy = 14, CheckpointPolicy(overhead=1e-4)
    plain = {}
    for kill in ("", "1:11:fwd"):
        with FakeAgent(2, KIND="ddp", TOTAL=str(total), DIE=kill) as agent:
            write(agent.node_dir, CheckpointConfig(job=JobId("j"), policy=policy))
            agent.start(standbys=1)
            if kill:
                assert agent.wait_exit(1) == -signal.SIGKILL
                agent.replace(1)
            for rank in range(2):
                assert agent.wait_exit(rank) == 0, agent.errors()
            plain[kill] = agent.losses()
            words = (agent.root / f"{agent.slots[0]}.err").read_text()
            assert words.count("instead of 1: here a snapshot costs") == 1
    assert plain[""] == plain["1:11:fwd"]
