"""Orders of an investigation: a node examines itself beside its workers, and marks what may be spoilt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_rig import JOB, AgentProcess, FakeController, join, joined, next_id, roster_of
from tests.checkpoint import durable_made as made

from keepstep.agent.config import Program
from keepstep.checkpoint import catalog
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.model.actions import SelfTest, TaintCheckpoints
from keepstep.model.facts import ActionDone, SelfTestDone
from keepstep.model.ids import Epoch, NodeId
from keepstep.model.settings import CheckpointPolicy

FIRST = Epoch(1 << 16)
PROBES = Path(__file__).parents[1] / "probes"


@asynccontextmanager
async def rig(node_dir: Path, tmp_path: Path, **more: Any) -> AsyncIterator[tuple[FakeController, AgentProcess]]:
    """An agent in its first epoch, with two workers that wait."""
    controller = FakeController()
    await controller.open()
    worker = tmp_path / "worker.py"
    worker.write_text("import time\ntime.sleep(600)\n")
    program = Program(kind="script", target=str(worker))
    agent = AgentProcess(node_dir, tmp_path / "run", controller, program, **more)
    await agent.start()
    try:
        await joined(controller)
        order = join(roster_of("n0"))
        controller.order(order)
        await controller.wait(ActionDone, lambda fact: fact.action == order.id)
        yield controller, agent
    finally:
        await agent.stop()
        await controller.close()
        print(agent.log)


def selftest(**more: Any) -> SelfTest:
    words = {"test": "gemm", "request": 4, "seed": 9, "seconds": 0.0, "why": "lm-sdc4", "share": 1.0, **more}
    return SelfTest(id=next_id("selftest"), job=JOB, epoch=FIRST, node=NodeId("n0"), **words)


def test_a_node_examines_itself_and_names_the_bad_core(
    node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's child multiplies wrongly on one core: a report with that core, and the order is done all the same."""
    monkeypatch.setenv("KEEPSTEP_SELFTEST_MULTIPLY", "double_multiply_torch:one_bit")
    monkeypatch.setenv("PYTHONPATH", str(PROBES))

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, _):
            order = selftest()
            controller.order(order)
            done = await controller.wait(SelfTestDone, within_s=120)
            assert (done.request, done.test, done.passed, done.rounds) == (4, "gemm", False, 1)
            core = max(os.sched_getaffinity(0))
            assert done.failed[0] == f"gemm float32 256x256x256 on core {core}: row 17, column 4 is off by 1024"
            await controller.wait(ActionDone, lambda fact: fact.action == order.id)
            controller.order(order)
            await asyncio.sleep(0)
            again = selftest(test="flux")
            controller.order(again)
            other = await controller.wait(SelfTestDone, lambda fact: fact.test == "flux", within_s=120)
            assert (other.passed, other.why) == (None, "no such test; there are gemm, memory, all")
            assert len(controller.all(SelfTestDone)) == 2, "a repeated order is not carried out twice"

    asyncio.run(story())


def test_checkpoints_are_marked_and_cleared(node_dir: Path, tmp_path: Path) -> None:
    """Both tiers of the node that has rank 0; also when the order comes late: what was spoilt stays so."""
    shared, own = str(tmp_path / "shared"), str(tmp_path / "own")
    payload, entries = made.payload_of({"p/m/a": np.arange(5, dtype="float32")})
    for where in (shared, own):
        tier = open_tier(where, create=True)
        for step in (10, 20):
            made.complete(tier, Version(step, 1), [made.write_part(tier, Version(step, 1), 0, payload, entries)])

    def tainted() -> list[list[int]]:
        return [[g.version.step for g in catalog.read(open_tier(where)) if g.tainted] for where in (shared, own)]

    def taint(**more: Any) -> TaintCheckpoints:
        words = {"since": 10, "until": 25, "why": "lm-sdc1", "epoch": FIRST, **more}
        return TaintCheckpoints(id=next_id("taint"), job=JOB, node=NodeId("n0"), **words)

    async def story() -> None:
        async with rig(node_dir, tmp_path, spec={"ckpt": CheckpointPolicy(dir=shared, local_dir=own)}) as (
            controller,
            agent,
        ):
            for order, steps in ((taint(), [20]), (taint(clear=True), [])):
                controller.order(order)
                await controller.wait(ActionDone, lambda fact, name=order.id: fact.action == name)
                assert tainted() == [steps, steps]
            assert "checkpoints of step 20" in agent.log
            old = taint(epoch=Epoch(1))
            controller.order(old)
            await controller.wait(ActionDone, lambda fact: fact.action == old.id)
            assert tainted() == [[20], [20]]

    asyncio.run(story())
