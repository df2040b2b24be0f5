"""The slot table on disk, the environment of workers, and what /proc tells."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from agent_rig import JOB, roster_of

from keepstep.agent import environ, proc
from keepstep.agent.config import AgentConfig, Output, Program
from keepstep.agent.exceptions import BadConfig
from keepstep.agent.main import load_config
from keepstep.agent.slots import KEPT_ACTIONS, Slot, Table
from keepstep.model.ids import ActionId, SlotId
from keepstep.model.topology import JobSpec

OMP = "OMP_NUM_THREADS"


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """Slots, done orders, names, settings: all of it is on disk when the call returns."""
    table = Table(tmp_path)
    assert table.load() is False
    name = table.new_name("s")
    table.add(Slot(id=name, role="standby", out="o", err="e", pid=5, start=7))
    table.remember(ActionId("a"), "")
    table.wanted_standbys = 2
    table.peer_port = 99
    again = Table(tmp_path)
    assert again.load() is True
    assert again.get(name) == table.get(name)
    assert (again.outcome(ActionId("a")), again.outcome(ActionId("b"))) == ("", None)
    assert (again.wanted_standbys, again.peer_port) == (2, 99)
    assert again.new_name("s") != name


def test_ended_slots_are_never_used_again(tmp_path: Path) -> None:
    """Removed is remembered; forgotten (never started) is not."""
    table = Table(tmp_path)
    for name in ("a", "b"):
        table.add(Slot(id=SlotId(name), role="worker", out="", err=""))
    table.remove(SlotId("a"))
    table.forget(SlotId("b"))
    assert (table.has_ended(SlotId("a")), table.has_ended(SlotId("b"))) == (True, False)
    assert (table.end_of(SlotId("a")), table.end_of(SlotId("b"))) == (0, None)


def test_memory_of_orders_is_bounded(tmp_path: Path) -> None:
    """The oldest are forgotten first."""
    table = Table(tmp_path)
    for i in range(KEPT_ACTIONS + 5):
        table.remember(ActionId(str(i)), "")
    assert table.outcome(ActionId("4")) is None
    assert table.outcome(ActionId("5")) == ""


def test_foreign_table_is_refused(tmp_path: Path) -> None:
    """A file of another version is named, not guessed at."""
    (tmp_path / "slots.json").write_text('{"slots": 3}')
    with pytest.raises(BadConfig, match=r"slots\.json"):
        Table(tmp_path).load()


def test_start_time_tells_processes_apart() -> None:
    """A pid alone is not an identity."""
    process = subprocess.Popen(["sleep", "30"])
    now = proc.stat(process.pid)
    assert now is not None
    assert now.parent == os.getpid()
    assert proc.is_alive(process.pid, now.start)
    assert not proc.is_alive(process.pid, now.start + 1)
    assert not proc.send_signal(process.pid, now.start + 1, 9)
    assert proc.send_signal(process.pid, now.start, 9)
    assert proc.split_status(os.waitpid(process.pid, 0)[1]) == (None, 9)
    process.returncode = -9
    assert not proc.is_alive(process.pid, now.start)


def config(tmp_path: Path, **more: object) -> AgentConfig:
    fields: dict[str, object] = {
        "spec": JobSpec(job=JOB, min_nodes=1, max_nodes=2, nproc_per_node=1),
        "program": Program(kind="script", target="t.py"),
        "output": Output(log_dir="l"),
        "node": "b",
        "host": "h",
        "run_dir": str(tmp_path),
        "node_dir": str(tmp_path),
        "controller_host": "c",
        "controller_port": 1,
        "launcher_pid": 0,
    }
    return AgentConfig(**{**fields, **more})  # type: ignore[arg-type]


def test_group_ranks_follow_the_lowest_rank(tmp_path: Path) -> None:
    """Nodes are numbered as torchrun does, whatever the order of the roster's members."""
    roster = roster_of("a", "b", per_node=2)
    roster = msgspec.structs.replace(roster, members=roster.members[::-1])
    seat = roster.seat_of(2)
    assert seat is not None
    env = environ.worker_env(config(tmp_path), {"RANK": "9", "PATH": "p"}, roster, seat, "")
    assert (env["RANK"], env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["LOCAL_RANK"]) == ("2", "1", "2", "0")
    assert env["PATH"] == "p"


def test_standby_that_takes_a_seat_sees_what_a_process_started_for_it_would(tmp_path: Path) -> None:
    """The same variables with the same values, whatever the order of members and places in the roster."""
    from keepstep.trainer.join_torch import environment

    roster = roster_of("a", "b", per_node=2)
    roster = msgspec.structs.replace(roster, members=roster.members[::-1], places=roster.places[::-1])
    for seat in roster.members:
        cold = environ.worker_env(config(tmp_path), {}, roster, seat, "")
        warm = environment(roster, seat)
        assert warm == {name: cold[name] for name in warm}


def test_standby_inherits_no_rank(tmp_path: Path) -> None:
    """A launcher under Slurm or torchrun may have one; a standby must not take it for its own."""
    env = environ.standby_env(config(tmp_path), {"RANK": "9", "LOCAL_RANK": "1", "MASTER_PORT": "1"}, SlotId("s0"))
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT"} & set(env)
    assert env["KEEPSTEP_ROLE"] == "standby"


@pytest.mark.parametrize(
    ("nproc", "own", "base", "threads"),
    [
        (1, {}, {}, None),
        (2, {}, {}, "1"),
        (2, {}, {"OMP_NUM_THREADS": "4"}, "4"),
        (2, {"OMP_NUM_THREADS": "3"}, {}, "3"),
    ],
)
def test_omp_rule_is_torchruns(
    tmp_path: Path, nproc: int, own: dict[str, str], base: dict[str, str], threads: str | None
) -> None:
    """One thread each when several processes share a node and nobody said otherwise."""
    spec = JobSpec(job=JOB, min_nodes=1, max_nodes=1, nproc_per_node=nproc)
    assert environ.omp_threads(config(tmp_path, spec=spec, env=own), base) == threads


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "JSON"), ("{}", "missing required field"), ('{"nod": 1}', "nod"), (None, "No such file")],
)
def test_bad_configuration_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    """One sentence with the file and the field."""
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadConfig) as caught:
        load_config(path)
    assert "c.json" in str(caught.value)
    assert words in str(caught.value) or "truncated" in str(caught.value)


def test_too_long_a_directory_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Unix socket paths end at 107 bytes; better said now than by a strange error later."""
    path = tmp_path / "c.json"
    path.write_bytes(msgspec.json.encode(config(tmp_path, node_dir="/dev/shm/" + "x" * 100)))
    with pytest.raises(BadConfig, match="KEEPSTEP_RUNTIME_DIR"):
        load_config(path)
