"""A node of a job without any code change: environment, exits, restarts, the end. Real agent, shim and workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_rig import JOB, AgentProcess, FakeController, join, joined, next_id, roster_of, shim_pids, until

from keepstep.agent.config import Program
from keepstep.model.actions import InjectFault, KillProcess, StopJob
from keepstep.model.facts import ActionDone, ActionFailed, AgentLeft, WorkerExited, WorkerFrozen
from keepstep.model.ids import Epoch, NodeId, Rank, SlotId
from keepstep.model.wire import Refused

SLEEPER = """
import os, pathlib, sys, time
run = pathlib.Path(os.environ["KEEPSTEP_RUN_DIR"])
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
new = run / f"new{rank}.{attempt}"
new.write_text("\\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
print("hello from", os.environ["RANK"], sys.argv[1:], flush=True)
stop = run / f"stop{rank}"
new.rename(run / f"env{rank}.{attempt}")
while not (stop.exists() and stop.read_text()):  # made first, filled after that
    time.sleep(0.005)
text = stop.read_text()
if text == "raise":
    raise ValueError("bad batch")
if text != "0":
    print("fatal: told to fail", file=sys.stderr)
sys.exit(int(text))
"""


def sleeper(tmp_path: Path, *args: str) -> Program:
    path = tmp_path / "sleeper.py"
    path.write_text(SLEEPER)
    return Program(kind="script", target=str(path), args=args)


def env_of(run_dir: Path, rank: int, attempt: int = 0) -> dict[str, str]:
    lines = (run_dir / f"env{rank}.{attempt}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@asynccontextmanager
async def rig(node_dir: Path, tmp_path: Path, **more: Any) -> AsyncIterator[tuple[FakeController, AgentProcess]]:
    controller = FakeController()
    await controller.open()
    program = more.pop("program", None) or sleeper(tmp_path, "--lr", "1", "--local=${local_rank}")
    agent = AgentProcess(node_dir, tmp_path / "run", controller, program, **more)
    await agent.start()
    try:
        yield controller, agent
    finally:
        await agent.stop()
        await controller.close()
        print(agent.log)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


async def started(agent: AgentProcess, *ranks: int, attempt: int = 0) -> None:
    await until(lambda: all((agent.run_dir / f"env{r}.{attempt}").exists() for r in ranks))


def stop_job(code: int = 0, why: str = "done", **more: Any) -> StopJob:
    return StopJob(id=next_id("stop"), job=JOB, epoch=Epoch(1 << 16), node=NodeId("n0"), code=code, why=why, **more)


def test_workers_get_torchruns_environment(node_dir: Path, tmp_path: Path) -> None:
    """Every variable of torchrun, the store's address, the macro in arguments, output in files; then a clean end."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            order = join(roster_of("n0", store_port=4711))
            controller.order(order)
            await controller.wait(ActionDone, lambda f: f.action == order.id)
            await started(agent, 0, 1)
            env = env_of(agent.run_dir, 1)
            expected = {
                "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "j1", "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1", "KEEPSTEP_SLOT": "r1e65536",
                "KEEPSTEP_NODE_DIR": str(node_dir), "KEEPSTEP_ROLE": "worker", "KEEPSTEP_JOB": "j1",
            }  # fmt: skip
            assert {k: env.get(k) for k in expected} == expected
            out = agent.run_dir / "logs" / "0" / "n0" / "rank_1.out"
            assert out.read_text() == "hello from 1 ['--lr', '1', '--local=1']\n"
            for rank in (0, 1):
                (agent.run_dir / f"stop{rank}").write_text("0")
                await controller.wait(WorkerExited, lambda f, r=rank: f.rank == r and f.code == 0)
            controller.order(stop_job())
            assert await agent.ended() == 0
            assert "n0:r001 hello from 1" in agent.log
            assert not node_dir.exists(), "memory is given back"
            exit_json = json.loads((agent.run_dir / "exit.json").read_text())
            assert (exit_json["schema"], exit_json["code"], exit_json["culprit"]) == ("keepstep.v1/Exit", 0, None)

    run(story)


def test_exits_are_told_at_once_with_their_story(node_dir: Path, tmp_path: Path) -> None:
    """kill -9: the signal, within milliseconds. An exception: code, last lines, type and place."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            before = time.time_ns()
            os.kill(agent.pid_of("r0e65536"), signal.SIGKILL)
            killed = await controller.wait(WorkerExited)
            assert (killed.rank, killed.signal, killed.code, killed.killed_by_us) == (0, 9, None, False)
            took_ms = (killed.at - before) / 1e6
            print(f"kill to fact: {took_ms:.1f} ms")
            assert took_ms < 250, "pidfd fires in milliseconds even on a loaded machine"
            (agent.run_dir / "stop1").write_text("raise")
            raised = await controller.wait(WorkerExited, lambda f: f.rank == 1)
            assert raised.code == 1
            assert raised.error is not None
            assert (raised.error.type, raised.error.message) == ("ValueError", "bad batch")
            assert raised.stderr_tail[-1] == "ValueError: bad batch"
            assert raised.first_error[0].startswith("Traceback")
            assert raised.first_error[-1] == "ValueError: bad batch"
            controller.order(stop_job(code=1, why="rank 1 failed", category="user_code"))
            assert await agent.ended() == 1
            exit_json = json.loads((agent.run_dir / "exit.json").read_text())
            assert (exit_json["category"], exit_json["culprit"]["rank"]) == ("user_code", 0)

    run(story)


def test_restart_replaces_every_process(node_dir: Path, tmp_path: Path) -> None:
    """Mode restart: old processes first gone, then the new attempt with its own files; an older epoch is refused."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            old = agent.pid_of("r1e65536")
            os.kill(agent.pid_of("r0e65536"), signal.SIGKILL)
            second = join(roster_of("n0", epoch=2, mode="restart", attempt=1))
            controller.order(second)
            await controller.wait(ActionDone, lambda f: f.action == second.id)
            victim = await controller.wait(WorkerExited, lambda f: f.rank == 1)
            assert victim.killed_by_us
            assert not Path(f"/proc/{old}").exists()
            await started(agent, 0, 1, attempt=1)
            assert env_of(agent.run_dir, 0, 1)["TORCHELASTIC_RESTART_COUNT"] == "1"
            stale = join(roster_of("n0"))
            controller.order(stale)
            failed = await controller.wait(ActionFailed, lambda f: f.action == stale.id)
            assert "older" in failed.why
            controller.order(second)
            await until(lambda: len([f for f in controller.all(ActionDone) if f.action == second.id]) == 2)
            assert len(agent.slots()) == 2, "a repeated order starts nothing"

    run(story)


def test_agent_killed_and_started_again_finds_its_workers(node_dir: Path, tmp_path: Path) -> None:
    """kill -9 of the agent: workers keep their pids, an exit in between keeps its code, numbers go on."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.wait(ActionDone)
            pids = [agent.pid_of("r0e65536"), agent.pid_of("r1e65536")]
            await agent.kill()
            (agent.run_dir / "stop1").write_text("5")
            await until(lambda: not Path(f"/proc/{pids[1]}").exists())
            controller.facts.clear()
            await agent.start()
            back = await controller.wait(WorkerExited)
            assert (back.rank, back.code, back.signal) == (1, 5, None)
            assert back.first_error == ("fatal: told to fail",)
            assert back.seq > controller.acked["n0"] - 1
            assert agent.pid_of("r0e65536") == pids[0]
            assert controller.hellos[0].boot != controller.hellos[-1].boot
            again = await controller.wait(WorkerExited, lambda f: f.rank == 1)
            assert again.seq == back.seq
            os.kill(pids[0], signal.SIGKILL)
            assert (await controller.wait(WorkerExited, lambda f: f.rank == 0)).signal == 9

    run(story)


def test_restarted_agent_invents_no_second_exit(node_dir: Path, tmp_path: Path) -> None:
    """A rank had ended with 0 before the agent died: the next agent neither starts it again nor calls it a fault."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            (agent.run_dir / "stop1").write_text("0")
            await controller.wait(WorkerExited)
            await agent.kill()
            await agent.start()
            await until(lambda: len(controller.hellos) == 2)
            os.kill(agent.pid_of("r0e65536"), signal.SIGKILL)
            await controller.wait(WorkerExited, lambda f: f.rank == 0)
            assert [(f.rank, f.code) for f in controller.all(WorkerExited)] == [(1, 0), (0, None)]
            await until(lambda: agent.slots() == {})

    run(story)


def test_shim_killed_workers_train_on(node_dir: Path, tmp_path: Path) -> None:
    """kill -9 of the shim: workers live, their exits keep their status, later processes start from a new shim."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.wait(ActionDone)
            shim = agent.shim_pid()
            os.kill(shim, signal.SIGKILL)
            await until(lambda: any(p != shim for p in shim_pids(agent.node_dir)))
            (agent.run_dir / "stop0").write_text("6")
            ended = await controller.wait(WorkerExited)
            assert (ended.rank, ended.code) == (0, 6), "the agent is a subreaper and collects the status itself"
            os.kill(agent.pid_of("r1e65536"), signal.SIGKILL)
            assert (await controller.wait(WorkerExited, lambda f: f.rank == 1)).signal == 9
            (agent.run_dir / "stop0").unlink()
            controller.order(join(roster_of("n0", epoch=2, mode="restart", attempt=1)))
            await started(agent, 0, 1, attempt=1)

    run(story)


def test_end_in_good_order_is_no_fault_when_the_shim_is_slow(node_dir: Path, tmp_path: Path) -> None:
    """The shim gets no CPU for a while: the exit code is waited for, as a rank gone without one counts as lost."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.wait(ActionDone)
            pid, shim = agent.pid_of("r1e65536"), agent.shim_pid()
            os.kill(shim, signal.SIGSTOP)
            (agent.run_dir / "stop1").write_text("0")
            await until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "Z")
            await asyncio.sleep(0.2)  # far beyond what a rank in a collective is given
            os.kill(shim, signal.SIGCONT)
            assert (await controller.wait(WorkerExited)).code == 0

    run(story)


def test_shim_and_agent_both_killed(node_dir: Path, tmp_path: Path) -> None:
    """Both at once: workers are found again by pid and start time; the status of a later exit is unknown, not wrong."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.wait(ActionDone)
            pids = {agent.pid_of("r0e65536"), agent.pid_of("r1e65536")}
            shim = agent.shim_pid()
            await agent.kill()
            os.kill(shim, signal.SIGKILL)
            await agent.start()
            await until(lambda: len(controller.hellos) == 2)
            assert {s["pid"] for s in agent.slots().values()} == pids
            (agent.run_dir / "stop0").write_text("0")
            ended = await controller.wait(WorkerExited)
            assert ended.rank == 0
            assert ended.signal is None
            assert ended.code in (0, None)

    run(story)


def test_frozen_process_is_named_and_can_be_killed(node_dir: Path, tmp_path: Path) -> None:
    """SIGSTOP: state T for longer than frozen_s is reported once; KillProcess ends a stopped process."""

    async def story() -> None:
        more = {"frozen_s": 0.2, "spec": {"allow_inject": True}}
        async with rig(node_dir, tmp_path, **more) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            at = Epoch(1 << 16)
            controller.order(
                InjectFault(id=next_id("i"), job=JOB, epoch=at, node=NodeId("n0"), fault="freeze", rank=Rank(1))
            )
            frozen = await controller.wait(WorkerFrozen)
            assert (frozen.rank, frozen.state) == (1, "T")
            assert frozen.for_s >= 0.2
            controller.order(
                KillProcess(
                    id=next_id("k"), job=JOB, epoch=at, node=NodeId("n0"), slot=SlotId("r1e65536"), why="frozen"
                )
            )
            ended = await controller.wait(WorkerExited)
            assert (ended.rank, ended.signal, ended.killed_by_us) == (1, 9, True)
            assert len(controller.all(WorkerFrozen)) == 1

    run(story)


def test_signal_ends_the_node_in_good_order(node_dir: Path, tmp_path: Path) -> None:
    """SIGTERM: AgentLeft is told, workers get SIGTERM, nothing is left, code 143, and no rank is blamed for it."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            os.kill(agent.pid_of("r0e65536"), signal.SIGKILL)
            await controller.wait(WorkerExited)
            os.kill(agent.pid, signal.SIGTERM)
            assert await agent.ended() == 143
            assert (await controller.wait(AgentLeft)).why == "stopped by SIGTERM"
            assert {f.signal for f in controller.all(WorkerExited)} == {9, 15}
            assert json.loads((agent.run_dir / "exit.json").read_text())["culprit"] is None
            assert not node_dir.exists()

    run(story)


def test_agent_leaves_with_its_launcher(node_dir: Path, tmp_path: Path) -> None:
    """kill -9 of the launcher: the agent sees it by pidfd and ends everything."""

    async def story() -> None:
        launcher = await asyncio.create_subprocess_exec("sleep", "100")
        async with rig(node_dir, tmp_path, launcher_pid=launcher.pid) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            launcher.kill()
            await launcher.wait()
            assert await agent.ended() == 143
            assert "launcher" in (await controller.wait(AgentLeft)).why

    run(story)


def test_lost_node_leaves_nothing(node_dir: Path, tmp_path: Path) -> None:
    """Injected node loss: every process of the node and its memory are gone at once, the launcher too, no farewell."""

    async def story() -> None:
        launcher = await asyncio.create_subprocess_exec("sleep", "100")
        more = {"launcher_pid": launcher.pid, "spec": {"allow_inject": True}}
        async with rig(node_dir, tmp_path, **more) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.wait(ActionDone)
            pids = [agent.pid_of("r0e65536"), agent.pid_of("r1e65536"), agent.shim_pid()]
            order = InjectFault(id=next_id("i"), job=JOB, epoch=Epoch(1 << 16), node=NodeId("n0"), fault="node-loss")
            controller.order(order)
            assert await agent.ended() == -signal.SIGKILL
            assert await asyncio.wait_for(launcher.wait(), 10) == -signal.SIGKILL
            await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
            assert not node_dir.exists()
            assert controller.all(AgentLeft) == []
            assert [f.action for f in controller.all(ActionDone)][-1] == order.id

    run(story)


def test_faults_need_permission(node_dir: Path, tmp_path: Path) -> None:
    """Without --allow-inject nothing is broken, and the answer says what to do."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            controller.order(
                InjectFault(
                    id=next_id("i"), job=JOB, epoch=Epoch(1 << 16), node=NodeId("n0"), fault="kill", rank=Rank(0)
                )
            )
            failed = await controller.wait(ActionFailed)
            assert "--allow-inject" in failed.why
            assert controller.all(WorkerExited) == []

    run(story)


def test_controller_away_facts_wait_and_come_once(node_dir: Path, tmp_path: Path) -> None:
    """An exit while no controller listens is told when one is back, under one number, after AgentJoined."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.wait(ActionDone)
            await controller.close()
            (agent.run_dir / "stop1").write_text("4")
            await until(lambda: "r1e65536" not in agent.slots())
            controller.facts.clear()
            await controller.open()
            ended = await controller.wait(WorkerExited)
            assert (ended.rank, ended.code) == (1, 4)
            first = controller.facts[0]
            assert type(first).__name__ == "AgentJoined"
            assert {s.slot for s in first.slots} == {"r0e65536", "r1e65536"}  # type: ignore[union-attr]
            assert len(controller.all(WorkerExited)) == 1

    run(story)


def test_finished_without_a_controller(node_dir: Path, tmp_path: Path) -> None:
    """All ranks done and nobody to say so: the node waits controller_wait_s and leaves with 0."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, controller_wait_s=0.5) as (controller, agent):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            await started(agent, 0, 1)
            await controller.close()
            for rank in (0, 1):
                (agent.run_dir / f"stop{rank}").write_text("0")
            assert await agent.ended() == 0

    run(story)


def test_refused_agent_leaves_with_the_sentence(node_dir: Path, tmp_path: Path) -> None:
    """Trying again without a change would be pointless, so it does not."""

    async def story() -> None:
        controller = FakeController()
        controller.refuse = Refused(why="wrong token", code=66)
        await controller.open()
        agent = AgentProcess(node_dir, tmp_path / "run", controller, sleeper(tmp_path))
        await agent.start()
        assert await agent.ended() == 66
        assert "wrong token" in agent.log
        await controller.close()

    run(story)


def test_unstartable_program_fails_the_join_with_its_name(node_dir: Path, tmp_path: Path) -> None:
    """An executable that does not exist: ActionFailed, no silence."""

    async def story() -> None:
        program = Program(kind="executable", target="/no/such/program")
        async with rig(node_dir, tmp_path, program=program) as (controller, _):
            await joined(controller)
            controller.order(join(roster_of("n0")))
            failed = await controller.wait(ActionFailed)
            assert "/no/such/program" in failed.why

    run(story)
