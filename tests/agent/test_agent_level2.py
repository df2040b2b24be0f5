"""A node whose workers talk to it: seats, standbys, survivors, and faults without a controller.

The workers here speak the wire of the SDK but train nothing, so that what is tested is the agent's part alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_rig import JOB, AgentProcess, FakeController, join, joined, next_id, roster_of, shim_pids, until

from keepstep.agent.config import Program
from keepstep.model.actions import InjectFault, KeepStandbys
from keepstep.model.facts import (
    ActionDone,
    ActionFailed,
    AgentJoined,
    CollectiveBroken,
    GuardNoted,
    RankResumed,
    RankStalled,
    RecoveredLocally,
    SdkAttached,
    StallEnded,
    StandbyGone,
    StandbyReady,
    StoreLost,
    StoreReady,
    WorkerExited,
)
from keepstep.model.ids import Epoch, NodeId, Rank
from keepstep.model.topology import Roster

WORKER = """
import json, mmap, os, pathlib, signal, socket, struct, sys, time
from keepstep.model import wire
from keepstep.model.beat import LAYOUT, Phase, Word
from keepstep.model.facts import UserError

node_dir, run = pathlib.Path(os.environ["KEEPSTEP_NODE_DIR"]), pathlib.Path(os.environ["KEEPSTEP_RUN_DIR"])
slot = os.environ["KEEPSTEP_SLOT"]
if (run / "saves").exists():
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))
with open(node_dir / "beat" / slot, "r+b") as file:
    beat = memoryview(mmap.mmap(file.fileno(), 128)).cast("q")
beat[Word.PHASE] = Phase.STEP
beat[Word.LAYOUT] = LAYOUT
notes = run / f"{os.environ['KEEPSTEP_NODE']}.{slot}"
epoch = rank = 0
def note(word):
    with open(notes, "a") as file:
        file.write(word + chr(10))
def say(frame):
    try:
        sock.sendall(wire.pack(frame))
    except OSError:
        pass  # the agent is gone; the next hello says it again
while True:
    if (run / "away").exists():
        time.sleep(0.02)
        continue
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(node_dir / "agent.sock"))
    except OSError:
        time.sleep(0.02)
        continue
    say(wire.WorkerHello(protocol=wire.PROTOCOL, version="t", slot=slot, pid=os.getpid(), epoch=epoch))
    unpacker = wire.Unpacker(wire.AgentToWorker)
    sock.settimeout(0.01)
    while True:
        beat[Word.STEP] = 2 + rank if epoch else 0
        beat[Word.BEAT_NS] = 0 if (run / f"hang{rank}").exists() and epoch else time.monotonic_ns()
        if (run / f"hang{rank}").exists() and epoch:
            beat[Word.BEAT_NS] = 1
        if (run / f"fail{rank}").exists() and epoch:
            say(wire.WorkerFailed(error=UserError(type="ValueError", message="nan", file="t.py", line=3, step=4)))
            sys.exit(1)
        try:
            data = sock.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            data = b""
        if not data:
            break
        for frame in unpacker.feed(data):
            if isinstance(frame, wire.TakeSeat):
                if epoch:
                    say(wire.WorkerBroken(epoch=epoch, step=3, error="aborted"))
                epoch, rank = frame.roster.epoch, frame.rank
                beat[Word.EPOCH], beat[Word.STEP] = epoch, 3
                note(f"seat {rank} {epoch} {frame.roster.origin} {os.getpid()}")
                say(wire.WorkerJoined(epoch=epoch, ms=1.0))
                say(wire.WorkerResumed(epoch=epoch, step=3, newest=3, source="live", phases={"swap": 1.0}))
                say(wire.WorkerAdvanced(epoch=epoch, step=4))
                say(wire.WorkerGuarded(what="replicas", step=4, why="differs", ranks=(1,), tensor="p/m/w", since=3))
            elif isinstance(frame, wire.Refused):
                note("refused " + frame.why)
                sys.exit(frame.code)
            else:
                note(type(frame).__name__)
"""


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


@asynccontextmanager
async def rig(
    node_dir: Path, tmp_path: Path, *, nodes: int = 1, **more: Any
) -> AsyncIterator[tuple[FakeController, list[AgentProcess]]]:
    controller = FakeController()
    await controller.open()
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    program = Program(kind="script", target=str(script))
    agents = [
        AgentProcess(node_dir / str(i), tmp_path / "run", controller, program, node=f"n{i}", **more)
        for i in range(nodes)
    ]
    for agent in agents:
        await agent.start()
    try:
        yield controller, agents
    finally:
        for agent in agents:
            await agent.stop()
        await controller.close()
        for agent in agents:
            print(agent.log)


def keep(count: int, node: str = "n0") -> KeepStandbys:
    return KeepStandbys(id=next_id("keep"), job=JOB, epoch=Epoch(1 << 16), node=NodeId(node), count=count)


async def running(controller: FakeController, roster: Roster, ranks: int) -> None:
    """Started and every rank holds its state."""
    for node in {m.node for m in roster.members}:
        controller.order(join(roster, node))
    await until(
        lambda: len({f.rank for f in controller.all(RankResumed) if f.epoch == roster.epoch}) == ranks, within_s=40
    )


def seats(agent: AgentProcess, slot: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (agent.run_dir / f"{agent.config.node}.{slot}").read_text().splitlines()
    return []


def accepted(agent: AgentProcess) -> Roster:
    return msgspec.msgpack.decode((agent.node_dir / "roster").read_bytes(), type=Roster)


def test_standby_takes_the_vacant_seat(node_dir: Path, tmp_path: Path) -> None:
    """Attach once, park, promote: the survivor keeps its process, the standby becomes rank 1, another is parked."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, [agent]):
            await joined(controller)
            first = roster_of("n0")
            await running(controller, first, 2)
            assert len(controller.all(SdkAttached)) == 2
            controller.order(keep(1))
            standby = await controller.wait(StandbyReady)
            assert standby.slot == "s0"
            survivor = agent.pid_of("r0e65536")
            os.kill(agent.pid_of("r1e65536"), signal.SIGKILL)
            await controller.wait(WorkerExited, lambda f: f.rank == 1)
            second = roster_of("n0", epoch=2, mode="in_process", slots={0: "r0e65536", 1: "s0"}, newcomers=(1,))
            await running(controller, second, 2)
            assert agent.pid_of("r0e65536") == survivor
            assert [line.split()[:3] for line in seats(agent, "s0")] == [["seat", "1", str(second.epoch)]]
            assert [line.split()[1] for line in seats(agent, "r0e65536")] == ["0", "0"]
            assert len(controller.all(SdkAttached)) == 2, "a promoted standby does not attach again"
            assert (agent.run_dir / "logs" / "0" / "n0" / "rank_1.s0.out").exists()
            await controller.wait(StandbyReady, lambda f: f.slot != "s0")
            broken = await controller.wait(CollectiveBroken)
            assert (broken.rank, broken.epoch) == (0, first.epoch)
            told = await controller.wait(GuardNoted)
            assert (told.what, told.step, told.ranks, told.tensor, told.since) == ("replicas", 4, (1,), "p/m/w", 3)

    run(story)


def test_leaving_starts_no_standby(node_dir: Path, tmp_path: Path) -> None:
    """While ranks save their work after SIGTERM, the ended standbys are not replaced: the end would wait for those."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, [agent]):
            await joined(controller)
            (agent.run_dir / "saves").touch()
            await running(controller, roster_of("n0"), 2)
            controller.order(keep(2))
            await until(lambda: len(controller.all(StandbyReady)) == 2, within_s=40)
            parked = {f"standby_{fact.slot}.out" for fact in controller.all(StandbyReady)}
            os.kill(agent.pid, signal.SIGTERM)
            assert await agent.ended() == 143
            assert {path.name for path in (agent.run_dir / "logs/0/n0").glob("standby_*.out")} == parked
            said = json.loads((agent.run_dir / "exit.json").read_text())
            assert said["last_step"] == 2, "rank 0 had 2 steps, rank 1 had 3"

    run(story)


def test_stopped_standby_is_replaced(node_dir: Path, tmp_path: Path) -> None:
    """State T for longer than frozen_s: nobody can count on it, so it is ended with the reason, and another parks."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, frozen_s=0.2) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            controller.order(keep(1))
            standby = await controller.wait(StandbyReady)
            os.kill(agent.pid_of(standby.slot), signal.SIGSTOP)
            gone = await controller.wait(StandbyGone)
            assert (gone.slot, "state T" in gone.why) == (standby.slot, True)
            await controller.wait(StandbyReady, lambda f: f.slot != standby.slot)

    run(story)


def test_restarted_agent_is_found_by_its_workers(node_dir: Path, tmp_path: Path) -> None:
    """kill -9 of the agent: workers connect again, nothing is reported twice, seats taken meanwhile are told then."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            controller.order(keep(1))
            await controller.wait(StandbyReady)
            await agent.kill()
            controller.facts.clear()
            await agent.start()
            await joined(controller)
            states = controller.facts[0].slots  # type: ignore[union-attr]
            assert {(s.slot, s.role, s.parked) for s in states} == {
                ("r0e65536", "worker", False),
                ("r1e65536", "worker", False),
                ("s0", "standby", True),
            }
            second = roster_of("n0", epoch=2, mode="in_process", slots={0: "r0e65536", 1: "s0"}, newcomers=(1,))
            await running(controller, second, 2)
            left = await controller.wait(WorkerExited)
            assert (left.rank, left.killed_by_us) == (1, True), "who has no seat is ended"
            assert controller.all(SdkAttached) == []

    run(story)


def test_worker_errors_and_injected_faults(node_dir: Path, tmp_path: Path) -> None:
    """What the SDK said before the exit comes with the exit; injection reaches the worker, once, only where allowed."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, spec={"allow_inject": True}) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            order = InjectFault(
                id=next_id("slow"), job=JOB, epoch=Epoch(1 << 16), node=NodeId("n0"), fault="slow", rank=Rank(0)
            )
            controller.order(order, order)
            await until(lambda: len([f for f in controller.all(ActionDone) if f.action == order.id]) == 2)
            await until(lambda: "SlowDown" in seats(agent, "r0e65536"))
            nobody = msgspec.structs.replace(order, id=next_id("slow"), rank=Rank(7))
            controller.order(nobody)
            failed = await controller.wait(ActionFailed)
            assert "rank 7" in failed.why
            (agent.run_dir / "fail1").write_text("")
            ended = await controller.wait(WorkerExited)
            assert ended.error is not None
            assert (ended.rank, ended.code, ended.error.signature) == (1, 1, "ValueError@t.py:3")
            assert seats(agent, "r0e65536").count("SlowDown") == 1

    run(story)


def test_fault_for_a_worker_that_is_on_its_way_back_waits_for_it(node_dir: Path, tmp_path: Path) -> None:
    """An order that comes between an agent's restart and the worker's next hello is carried out with that hello."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, spec={"allow_inject": True}) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            (agent.run_dir / "away").write_text("")
            await agent.kill()
            controller.facts.clear()
            await agent.start()
            await joined(controller)
            controller.order(
                InjectFault(
                    id=next_id("slow"), job=JOB, epoch=Epoch(1 << 16), node=NodeId("n0"), fault="slow", rank=Rank(0)
                )
            )
            await controller.wait(ActionDone)
            assert "SlowDown" not in seats(agent, "r0e65536")
            (agent.run_dir / "away").unlink()
            await until(lambda: "SlowDown" in seats(agent, "r0e65536"))

    run(story)


def test_silent_rank_is_reported_once_and_forgiven(node_dir: Path, tmp_path: Path) -> None:
    """No beat for longer than the limit: one RankStalled with its position; a beat again: StallEnded."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, spec={"hang_detect": "300ms"}) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            (agent.run_dir / "hang1").write_text("")
            stalled = await controller.wait(RankStalled)
            assert (stalled.rank, stalled.phase, stalled.step, stalled.limit_s) == (1, "STEP", 3, 0.3)
            (agent.run_dir / "hang1").unlink()
            ended = await controller.wait(StallEnded)
            assert ended.rank == 1
            assert len(controller.all(RankStalled)) == 1

    run(story)


@pytest.mark.acceptance
def test_one_node_helps_itself_without_a_controller(node_dir: Path, tmp_path: Path) -> None:
    """Controller killed, then a rank: the agent is its own deputy, opens a minor epoch, tells it later."""

    async def story() -> None:
        more = {"services": ("store",), "controller_patience_s": 0.3}
        async with rig(node_dir, tmp_path, **more) as (controller, [agent]):
            await joined(controller)
            store = await controller.wait(StoreReady, within_s=60)
            first = roster_of("n0", store_port=store.port)
            await running(controller, first, 2)
            controller.order(keep(1))
            standby = await controller.wait(StandbyReady)
            await controller.wait(StoreReady, lambda f: f.port != store.port)
            await controller.close()
            os.kill(agent.pid_of("r1e65536"), signal.SIGKILL)
            await until(lambda: accepted(agent).epoch > first.epoch)
            await until(lambda: seats(agent, standby.slot) != [])
            roster = accepted(agent)
            assert (roster.epoch, roster.origin) == (first.epoch + 1, "n0")
            assert [m.slot for m in roster.members] == ["r0e65536", standby.slot]
            assert [m.newcomer for m in roster.members] == [False, True]
            await controller.open()
            told = await controller.wait(RecoveredLocally)
            assert told.roster.key == roster.key
            assert told.cause.rank == 1
            await until(lambda: len({f.rank for f in controller.all(RankResumed) if f.epoch == roster.epoch}) == 2)
            stale = join(msgspec.structs.replace(first))
            controller.order(stale)
            assert "older" in (await controller.wait(ActionFailed, lambda f: f.action == stale.id)).why
            third = roster_of("n0", epoch=2, mode="in_process", slots={0: "r0e65536", 1: standby.slot})
            await running(controller, third, 2)

    run(story)


def test_seat_of_a_standby_that_had_died_is_vacant_at_once(node_dir: Path, tmp_path: Path) -> None:
    """Order and death cross: the roster seats a standby that is gone; its exit is told for the new epoch, once."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            controller.order(keep(1))
            standby = await controller.wait(StandbyReady)
            controller.order(keep(0))
            await controller.wait(StandbyGone)
            second = roster_of("n0", epoch=2, mode="in_process", slots={0: "r0e65536", 1: standby.slot})
            controller.order(join(second), join(second))
            dead = await controller.wait(WorkerExited, lambda f: f.slot == standby.slot)
            assert (dead.rank, dead.epoch, dead.code) == (1, second.epoch, None)
            await until(lambda: len(controller.all(ActionDone)) == 5)
            assert len([f for f in controller.all(WorkerExited) if f.slot == standby.slot]) == 1
            assert "r0e65536" in agent.slots()

    run(story)


@pytest.mark.acceptance
def test_two_nodes_agree_on_a_deputy(tmp_path: Path) -> None:
    """The fault is on n1, the deputy is n0 (lowest rank); both enter one minor epoch; a cold process takes the seat."""

    async def story(node_dir: Path) -> None:
        more = {"services": ("store",), "controller_patience_s": 0.3, "spec": {"nproc_per_node": 1}}
        async with rig(node_dir, tmp_path, nodes=2, **more) as (controller, agents):
            hello = await joined(controller, 2)
            store = await controller.wait(StoreReady, lambda f: f.node == "n0", within_s=60)
            ports = {n: f.peer_port for n, f in hello.items()}
            first = roster_of("n0", "n1", per_node=1, peer_ports=ports, store_port=store.port)
            await running(controller, first, 2)
            await controller.wait(StoreReady, lambda f: f.node == "n0" and f.port != store.port, within_s=30)
            await controller.close()
            os.kill(agents[1].pid_of("r1e65536"), signal.SIGKILL)
            for agent in agents:
                await until(lambda a=agent: accepted(a).epoch > first.epoch)
            rosters = [accepted(agent) for agent in agents]
            assert rosters[0] == rosters[1]
            assert rosters[0].origin == "n0"
            newcomer = rosters[0].members[1]
            assert newcomer.newcomer
            await until(lambda: seats(agents[1], newcomer.slot) != [])
            await controller.open()
            await controller.wait(RecoveredLocally, lambda f: f.node == "n0")

    path = Path(tempfile.mkdtemp(prefix="ks", dir="/dev/shm"))
    try:
        asyncio.run(story(path))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def test_standbys_that_never_park_are_given_up(node_dir: Path, tmp_path: Path) -> None:
    """A script that crashes before keepstep.init is not started over and over; a new order is a new reason to try."""

    async def story() -> None:
        script = tmp_path / "bad.py"
        script.write_text("raise ImportError('no such module')")
        controller = FakeController()
        await controller.open()
        agent = AgentProcess(node_dir / "0", tmp_path / "run", controller, Program(kind="script", target=str(script)))
        await agent.start()
        try:
            await joined(controller)
            controller.order(keep(1))
            await until(lambda: "no more standbys" in agent.log)
            assert len(controller.all(StandbyGone)) == 3
            assert "ImportError" in controller.all(StandbyGone)[0].why
            controller.order(keep(1))
            await until(lambda: agent.log.count("no more standbys") == 2)
            assert len(controller.all(StandbyGone)) == 6
            assert "standbys are started here again: the controller orders them anew" in agent.log
        finally:
            await agent.stop()
            await controller.close()

    run(story)


def test_standbys_are_tried_again_after_a_newer_epoch_has_resumed(node_dir: Path, tmp_path: Path) -> None:
    """Three did not park and the node gave up; the cause goes away, the next epoch resumes: a standby parks."""

    async def story() -> None:
        async with rig(node_dir, tmp_path) as (controller, [agent]):
            await joined(controller)
            await running(controller, roster_of("n0"), 2)
            script = tmp_path / "worker.py"
            script.write_text("raise ImportError('no such module')")
            controller.order(keep(1))
            await until(lambda: "no more standbys" in agent.log)
            script.write_text(WORKER)
            second = roster_of("n0", epoch=2, mode="in_process", slots={0: "r0e65536", 1: "r1e65536"})
            await running(controller, second, 2)
            await controller.wait(StandbyReady)
            assert "standbys are started here again: epoch 2 has resumed" in agent.log

    run(story)


@pytest.mark.acceptance
def test_helpers_of_a_dead_shim_leave_with_the_node(node_dir: Path, tmp_path: Path) -> None:
    """The shim that started keeper and store is dead; at the end they go all the same (the fixture looks)."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, services=("keeper",)) as (controller, [agent]):
            await joined(controller)
            await until(lambda: (agent.node_dir / "keeper.port").exists())
            shim = agent.shim_pid()
            os.kill(shim, signal.SIGKILL)
            await until(lambda: any(p != shim for p in shim_pids(agent.node_dir)))
            helper = agent.pid_of("keeper0")
            os.kill(agent.pid, signal.SIGTERM)
            await agent.ended()
            await until(lambda: not Path(f"/proc/{helper}").exists(), within_s=2)

    run(story)


@pytest.mark.acceptance
def test_keeper_that_comes_back_at_another_port_is_announced(node_dir: Path, tmp_path: Path) -> None:
    """Somebody has taken the dead keeper's port: other nodes learn the new one, or they would never find a replica."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, services=("keeper",)) as (controller, [agent]):
            old = (await controller.wait(AgentJoined, lambda f: f.keeper_port > 0)).keeper_port
            os.kill(agent.pid_of("keeper0"), signal.SIGKILL)
            with await taken(old):
                new = await controller.wait(AgentJoined, lambda f: f.keeper_port not in (0, old))
                assert int((agent.node_dir / "keeper.port").read_text()) == new.keeper_port

    run(story)


async def taken(port: int) -> socket.socket:
    """Listen there as soon as nobody else does."""
    found: list[socket.socket] = []

    def bound() -> bool:
        with contextlib.suppress(OSError):
            found.append(socket.create_server(("127.0.0.1", port)))
        return bool(found)

    await until(bound)
    return found[0]


@pytest.mark.acceptance
def test_store_is_replaced_when_it_dies(node_dir: Path, tmp_path: Path) -> None:
    """store-loss: StoreLost, then a new unused store."""

    async def story() -> None:
        more = {"services": ("store",), "spec": {"allow_inject": True}}
        async with rig(node_dir, tmp_path, **more) as (controller, [_]):
            await joined(controller)
            old = await controller.wait(StoreReady, within_s=60)
            controller.order(
                InjectFault(id=next_id("i"), job=JOB, epoch=Epoch(1 << 16), node=NodeId("n0"), fault="store-loss")
            )
            await controller.wait(StoreLost)
            new = await controller.wait(StoreReady, lambda f: f.seq > old.seq, within_s=60)
            assert new.port != old.port

    run(story)


@pytest.mark.acceptance
def test_store_that_dies_right_after_its_epoch_opened_is_reported(node_dir: Path, tmp_path: Path) -> None:
    """No unused store has been announced since: still StoreLost, because ranks are about to use the one that died."""

    async def story() -> None:
        async with rig(node_dir, tmp_path, services=("store",)) as (controller, [agent]):
            await joined(controller)
            store = await controller.wait(StoreReady, within_s=60)
            process = next(slot["pid"] for slot in agent.slots().values() if slot["role"] == "store")
            os.kill(process, signal.SIGSTOP)
            await running(controller, roster_of("n0", store_port=store.port), 2)
            os.kill(process, signal.SIGKILL)
            await controller.wait(StoreLost)
            new = await controller.wait(StoreReady, lambda f: f.seq > store.seq, within_s=60)
            assert new.port != store.port
            assert len(controller.all(StoreLost)) == 1

    run(story)
