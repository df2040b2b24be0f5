"""Ranks on a terminal: prefix, folding, positions across restarts, and a reader who does not read."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from keepstep.agent.config import Output
from keepstep.agent.console import Console
from keepstep.agent.slots import Slot
from keepstep.model.ids import Rank, SlotId


def slot(folder: Path, rank: int | None, name: str | None = None) -> Slot:
    name = name or f"r{rank}"
    worker = Slot(
        id=SlotId(name),
        role="worker" if rank is not None else "standby",
        rank=Rank(rank) if rank is not None else None,
        local_rank=rank or 0,
        out=str(folder / f"{name}.out"),
        err=str(folder / f"{name}.err"),
    )
    for path in (worker.out, worker.err):
        Path(path).touch()
    return worker


def shown(console: Console, capsys: pytest.CaptureFixture[str]) -> list[str]:
    console.close(5)
    return capsys.readouterr().out.splitlines()


def test_equal_lines_fold_and_others_name_their_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for four equal ones; a rank that differs, and one that says it twice, are shown by name."""
    console = Console("n0", Output(log_dir=""), tmp_path)
    slots = [slot(tmp_path, rank) for rank in range(4)]
    for each in slots:
        console.follow(each)
        Path(each.out).write_text("epoch 1\n")
    with open(slots[2].out, "a") as file:
        file.write("loss nan\nno newline at the end")
    console.start()
    lines = shown(console, capsys)
    assert sorted(lines) == ["n0:[r0-3] epoch 1", "n0:r002 loss nan", "n0:r002 no newline at the end"]


def test_order_of_a_ranks_lines_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words twice from one rank are two lines, in order."""
    console = Console("n0", Output(log_dir=""), tmp_path)
    one = slot(tmp_path, 0)
    console.follow(one)
    Path(one.out).write_text("a\nb\na\n10%\r20%\r30%\n")
    console.start()
    assert shown(console, capsys) == ["n0:r000 a", "n0:r000 b", "n0:r000 a", "n0:r000 30%"]


def test_console_setting_and_filter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 nothing, 1 stdout, 2 stderr; the filter of local ranks comes first."""
    output = Output(log_dir="", console={"*": 1, "1": 2, "2": 0}, local_ranks_filter=(0, 1, 2))
    console = Console("n0", output, tmp_path)
    for rank in range(4):
        each = slot(tmp_path, rank)
        console.follow(each)
        Path(each.out).write_text(f"out {rank}\n")
        Path(each.err).write_text(f"err {rank}\n")
    console.start()
    console.close(5)
    captured = capsys.readouterr()
    assert captured.out == "n0:r000 out 0\n"
    assert captured.err == "n0:r001 err 1\n"


def test_next_agent_goes_on_where_the_last_one_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is shown twice, and what was written while nobody looked is shown."""
    one = slot(tmp_path, 0)
    first = Console("n0", Output(log_dir=""), tmp_path)
    first.follow(one)
    Path(one.out).write_text("before\n")
    first.start()
    assert shown(first, capsys) == ["n0:r000 before"]
    with open(one.out, "a") as file:
        file.write("meanwhile\n")
    second = Console("n0", Output(log_dir=""), tmp_path)
    second.follow(one)
    second.start()
    assert shown(second, capsys) == ["n0:r000 meanwhile"]


def test_next_agent_shows_what_a_silent_rank_said_between_the_agents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that had said nothing while the first agent lived says its first word while there is none."""
    one = slot(tmp_path, 0)
    first = Console("n0", Output(log_dir=""), tmp_path)
    first.follow(one)
    first.start()
    assert shown(first, capsys) == []
    Path(one.out).write_text("done\n")
    second = Console("n0", Output(log_dir=""), tmp_path)
    second.follow(one)
    second.start()
    assert shown(second, capsys) == ["n0:r000 done"]


def test_standby_is_silent_until_it_has_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its start-up messages would only repeat everybody's; they are in its file."""
    standby = slot(tmp_path, None, "s0")
    console = Console("n0", Output(log_dir=""), tmp_path)
    console.follow(standby)
    Path(standby.out).write_text("loading\n")
    standby.role, standby.rank = "worker", Rank(3)
    console.follow(standby)
    with open(standby.out, "a") as file:
        file.write("step 7\n")
    console.start()
    assert shown(console, capsys) == ["n0:r003 step 7"]


def test_a_reader_who_does_not_read_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal's pipe is full: follow, finish and close return; only the console's own thread waits."""
    reader, writer = os.pipe()
    blocked = io.TextIOWrapper(open(writer, "wb", buffering=0), write_through=True)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", blocked)
    one = slot(tmp_path, 0)
    console = Console("n0", Output(log_dir=""), tmp_path)
    console.follow(one)
    Path(one.out).write_text("".join(f"{i} {'x' * 1000}\n" for i in range(1000)))
    console.start()
    before = time.monotonic()
    console.follow(slot(tmp_path, 1))
    console.finish("r0")
    console.close(0.3)
    assert time.monotonic() - before < 2
    assert console.is_alive(), "it really was blocked"
    drain = threading.Thread(target=lambda: all(iter(lambda: os.read(reader, 65536), b"")), daemon=True)
    drain.start()
    console.join(10)
    assert not console.is_alive()
    blocked.close()
    drain.join(5)
    os.close(reader)


def test_closed_terminal_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever read us is gone (EPIPE): files go on, the agent lives."""
    reader, writer = os.pipe()
    os.close(reader)
    broken = io.TextIOWrapper(open(writer, "wb", buffering=0), write_through=True)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", broken)
    one = slot(tmp_path, 0)
    console = Console("n0", Output(log_dir=""), tmp_path)
    console.follow(one)
    Path(one.out).write_text("a\nb\n")
    console.start()
    console.close(5)
    assert not console.is_alive()
