"""The SDK's life besides the simple replacement: second faults, exceptions, restarts, an absent agent, no agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from keepstep.checkpoint import pair
from keepstep.model.beat import LAYOUT, Phase, Word
from keepstep.model.env import BEAT_DIR, KEEPER_SOCKET, SNAP_DIR
from keepstep.model.ids import NodeId
from keepstep.model.topology import Place
from keepstep.model.wire import (
    RaiseInjected,
    Refused,
    SlowDown,
    WorkerCannotResume,
    WorkerDone,
    WorkerFailed,
    WorkerHello,
    WorkerResumed,
)
from tests.trainer.sdk.fake_agent import SCRIPT, FakeAgent
from tests.trainer.sdk.test_recovery import TOTAL, undisturbed


def finish(agent: FakeAgent) -> None:
    for rank in agent.slots:
        assert agent.wait_exit(rank) == 0, agent.errors()


def test_a_second_fault_during_recovery_starts_it_again() -> None:
    """The replacement is killed as soon as it has its seat; another takes over in a newer epoch; bitwise equal."""
    with FakeAgent(2, KIND="ddp", TOTAL=str(TOTAL), DIE="1:3:opt") as agent:
        agent.start(standbys=2)
        assert agent.wait_exit(1) == -signal.SIGKILL
        agent.replace(1)
        agent.kill(1)
        roster = agent.replace(1)
        agent.wait_frames(WorkerDone, 2, roster.epoch)
        finish(agent)
        assert agent.losses() == undisturbed("ddp", 2)


def test_two_faults_one_after_the_other() -> None:
    """A rank, then another; the first replacement is a survivor of the second; bitwise equal."""
    with FakeAgent(3, KIND="fsdp", TOTAL=str(TOTAL), DIE="1:1:opt", PAUSE="0.15") as agent:
        agent.start(standbys=2)
        assert agent.wait_exit(1) == -signal.SIGKILL
        roster = agent.replace(1)
        agent.wait_frames(WorkerResumed, 3, roster.epoch)
        time.sleep(0.2)
        agent.kill(2)
        roster = agent.replace(2)
        agent.wait_frames(WorkerDone, 3, roster.epoch)
        finish(agent)
        assert agent.losses() == undisturbed("fsdp", 3)


def test_without_snapshots_a_live_replica_hands_over() -> None:
    """Replicated model, snapshots off: parameters come from a survivor, random state from the private part that the
    dead rank left on this node; bitwise equal."""
    with FakeAgent(2, snapshot_every=0, KIND="ddp", TOTAL=str(TOTAL), DIE="0:3:fwd") as agent:
        agent.start(standbys=1)
        assert agent.wait_exit(0) == -signal.SIGKILL
        assert pair.look(agent.node_dir / SNAP_DIR, 0) == [], "a full version was written although snapshots are off"
        roster = agent.replace(0)
        agent.wait_frames(WorkerDone, 2, roster.epoch)
        finish(agent)
        sources = {rank: frame.source for rank, frame in agent.frames(WorkerResumed, roster.epoch)}
        assert sources == {0: "replica", 1: "live"}
        assert agent.losses() == undisturbed("ddp", 2)


def test_rare_snapshots_of_a_sharded_model_roll_everybody_back() -> None:
    """Sharded, one snapshot in three steps: all go back to the newest one, and the losses are the same again."""
    with FakeAgent(2, snapshot_every=3, KIND="fsdp", TOTAL=str(TOTAL), DIE="1:5:fwd") as agent:
        agent.start(standbys=1)
        assert agent.wait_exit(1) == -signal.SIGKILL
        roster = agent.replace(1)
        agent.wait_frames(WorkerDone, 2, roster.epoch)
        finish(agent)
        assert {frame.step for _, frame in agent.frames(WorkerResumed, roster.epoch)} == {3}
        assert agent.losses() == undisturbed("fsdp", 2)


def test_a_lost_node_is_restored_from_the_buddys_keeper() -> None:
    """Sharded state with a real keeper on another node: the files of the dead rank are gone with its node, the
    replacement fetches them over TCP, and nothing differs in any bit."""
    with FakeAgent(2, KIND="fsdp", TOTAL=str(TOTAL), DIE="1:4:opt") as agent:
        keepers = []
        try:
            for node in ("n", "m"):
                (agent.root / node).mkdir(exist_ok=True)
                words = [sys.executable, "-m", "keepstep.checkpoint.keeper", "--host", "127.0.0.1"]
                keepers.append(subprocess.Popen([*words, "--node-dir", str(agent.root / node)]))
            ports = {}
            for node in ("n", "m"):
                path = agent.root / node / "keeper.port"
                agent.wait(path.exists, f"keeper {node}")
                ports[node] = int(path.read_text())
            agent.places = tuple(
                Place(node=NodeId(a), host="127.0.0.1", keeper_port=ports[a], peer_port=0, buddy=NodeId(b))
                for a, b in (("n", "m"), ("m", "n"))
            )
            agent.start(standbys=1)
            ring_keepers(agent)
            assert agent.wait_exit(1) == -signal.SIGKILL
            for path in (agent.node_dir / SNAP_DIR).glob("rank1.*"):
                path.unlink()
            roster = agent.replace(1, replica_node="m")
            ring_keepers(agent)
            agent.wait_frames(WorkerDone, 2, roster.epoch)
            finish(agent)
            sources = {rank: frame.source for rank, frame in agent.frames(WorkerResumed, roster.epoch)}
            assert sources[1] == "peer"
            assert {frame.step for _, frame in agent.frames(WorkerResumed, roster.epoch)} == {4}
            assert agent.losses() == undisturbed("fsdp", 2)
        finally:
            for keeper in keepers:
                keeper.terminate()
                keeper.wait(10)


def ring_keepers(agent: FakeAgent) -> None:
    for node in ("n", "m"):
        (agent.root / node / "roster").write_bytes(msgspec.msgpack.encode(agent.roster))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.sendto(b"roster", str(agent.root / node / KEEPER_SOCKET))


def test_a_restarted_job_goes_on_from_its_snapshots() -> None:
    """All processes are new: they resume from the files, even when the loop is already complete, and the epilogue
    runs again."""
    with FakeAgent(2, KIND="fsdp", TOTAL=str(TOTAL), DIE="1:4:opt") as agent:
        agent.start()
        assert agent.wait_exit(1) == -signal.SIGKILL
        agent.kill(0)
        agent.start("restart")
        epoch = agent.roster.epoch if agent.roster else 0
        agent.wait_frames(WorkerDone, 2, epoch)
        finish(agent)
        assert {f.step for _, f in agent.frames(WorkerResumed, epoch)} == {4}
        agent.start("restart")
        epoch = agent.roster.epoch if agent.roster else 0
        finish(agent)
        assert {f.step for _, f in agent.frames(WorkerResumed, epoch)} == {TOTAL}
        assert all((agent.root / f"{slot}.out").read_text().startswith("done") for slot in agent.slots.values())


def test_a_users_exception_is_told_and_goes_on() -> None:
    """Type, message, place and step reach the agent; the process ends with Python's own traceback and code 1; the
    other rank's exception, if any, is marked as a consequence."""
    with FakeAgent(2, KIND="plain", TOTAL=str(TOTAL), RAISE="1:2") as agent:
        agent.start()
        assert agent.wait_exit(1) == 1
        failed = dict(agent.wait_frames(WorkerFailed, 1))[1].error
        assert (failed.type, failed.message, failed.step) == ("ValueError", "bad sample 17", 2)
        assert failed.file == str(SCRIPT)
        assert failed.function == "main"
        assert failed.line > 0
        assert failed.consequence is False
        assert any("bad sample 17" in line for line in failed.traceback)
        assert "bad sample 17" in (agent.root / f"{agent.slots[1]}.err").read_text()


def test_an_exception_in_set_up_is_told_too() -> None:
    """Outside of any step the words reach the agent as well."""
    with FakeAgent(1, FAIL_SETUP="1") as agent:
        agent.start()
        assert agent.wait_exit(0) == 1
        failed = agent.wait_frames(WorkerFailed, 1)[0][1].error
        assert (failed.type, failed.step) == ("RuntimeError", None)


def test_injected_faults() -> None:
    """A person's wish for an exception or a slow step is carried out in the next step."""
    with FakeAgent(1, KIND="plain", TOTAL="100000", PAUSE="0.01") as agent:
        agent.start()
        agent.wait_frames(WorkerResumed, 1)
        agent.send(agent.slots[0], SlowDown(seconds=0.01))
        agent.send(agent.slots[0], RaiseInjected())
        assert agent.wait_exit(0) == 1
        assert agent.wait_frames(WorkerFailed, 1)[0][1].error.type == "InjectedFault"


def test_training_does_not_notice_the_agents_death() -> None:
    """The agent goes away in the middle and comes back: losses are the same, the worker says hello with its epoch,
    and what it had said of this epoch is said again."""
    with FakeAgent(2, KIND="ddp", TOTAL=str(TOTAL), PAUSE="0.1") as agent:
        agent.start()
        agent.wait_frames(WorkerResumed, 2)
        agent.hang_up()
        agent.heard.clear()
        time.sleep(0.3)
        agent.listen()
        hello = dict(agent.wait_frames(WorkerHello, 2))
        assert {frame.epoch for frame in hello.values()} == {agent.epoch}
        assert len(agent.wait_frames(WorkerResumed, 2)) == 2
        agent.wait_frames(WorkerDone, 2)
        finish(agent)
        assert agent.losses() == undisturbed("ddp", 2)


def test_too_little_memory_is_refused_before_the_run() -> None:
    """The sum is on stderr and reaches the agent; exit code 66; no snapshot was begun."""
    with FakeAgent(1, KIND="plain", WIDTH=str(1 << 40)) as agent:
        agent.start()
        assert agent.wait_exit(0) == 66
        failed = agent.wait_frames(WorkerFailed, 1)[0][1].error
        assert failed.type == "NotEnoughMemory"
        assert "per version x 1 ranks x (2 versions)" in (agent.root / f"{agent.slots[0]}.err").read_text()
        assert not list((agent.node_dir / SNAP_DIR).glob("*.0")) or pair.look(agent.node_dir / SNAP_DIR, 0) == []


def test_a_refused_worker_ends_with_the_agents_code(tmp_path: Path) -> None:
    """The sentence is on stderr, the exit code is the agent's."""
    with FakeAgent(1) as agent:
        slot = agent.spawn()
        agent.wait(lambda: slot in agent.connections, "the worker")
        agent.send(slot, Refused(why="version 9 does not fit", code=65))
        assert agent.processes[slot].wait(30) == 65
        assert "version 9 does not fit" in (agent.root / f"{slot}.err").read_text()


def test_a_completed_rank_cannot_go_back() -> None:
    """A newer epoch after the loop's end is answered with the request for a restart, not with silence."""
    with FakeAgent(1, KIND="plain", TOTAL="2", EPILOGUE="20") as agent:
        agent.start()
        agent.wait_frames(WorkerDone, 1)
        agent.open_epoch("in_process")
        assert "epilogue" in agent.wait_frames(WorkerCannotResume, 1)[0][1].why


def test_a_parked_standby_says_so_in_its_heartbeat() -> None:
    """Phase PARKED, own pid, layout: what the agent needs to count it as ready."""
    with FakeAgent(1) as agent:
        slot = agent.spawn(standby=True)
        agent.wait_frames(WorkerHello, 1)
        words = memoryview((agent.node_dir / BEAT_DIR / slot).read_bytes()).cast("q")
        assert words[Word.LAYOUT] == LAYOUT
        assert words[Word.PID] == agent.processes[slot].pid
        assert words[Word.PHASE] == Phase.PARKED
        assert words[Word.EPOCH] == 0


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_same_script_runs_without_us(launcher: str, tmp_path: Path) -> None:
    """Plain python and torchrun need nothing but the package."""
    words = [sys.executable, str(SCRIPT)]
    if launcher == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    done = subprocess.run(
        words, env=clean | {"KIND": "ddp", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "done 0 8" in done.stdout
