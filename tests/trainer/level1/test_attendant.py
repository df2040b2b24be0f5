"""The attendant with real processes: one per node, found again, survives its ranks, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint import nodedir
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.notes import Note, Teller
from keepstep.model import env
from keepstep.model.ids import JobId
from keepstep.trainer import attended as module
from keepstep.trainer.attended import Attended

CONFIG = CheckpointConfig(job=JobId("j"), level=1)
LIMIT_S = 30.0


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s"
        time.sleep(0.01)


def processes(node_dir: Path) -> dict[str, int]:
    """Attendant, keeper and archiver of a node directory, by name."""
    found = {}
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().decode().split("\0")
            state = (proc / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(node_dir) in words and state != "Z" and "-m" in words:
            found[words[words.index("-m") + 1].rpartition(".")[2]] = int(proc.name)
    return found


@pytest.fixture
def node_dir(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "r" / "j" / "n"
    yield place
    for pid in processes(place).values():
        os.kill(pid, signal.SIGKILL)


def line(node_dir: Path, rank: int = 0, linger_s: float = 60.0, config: CheckpointConfig | None = CONFIG) -> Attended:
    made = Attended(node_dir, rank, host="127.0.0.1", linger_s=linger_s, config=config, token="t")
    assert made.open() is None
    return made


def test_one_attendant_serves_all_ranks_and_goes_with_them(node_dir: Path) -> None:
    """The first rank starts it, others find it; when the last has gone and time has passed nothing is left."""
    first = line(node_dir, 0, linger_s=0.3)
    second = line(node_dir, 1, config=None)
    there = processes(node_dir)
    assert set(there) == {"attendant", "keeper"}
    assert first.keeper_port == second.keeper_port > 0
    assert os.getsid(there["attendant"]) != os.getsid(0)
    first.close()
    assert set(processes(node_dir)) == {"attendant", "keeper"}
    second.close()
    until(lambda: not processes(node_dir) and not node_dir.exists(), "end")
    assert not node_dir.parent.exists()


def test_ranks_that_come_back_in_time_find_their_memory(node_dir: Path) -> None:
    """A restart of all ranks keeps the processes, their port, and the files."""
    before = line(node_dir)
    pids = processes(node_dir)
    (node_dir / env.SNAP_DIR / "rank0.0").write_bytes(b"state")
    before.close()
    after = line(node_dir)
    assert processes(node_dir) == pids
    assert after.keeper_port == before.keeper_port
    assert (node_dir / env.SNAP_DIR / "rank0.0").read_bytes() == b"state"
    after.close()


def test_a_killed_attendant_is_replaced_and_takes_no_memory_along(node_dir: Path) -> None:
    """kill -9: its keeper goes with it, the rank starts another, files stay."""
    rank = line(node_dir)
    before = processes(node_dir)
    (node_dir / "snap" / "rank0.0").write_bytes(b"state")
    os.kill(before["attendant"], signal.SIGKILL)
    until(lambda: set(processes(node_dir)) == {"attendant", "keeper"} and processes(node_dir) != before, "successor")
    assert (node_dir / "snap" / "rank0.0").read_bytes() == b"state"
    rank.close()


def test_a_killed_keeper_is_started_again(node_dir: Path) -> None:
    """Nobody else would."""
    rank = line(node_dir)
    keeper = processes(node_dir)["keeper"]
    os.kill(keeper, signal.SIGKILL)
    until(lambda: processes(node_dir).get("keeper", keeper) != keeper, "keeper")
    rank.close()


def test_notes_that_matter_reach_a_terminal(node_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The attendant has no terminal: a rank says it."""
    rank = line(node_dir)
    teller = Teller(node_dir)
    teller.tell(Note(what="saved", tier="local", step=1))
    teller.tell(Note(what="damaged", tier="peer", step=7, rank=3, why="a bit"))
    seen: list[str] = []

    def damaged() -> bool:
        seen.append(capfd.readouterr().err)
        return "damaged" in "".join(seen)

    until(damaged, "note")
    assert "keepstep: rank 3: step 7 damaged (peer tier): a bit" in "".join(seen)
    assert "saved" not in "".join(seen)
    teller.close()
    rank.close()


def test_memory_of_owners_that_were_killed_is_given_back(node_dir: Path) -> None:
    """Whoever comes next removes what nobody holds."""
    lost = node_dir.parent.parent / "old" / "n"
    lost.mkdir(parents=True)
    (lost / nodedir.OWNER).write_text("")
    os.utime(lost / nodedir.OWNER, (1, 1))
    rank = line(node_dir)
    until(lambda: not lost.exists(), "removal")
    rank.close()


def test_a_forked_child_does_not_keep_its_parent_alive(node_dir: Path) -> None:
    """Data workers inherit descriptors; the attendant must still see that the rank has gone."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from keepstep.trainer.attended import Attended; from keepstep.checkpoint.config import CheckpointConfig\n"
        "line = Attended(Path(sys.argv[1]), 0, host='127.0.0.1', linger_s=0.2, config=CheckpointConfig(job='j'))\n"
        "assert line.open() is None\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True); time.sleep(60)\n"
        "os._exit(0)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(node_dir)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        child.wait(LIMIT_S)
        until(lambda: not processes(node_dir), "end")
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.stdout.close()


def test_where_none_can_be_had_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is not the first waits, then goes on without; nothing is raised."""
    monkeypatch.setattr(module, "CONNECT_S", 0.1)
    nobody = Attended(tmp_path / "n", 1, host="127.0.0.1", linger_s=1.0)
    assert "no attendant could be had" in (nobody.open() or "")
    assert nobody.finish(0.1) is None
