"""The checkpoint engine alone: real torchrun, kill -9, memory that is wiped, another number of ranks, a lost node."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "level1_train.py"
LIMIT_S = 150.0
STEPS = 13
Losses = dict[int, str]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory of this test's own; whatever still works for it afterwards is ended."""
    place = tmp_path / "r"
    yield place
    for pid in _workers_for(place):
        os.kill(pid, signal.SIGKILL)


def _workers_for(place: Path) -> list[int]:
    """Attendants, keepers and archivers whose command line names a directory below ``place``."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes()
            state = (proc / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if os.fsencode(place) in words and b"--node-dir" in words and state != "Z":
            found.append(int(proc.name))
    return found


def _environ(runtime: Path, **more: str) -> dict[str, str]:
    ours = ("KEEPSTEP_", "TORCHELASTIC_", "PET_")
    theirs = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in theirs}
    return {**kept, "KEEPSTEP_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1", **more}


def torchrun(runtime: Path, ranks: int, *args: str) -> str:
    """Run the script to its end; what it said on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "2", str(SCRIPT), *args]
    done = subprocess.run(command, env=_environ(runtime), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def by_hand(runtime: Path, ranks: int, *args: str, nodes: bool = False) -> str:
    """As ``torchrun`` without it, which is quicker; ``nodes`` makes each rank a node of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        where = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(0 if nodes else rank)}
        names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "KEEPSTEP_JOB_NAME": "by-hand"}
        names["KEEPSTEP_NODE_NAME"] = f"n{rank if nodes else 0}"
        command = [sys.executable, str(SCRIPT), *args]
        environ = _environ(runtime, **where, **names)
        started.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=LIMIT_S)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks, said
    return said[0]


def lose(place: Path) -> None:
    """A power cut: processes and memory of a directory are gone."""
    for pid in _workers_for(place):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(place)


def losses(out: Path, rank: int) -> tuple[Losses, int]:
    """Each step's loss on one rank, and how many steps were done more than once (with the same loss, or it fails)."""
    found: Losses = {}
    again = 0
    for line in (out / f"rank{rank}.txt").read_text().splitlines():
        words = line.split()
        if not words[0].isdigit():
            continue
        step = int(words[0])
        again += step in found
        assert found.setdefault(step, words[2]) == words[2], f"step {step} has another loss the second time"
    return found, again


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Losses]:
    """Each rank's losses of a run that nothing befell, which also leaves nothing behind."""
    home = tmp_path_factory.mktemp("undisturbed")
    by_hand(home / "r", 2, "--steps", str(STEPS), "--out", str(home), "--linger", "0.1")
    until(lambda: not _workers_for(home / "r") and not list((home / "r").glob("*")), "end of what was in memory")
    return [losses(home, rank)[0] for rank in range(2)]


def test_a_killed_rank_costs_a_restart_and_at_most_the_step_in_flight(
    tmp_path: Path, runtime: Path, undisturbed: list[Losses]
) -> None:
    """kill -9 of a rank: torchrun starts all anew, they go on from memory; without memory from the durable tier.

    Losses are those of an undisturbed run, bit for bit.
    """
    durable = ("--dir", str(tmp_path / "ckpt"), "--every", "4")
    said = torchrun(runtime, 2, "--steps", "10", "--out", str(tmp_path / "a"), "--kill-at", "6", *durable)
    assert "going on from step 6 (local)" in said
    lose(runtime)
    said = by_hand(runtime, 2, "--steps", str(STEPS), "--out", str(tmp_path / "a"), *durable)
    assert "going on from step 10 (saved in" in said
    assert said.count("from step 10") == 1, "the resume is told once"
    for rank in range(2):
        disturbed, again = losses(tmp_path / "a", rank)
        assert again <= 1
        assert disturbed == undisturbed[rank]


def test_another_number_of_ranks_goes_on_from_the_durable_tier(tmp_path: Path, runtime: Path) -> None:
    """Sharded state of two ranks is cut anew for three; the numbers are those of one process, but for rounding."""
    durable = ("--sharded", "--dir", str(tmp_path / "ckpt"), "--every", "4", "--out", str(tmp_path / "a"))
    by_hand(runtime, 2, "--steps", "5", *durable)
    said = by_hand(runtime, 3, "--steps", "9", *durable)
    assert "going on from step 5 (saved in" in said
    resharded = losses(tmp_path / "a", 0)[0]
    assert [float.fromhex(resharded[step]) for step in range(9)] == pytest.approx(_in_one_process(9), rel=1e-4)


def _in_one_process(steps: int) -> list[float]:
    """What ``level1_train.py --sharded`` computes, without any sharding."""
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for step in range(steps):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step * 64))
            loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :1]) * x[:, 1:2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def test_a_lost_nodes_state_comes_back_from_another_nodes_memory(
    tmp_path: Path, runtime: Path, undisturbed: list[Losses]
) -> None:
    """Two nodes, no durable tier: one loses its memory and its processes; its rank's state was copied to the other."""
    by_hand(runtime, 2, "--steps", "6", "--out", str(tmp_path / "a"), nodes=True)
    (lost,) = runtime.glob("*/n1")
    lose(lost)
    said = by_hand(runtime, 2, "--steps", "9", "--out", str(tmp_path / "a"), nodes=True)
    assert "going on from step 6 (local)" in said or "going on from step 5 (local)" in said
    for rank in range(2):
        found = losses(tmp_path / "a", rank)[0]
        assert found == {step: undisturbed[rank][step] for step in range(9)}


def test_without_being_asked_a_script_under_torchrun_stays_as_it_was(tmp_path: Path, runtime: Path) -> None:
    """Level 0: no process, no directory, no word."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import keepstep, sys\nks = keepstep.init()\nassert ks.level == 0\n"
        "for step in ks.steps(2):\n    with step:\n        step.commit()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=_environ(runtime),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not runtime.exists()
