"""The process parent's own life: who may die, what it keeps, when it gives up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from shim_client import ShimClient

from keepstep.agent.shim import Shim


def gone(pid: int, within_s: float = 10.0) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], within_s)[0])
    finally:
        os.close(fd)


def sleeping(folder: Path) -> str:
    (folder / "sleep.py").write_text("import time\ntime.sleep(100)\n")
    return str(folder / "sleep.py")


def test_newer_agent_replaces_the_older_and_hears_what_it_missed(node_dir: Path, tmp_path: Path) -> None:
    """An exit between two agents is kept until somebody has acknowledged it."""
    shim = ShimClient(node_dir)
    pid = shim.spawn("a", sleeping(tmp_path))
    shim.sock.close()
    shim.lines.close()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    state = shim.connect()
    while not state["exits"]:
        state = shim.connect()
    assert [(e["id"], e["pid"], e["status"]) for e in state["exits"]] == [("a", pid, 9)]
    old = shim.sock
    state = shim.connect()
    assert [e["id"] for e in state["exits"]] == ["a"], "not acknowledged, so kept"
    assert old.recv(65536) == b"", "one agent at a time"
    old.close()
    shim.send(op="ack", pid=pid)
    assert shim.connect()["exits"] == []
    shim.close()


def test_asking_twice_starts_once(node_dir: Path, tmp_path: Path) -> None:
    """The second answer names the first process, even when it has ended meanwhile."""
    shim = ShimClient(node_dir)
    pid = shim.spawn("a", sleeping(tmp_path))
    assert shim.spawn("a", sleeping(tmp_path)) == pid
    os.kill(pid, signal.SIGKILL)
    shim.wait("exit", id="a")
    assert shim.spawn("a", sleeping(tmp_path)) == pid
    shim.close()


def test_killed_shim_leaves_its_programs_alone(node_dir: Path, tmp_path: Path) -> None:
    """kill -9 of the shim: programs live on, the fork server goes with it."""
    shim = ShimClient(node_dir)
    pid = shim.spawn("a", sleeping(tmp_path))
    children = [int(c) for c in Path(f"/proc/{shim.process.pid}/task/{shim.process.pid}/children").read_text().split()]
    shim.process.kill()
    shim.process.wait()
    assert all(gone(child) for child in children if child != pid)
    assert not gone(pid, 0.2)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)


def test_killed_fork_server_is_replaced(node_dir: Path, tmp_path: Path) -> None:
    """kill -9 of the zygote: the next program is forked from another one."""
    shim = ShimClient(node_dir)
    pid = shim.spawn("a", sleeping(tmp_path))
    children = [int(c) for c in Path(f"/proc/{shim.process.pid}/task/{shim.process.pid}/children").read_text().split()]
    [zygote] = [c for c in children if c != pid]
    os.kill(zygote, signal.SIGKILL)
    assert gone(zygote)
    assert shim.spawn("b", sleeping(tmp_path)) > 0
    assert not gone(pid, 0.1)
    shim.close()
    assert gone(pid)


def test_shim_without_agent_ends_everything(node_dir: Path, tmp_path: Path) -> None:
    """Nobody connected for the grace time: programs are ended, memory is given back, no orphan."""
    shim = ShimClient(node_dir, grace_s=0.5)
    pid = shim.spawn("a", sleeping(tmp_path))
    shim.sock.close()
    shim.lines.close()
    assert gone(pid)
    assert shim.process.wait(10) == 0
    assert not node_dir.exists()


LEAVING = """
import select, os, subprocess, sys
from pathlib import Path
from keepstep.agent.shim import Shim
shim = Shim(Path(sys.argv[1]), warm="none", orphan_grace_s=1)
shim._zygote_pid = subprocess.Popen(["sleep", "100"]).pid
lost = os.pidfd_open(subprocess.Popen(["sleep", "100"], start_new_session=True).pid)
shim._in_zygote["a"] = {"id": "a"}
shim._end_all()
print(bool(select.select([lost], [], [], 10)[0]))
"""


def test_program_that_was_forked_but_not_announced_does_not_outlive_the_shim(node_dir: Path) -> None:
    """The fork server is killed between its fork and its word: the child without a name goes as well."""
    done = subprocess.run([sys.executable, "-c", LEAVING, str(node_dir)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_ends_of_users_orphans_are_not_taken_for_those_of_later_programs(node_dir: Path) -> None:
    """Numbers of processes come again: a status without a program is kept only while programs are being born."""
    shim = Shim(node_dir, warm="none", orphan_grace_s=1)
    shim._in_zygote.update(a={"id": "a"}, b={"id": "b"})
    shim._strays[4711] = 0
    shim._from_zygote({"ev": "refused", "id": "a", "why": "memory"})
    assert shim._strays == {4711: 0}, "b may be 4711"
    shim._from_zygote({"ev": "spawned", "id": "b", "pid": 4712})
    assert shim._strays == {}


STALE = """
import os, pathlib, subprocess, sys
from keepstep.agent.shim import Shim

shim = Shim(pathlib.Path(sys.argv[1]), warm="none", orphan_grace_s=60)
child = subprocess.Popen(["true"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
shim._zygote_pid = child.pid
shim._reap()
signalled = []
os.kill = lambda pid, number: signalled.append(pid)
shim._end_all()
print(signalled)
"""


def test_number_of_a_collected_fork_server_is_not_signalled(tmp_path: Path) -> None:
    """Once it is collected its number may belong to anybody: the end of the shim leaves it alone, and number 0, too."""
    done = subprocess.run(
        [sys.executable, "-c", STALE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"
