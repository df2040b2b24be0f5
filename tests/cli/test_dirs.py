"""Directories: what is ours, what is live, what is kept, and what is given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli import dirs
from keepstep.cli.errors import PreflightError

HOLDER = """
import sys
from pathlib import Path
from keepstep.cli import dirs
assert dirs.lock(Path(sys.argv[1])) is not None
print("held", flush=True)
sys.stdin.read()
"""


def hold_elsewhere(path: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the lock until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_directories_follow_flag_variable_and_default(tmp_path: Path) -> None:
    """Flag beats variable beats XDG beats home, as the protocol page says."""
    environ = {"KEEPSTEP_STATE_DIR": "/a", "XDG_STATE_HOME": "/x"}
    assert dirs.state_dir("/f", environ) == Path("/f")
    assert dirs.state_dir(None, environ) == Path("/a")
    assert dirs.state_dir(None, {"XDG_STATE_HOME": "/x"}) == Path("/x/keepstep")
    assert dirs.state_dir(None, {}) == Path.home() / ".local/state/keepstep"
    assert dirs.runtime_root({"KEEPSTEP_RUNTIME_DIR": "/r"}) == Path("/r")
    assert dirs.runtime_root({}) == Path(f"/dev/shm/keepstep-{os.getuid()}")


def test_socket_paths_stay_short() -> None:
    """A long job or node name is hashed; a root that is too long by itself is refused with the way out."""
    root = Path("/dev/shm/keepstep-1000")
    assert dirs.node_dir(root, "job", "node") == root / "job" / "node"
    long = dirs.node_dir(root, "j" * 64, "n" * 64)
    assert len(str(long / "keeper.sock")) <= dirs.MAX_SOCKET_PATH
    assert long != dirs.node_dir(root, "j" * 64, "m" * 64)
    with pytest.raises(PreflightError, match="too long"):
        dirs.node_dir(Path("/" + "x" * 100), "j", "n")


def test_a_killed_holder_is_not_live(tmp_path: Path) -> None:
    """A run is live exactly as long as a launcher's process lives, kill -9 included."""
    run_dir = dirs.make_run_dir(tmp_path, "job", "train")
    assert not dirs.is_live(run_dir)
    holder = hold_elsewhere(run_dir / dirs.NODES / "n.lock")
    try:
        assert dirs.is_live(run_dir)
        with pytest.raises(PreflightError, match="running here already"):
            dirs.make_run_dir(tmp_path, "job", "train")
    finally:
        holder.kill()
        holder.wait()
    assert not dirs.is_live(run_dir)


def test_a_run_of_the_same_name_is_set_aside_not_overwritten(tmp_path: Path) -> None:
    """Running a named job again keeps the log of the earlier run under another name."""
    first = dirs.make_run_dir(tmp_path, "job", "train")
    (first / "log.sqlite").write_bytes(b"old")
    second = dirs.make_run_dir(tmp_path, "job", "train")
    assert second == first
    assert not (second / "log.sqlite").exists()
    (kept,) = [run for run in dirs.all_runs(tmp_path) if run != second]
    assert (kept / "log.sqlite").read_bytes() == b"old"
    assert kept.name.startswith("job.")


def test_runs_without_a_name_never_collide(tmp_path: Path) -> None:
    """Ten starts within the same second get ten directories."""
    made = {dirs.make_run_dir(tmp_path, None, "train") for _ in range(10)}
    assert len(made) == 10


def test_old_runs_go_but_never_a_live_one(tmp_path: Path) -> None:
    """The newest stay; of the older ones only the live one stays."""
    made = [dirs.make_run_dir(tmp_path, f"job{n}", "t") for n in range(6)]
    for age, run_dir in enumerate(reversed(made)):
        born = run_dir / dirs.NODES / ".born"
        os.utime(born, (1e9 - age * 10, 1e9 - age * 10))
    holder = hold_elsewhere(made[0] / dirs.NODES / "n.lock")
    try:
        removed = dirs.remove_old_runs(tmp_path, keep=2)
    finally:
        holder.kill()
        holder.wait()
    assert {path.name for path in removed} == {"job1", "job2", "job3"}
    assert [path.name for path in dirs.all_runs(tmp_path)] == ["job5", "job4", "job0"]


def test_latest_follows_the_newest_and_survives_a_failed_start(tmp_path: Path) -> None:
    """The link is replaced in one step; when its run is undone it names the run before."""
    first, second = (dirs.make_run_dir(tmp_path, name, "t") for name in ("one", "two"))
    os.utime(first / dirs.NODES / ".born", (1e9, 1e9))
    dirs.point_latest(first)
    dirs.point_latest(second)
    assert (dirs.runs(tmp_path) / dirs.LATEST).resolve() == second
    second.rename(tmp_path / "gone")
    dirs.unpoint_latest(second)
    assert (dirs.runs(tmp_path) / dirs.LATEST).resolve() == first


def test_memory_of_killed_launchers_is_given_back(tmp_path: Path) -> None:
    """A node directory without a living owner is removed once it is old enough for its processes to be gone."""
    mine, lost = (dirs.node_dir(tmp_path, "job", name) for name in ("mine", "lost"))
    fd = dirs.make_node_dir(mine)
    os.close(dirs.make_node_dir(lost))
    (lost / "snap").mkdir()
    (lost / "snap" / "rank0.0").write_bytes(b"x" * 10)
    assert dirs.remove_lost_memory(tmp_path) == []
    assert dirs.remove_lost_memory(tmp_path, older_than_s=-1) == [lost]
    assert mine.exists()
    with pytest.raises(PreflightError, match="in use by another launcher"):
        dirs.make_node_dir(mine)
    os.close(fd)
    (mine / "old").write_bytes(b"x")
    os.close(dirs.make_node_dir(mine))
    assert not (mine / "old").exists()
    dirs.remove_node_dir(mine, tmp_path)
    assert not (tmp_path / "job").exists()


def test_memory_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Under any umask nobody else can enter what a start makes, and what somebody else has made is refused."""
    root = tmp_path / "root"
    before = os.umask(0)
    try:
        os.close(dirs.make_node_dir(dirs.node_dir(root, "job", "mine")))
    finally:
        os.umask(before)
    made = (root, root / "job", root / "job" / "mine")
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3
    if os.getuid() == 0:  # only root can give a directory away
        os.chown(root / "job", 12345, -1)
        with pytest.raises(PreflightError, match="belongs to another user"):
            dirs.make_node_dir(dirs.node_dir(root, "job", "mine"))
