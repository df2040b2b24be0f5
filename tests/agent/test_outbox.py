"""Facts on their way: numbered once, kept until acknowledged, across deaths of the agent and a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.agent import outbox as module
from keepstep.agent.outbox import Outbox
from keepstep.model.facts import AnyFact, RankStalled, StandbyGone
from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, SlotId


def gone(name: str) -> StandbyGone:
    return StandbyGone(job=JobId("j"), at=Nanos(1), node=NodeId("n"), slot=SlotId(name), why="x")


def stalled() -> RankStalled:
    fields = {"step": 1, "phase": "STEP", "started": 1, "finished": 0, "proc_state": "S", "busy": 0.0}
    return RankStalled(
        job=JobId("j"), at=Nanos(1), slot=SlotId("a"), rank=Rank(0), epoch=Epoch(1), idle_s=1.0, limit_s=1.0, **fields
    )  # type: ignore[arg-type]


def names(facts: tuple[AnyFact, ...]) -> list[tuple[int, str]]:
    return [(f.seq, f.slot) for f in facts]  # type: ignore[union-attr]


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    """What was not acknowledged comes again under its old number; new facts continue the count."""
    first = Outbox(tmp_path / "o" / "n")
    first.open()
    for name in "abc":
        first.add(gone(name))
    first.acked(1)
    second = Outbox(tmp_path / "o" / "n")
    second.open()
    second.welcome(1)
    assert names(second.pending()) == [(2, "b"), (3, "c")]
    second.add(gone("d"))
    assert names(second.pending())[-1] == (4, "d")


def test_an_empty_outbox_still_knows_its_number(tmp_path: Path) -> None:
    """Everything acknowledged and the file compacted: the count does not start at 1 again."""
    box = Outbox(tmp_path / "n")
    box.open()
    for i in range(5000):
        box.add(gone(f"slot{i}"))
    box.acked(5000)
    assert (tmp_path / "n").stat().st_size < 1000, "a file with nothing to say is rewritten"
    again = Outbox(tmp_path / "n")
    again.open()
    again.add(gone("x"))
    assert names(again.pending()) == [(5001, "x")]


def test_lost_file_is_healed_by_the_controllers_number(tmp_path: Path) -> None:
    """Numbers that the controller has folded already are not used a second time: its dedupe would drop the fact."""
    box = Outbox(tmp_path / "n")
    box.open()
    box.add(gone("a"))
    box.welcome(40)
    assert names(box.pending()) == [(41, "a")]
    again = Outbox(tmp_path / "n")
    again.open()
    assert names(again.pending()) == [(41, "a")]


def test_damaged_tail_is_cut_off(tmp_path: Path) -> None:
    """Half a frame (power cut) or garbage at the end: all whole facts before it survive."""
    for junk in (b"\x00\x00", b"\x00\x00\x00\x04abcd", b"\xff" * 64):
        path = tmp_path / f"n{len(junk)}"
        box = Outbox(path)
        box.open()
        box.add(gone("a"))
        box.close()
        path.write_bytes(path.read_bytes() + junk)
        again = Outbox(path, say=lambda text: None)
        again.open()
        again.add(gone("b"))
        last = Outbox(path)
        last.open()
        assert names(last.pending()) == [(1, "a"), (2, "b")]


def test_kill_9_loses_no_fact_that_was_added(tmp_path: Path) -> None:
    """A process adds and says so; killed at some instant, everything it had said is in the file."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_outbox import gone; from pathlib import Path\n"
        "from keepstep.agent.outbox import Outbox\n"
        "box = Outbox(Path(sys.argv[1])); box.open(); i = 0\n"
        "while True:\n    i += 1; box.add(gone(f's{i}')); print(i, flush=True)\n"
    )
    folder = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "n"), folder], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = 0
    for line in process.stdout:
        said = int(line)
        if said >= 500:
            process.kill()
            break
    said = max([said, *(int(rest) for rest in process.stdout.read().split("\n")[:-1] if rest)])
    process.wait()
    process.stdout.close()
    box = Outbox(tmp_path / "n")
    box.open()
    assert [f.seq for f in box.pending()][:said] == list(range(1, said + 1))


def test_unwritable_disk_keeps_facts_in_memory_and_says_so(tmp_path: Path) -> None:
    """No place to write: the controller still gets everything, and a person is told once."""
    (tmp_path / "file").write_text("")
    said: list[str] = []
    box = Outbox(tmp_path / "file" / "n", say=said.append)
    box.open()
    box.add(gone("a"))
    box.add(gone("b"))
    assert names(box.pending()) == [(1, "a"), (2, "b")]
    assert len(said) == 1
    assert "memory only" in said[0]


def test_file_limit_ends_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a named limit; beyond it facts are still delivered."""
    monkeypatch.setattr(module, "FILE_BYTES", 2000)
    said: list[str] = []
    box = Outbox(tmp_path / "n", say=said.append)
    box.open()
    for i in range(100):
        box.add(gone(f"s{i}"))
    assert len(box.pending()) == 100
    assert (tmp_path / "n").stat().st_size <= 2000
    assert len(said) == 1


def test_bound_drops_what_can_be_spared_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalls go before exits; beyond twice the bound everything goes; memory stays bounded."""
    monkeypatch.setattr(module, "KEPT_FACTS", 5)
    box = Outbox(tmp_path / "n", say=lambda text: None)
    box.open()
    for i in range(5):
        box.add(gone(f"s{i}"))
    assert box.add(stalled()) is None
    assert box.add(gone("important")) is not None
    for i in range(50):
        box.add(gone(f"t{i}"))
    assert len(box.pending()) == 10
