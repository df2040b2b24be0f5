"""Notes on checkpoints become facts: the first at once, the last surely, and never a flood."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_rig import AgentProcess, FakeController, joined

from keepstep.agent.config import Program
from keepstep.checkpoint import config as checkpoint_config
from keepstep.checkpoint.notes import Note, Teller, What
from keepstep.model.facts import CheckpointNoted
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout


def note(step: int, what: What = "saved", rank: int | None = None) -> Note:
    return Note(what=what, tier="remote", step=step, rank=rank)


def test_notes_reach_the_controller_and_the_settings_reach_the_node(node_dir: Path, tmp_path: Path) -> None:
    """A real agent: its settings file is there before it says hello; a flood of notes becomes a few facts."""

    async def story() -> None:
        controller = FakeController()
        await controller.open()
        policy = CheckpointPolicy(dir="/nowhere", every=7)
        spec = {"ckpt": policy, "layout": Layout(tp=2), "snapshot_every": 3}
        agent = AgentProcess(
            node_dir, tmp_path / "run", controller, Program(kind="script", target="t.py"), spec=spec, rack="r7"
        )
        await agent.start()
        try:
            said = (await joined(controller))["n0"]
            assert said.rack == "r7"
            found = checkpoint_config.read(node_dir)
            assert (found.policy, found.layout, found.snapshot_every, found.level) == (policy, Layout(tp=2), 3, 2)
            teller = Teller(node_dir)
            teller.tell(Note(what="damaged", tier="peer", step=4, rank=1, why="bit", bytes=9, seconds=0.5))
            fact = await controller.wait(CheckpointNoted)
            assert (fact.what, fact.tier, fact.step, fact.rank, fact.why) == ("damaged", "peer", 4, 1, "bit")
            assert (fact.bytes, fact.seconds) == (9, 0.5)
            teller._socket.setblocking(True)  # the kernel's queue is short, and a test may wait
            for step in range(50):
                teller.tell(note(step))
            teller._socket.sendto(b"not a note", teller._to)
            await controller.wait(CheckpointNoted, lambda one: one.what == "saved" and one.step == 0)
            for what in ("skipped", "skipped", "saved", "saved"):
                for rank in (0, 1):
                    teller.tell(Note(what=what, tier="local", step=60, rank=rank, why="/disk: No space left on device"))
            await agent_stops(agent)
            last = await controller.wait(CheckpointNoted, lambda one: one.what == "saved" and one.step == 49)
            assert last.why == "48 more like this before it"
            assert agent.log.count("the checkpoint of step 60 is left out: /disk: No space left on device;") == 1
            assert agent.log.count("checkpoints are written again, step 60 is durable (local tier)") == 1
            teller.close()
        finally:
            await agent.stop()
            await controller.close()

    async def agent_stops(agent: AgentProcess) -> None:
        assert agent.process is not None
        agent.process.terminate()
        await agent.ended()

    asyncio.run(story())
