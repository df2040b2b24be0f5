"""``keepstep ckpt restore``, ``export``, ``import`` and ``gc`` when they fail, are ended or killed, or meet a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.checkpoint import durable_made as made
from tests.cli.test_ckpt import PLAIN, ask, flip, refuse, state

from keepstep.checkpoint import catalog, collect, generation, imported, lease
from keepstep.checkpoint.exceptions import CheckpointError, TierHeld
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.lease import LEASE, Claim, Lease
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.staging import STAGE, staged
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.cli import ckpt_hand
from keepstep.cli.main import main
from keepstep.ports.tier import Tier

V = Version(10, 1)
KILLED = "import os, signal; end = lambda *a, **k: os.kill(os.getpid(), signal.{number})"
RUN = "import sys; from keepstep.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Step 10 of two ranks."""
    tier = DirectoryTier(tmp_path / "ckpt", create=True)
    parts = []
    for rank in (0, 1):
        payload, entries = made.payload_of(state(rank))
        parts.append(made.write_part(tier, V, rank, payload, entries, world_size=2, plain=PLAIN, replicated=True))
    made.complete(tier, V, parts)
    return tmp_path / "ckpt"


def run(patch: str, *words: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which a patch ends somewhere."""
    argv = [sys.executable, "-c", f"{patch}; {RUN}", "ckpt", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def after_first_part(number: str) -> str:
    """A signal to itself when the second part is about to be written."""
    return (
        KILLED.format(number=number)
        + "; import keepstep.checkpoint.imported as m; w = m._write_part"
        + "; m._write_part = lambda tier, part, *a: (end() if part.rank else 0, w(tier, part, *a))"
    )


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def job_at_work(place: Path, job: str = "train") -> Lease:
    """What a job on another host that lives has written."""
    found = Lease(job=job, run="r", host="n7", place="another boot", pid=1, start="5", since_ns=1, at_ns=time.time_ns())
    place.mkdir(exist_ok=True)
    (place / LEASE).write_bytes(msgspec.json.encode(found))
    return found


def test_a_restore_that_fails_leaves_nothing(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    """The second rank's part is damaged: neither the first one's nor the folders stay; what was there before does."""
    flip(place, generation.payload_name(V, 1, "full"))
    assert "damaged" in refuse(capsys, "restore", place, "--to", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    refuse(capsys, "restore", place, "--to", tmp_path / "mine")
    assert everything(tmp_path / "mine") == {"notes.txt"}


def test_an_import_that_fails_leaves_what_was_there(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a place with checkpoints of its own nothing is lost, and nothing new is seen."""
    (tmp_path / "in").mkdir()
    save_file({"w": np.zeros(1000, dtype="float32")}, tmp_path / "in" / "model.safetensors")
    before = everything(place)

    def full(*args: object) -> None:
        raise CheckpointError("no room")

    into = ("import", tmp_path / "in", "--step", 7, "--format", "safetensors", "--to")
    with monkeypatch.context() as patch:
        patch.setattr("keepstep.checkpoint.imported.archive.complete", full)
        assert "no room" in refuse(capsys, *into, place)
        refuse(capsys, *into, tmp_path / "new")
    assert everything(place) == before
    assert not (tmp_path / "new").exists()
    ask(capsys, *into, place)
    assert [one["step"] for one in ask(capsys, "ls", place)["generations"]] == [10, 7]


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_restore_that_is_told_to_end_leaves_nothing(place: Path, tmp_path: Path, number: str, code: int) -> None:
    assert run(after_first_part(number), "restore", place, "--to", tmp_path / "to").returncode == code
    assert not (tmp_path / "to").exists()


def test_a_restore_that_was_killed_is_gone_on_with(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rerun says what it found, takes the first part as it is, and the result is whole and without leftovers."""
    assert run(after_first_part("SIGKILL"), "restore", place, "--to", tmp_path / "to").returncode == -signal.SIGKILL
    name = generation.payload_name(V, 0, "full")
    assert (tmp_path / "to" / name).exists()
    written: list[int] = []
    write = imported._write_part

    def counted(tier: Tier, part: Part, *more: Any) -> None:
        written.append(part.rank)
        write(tier, part, *more)

    monkeypatch.setattr(imported, "_write_part", counted)
    assert main(["ckpt", "restore", str(place), "--to", str(tmp_path / "to")]) == 0
    assert "what an interrupted restore or import of step 10 has left; going on" in capsys.readouterr().err
    assert written == [1]
    assert ask(capsys, "verify", tmp_path / "to")["sound"]
    left = {Path(path).name for path in everything(tmp_path / "to")}
    assert not left & {imported.NOTE, LEASE}
    assert not [path for path in left if path.startswith(".tmp~")]


def test_what_a_killed_restore_of_another_step_left_is_removed(place: Path, tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "to", create=True)
    tier.put(f"{generation.folder(Version(5, 1))}/{imported.NOTE}", [b"{}"])
    tier.put(generation.payload_name(Version(5, 1), 0, "full"), [b"half"])
    said: list[str] = []
    imported.copy(Reader([DirectoryTier(place)], V), tier, told=said.append)
    assert "step 5 has left; it is removed" in said[0]
    assert [one.version for one in catalog.read(tier)] == [V]


def test_somebody_elses_unfinished_step_is_not_touched(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
) -> None:
    """A job may have been killed while it wrote that very step."""
    tier = DirectoryTier(tmp_path / "to", create=True)
    tier.put(generation.payload_name(V, 0, "full"), [b"half"])
    assert "an unfinished step 10 that no restore" in refuse(capsys, "restore", place, "--to", tmp_path / "to")
    assert tier.get(generation.payload_name(V, 0, "full")) == b"half"


class TestExport:
    """Files appear together or not at all."""

    def test_killed_while_it_moves_its_files(
        self, capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
    ) -> None:
        """The worst moment: one file is in its place. The rerun removes it and makes all anew; others' files stay."""
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("{}")
        patch = KILLED.format(number="SIGKILL") + (
            "; import keepstep.checkpoint.staging as m; r = os.rename; m.os.rename = lambda a, b: (r(a, b), end())"
        )
        words = ("export", place, "--to", out, "--format", "safetensors")
        assert run(patch, *words).returncode == -signal.SIGKILL
        assert set(os.listdir(out)) == {"config.json", "model.safetensors", STAGE}
        assert main(["ckpt", *map(str, words)]) == 0
        assert "what an interrupted export has left; it is removed and made anew" in capsys.readouterr().err
        assert set(os.listdir(out)) == {"config.json", "model.safetensors", "optimizer.safetensors"}
        assert load_file(out / "model.safetensors")["w"].tobytes() == state(0)["p/model/w"].tobytes()

    def test_a_dcp_folder_that_was_left_is_made_anew(
        self, capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
    ) -> None:
        pytest.importorskip("torch")
        (tmp_path / "out" / STAGE / "files").mkdir(parents=True)
        (tmp_path / "out" / STAGE / "moved.json").write_text('["__0_0.distcp", ".metadata"]')
        (tmp_path / "out" / "__0_0.distcp").write_text("half")
        ask(capsys, "export", place, "--to", tmp_path / "out", "--format", "dcp")
        assert set(os.listdir(tmp_path / "out")) == {".metadata", "__0_0.distcp"}

    def test_told_to_end_it_leaves_nothing(self, place: Path, tmp_path: Path) -> None:
        patch = KILLED.format(number="SIGTERM") + "; import keepstep.checkpoint.staging as m; m._move = end"
        out = tmp_path / "a" / "out"
        assert run(patch, "export", place, "--to", out, "--format", "safetensors").returncode == 143
        assert not (tmp_path / "a").exists()

    def test_two_at_once_do_not_mix(self, capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
        with staged(tmp_path / "out") as files:
            (files / "mine").write_text("x")
            said = refuse(capsys, "export", place, "--to", tmp_path / "out", "--format", "safetensors")
            assert "another export is at work there" in said
        assert os.listdir(tmp_path / "out") == ["mine"]

    def test_a_name_that_is_taken_stays_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "b").write_text("old")

        def move_two() -> None:
            with staged(tmp_path) as files:
                (files / "a").write_text("new")
                (files / "b").write_text("new")

        with pytest.raises(CheckpointError, match="holds b already"):
            move_two()
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "old"}

    def test_to_a_file(self, capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        for words in (("export", "--format", "safetensors"), ("restore",)):
            said = refuse(capsys, words[0], place, *words[1:], "--to", tmp_path / "file")
            assert "cannot be made a folder: it is a file" in said
            said = refuse(capsys, words[0], place, *words[1:], "--to", tmp_path / "file" / "below")
            assert "cannot be made a folder" in said
        assert (tmp_path / "file").read_text() == "x"


class TestBesideAJob:
    """Who writes to a place is asked, and told."""

    def test_gc_import_and_restore_refuse(
        self, capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
    ) -> None:
        """Named with host and process, and the way out; nothing is touched. Looking is allowed."""
        (tmp_path / "in").mkdir()
        save_file({"w": np.zeros(10, dtype="float32")}, tmp_path / "in" / "model.safetensors")
        job_at_work(place)
        job_at_work(tmp_path / "other")
        before = everything(tmp_path)
        for words in (
            ("gc", place, "--keep", 1, "--yes"),
            ("import", tmp_path / "in", "--to", place, "--step", 5, "--format", "safetensors"),
            ("restore", place, "--to", tmp_path / "other"),
        ):
            said = refuse(capsys, *words)
            assert "is being written by job train (host n7, pid 1," in said
            assert "help: " in said
        assert everything(tmp_path) == before
        ask(capsys, "gc", place, "--keep", 1, "--dry-run")
        ask(capsys, "restore", place, "--to", tmp_path / "third")

    def test_a_job_that_starts_meanwhile_waits(
        self, capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While gc removes, the place is gc's: a job on another host would find its lease and leave it in peace."""
        tier, found = DirectoryTier(place), []
        remove = collect.collect

        def slow(*args: Any, **more: Any) -> Any:
            if not more.get("dry_run"):
                found.append(lease.read(tier))
            return remove(*args, **more)

        monkeypatch.setattr("keepstep.cli.ckpt_look.collect.collect", slow)
        ask(capsys, "gc", place, "--keep", 1, "--yes")
        assert lease.read(tier) is None, "released at the end"
        (there,) = found
        assert there.job == "keepstep ckpt gc"
        tier.put(LEASE, [msgspec.json.encode(msgspec.structs.replace(there, place="another boot"))])
        claim = Claim()
        claim.belongs("train", "r")
        with pytest.raises(TierHeld, match="by job keepstep ckpt gc"):
            claim.admit(tier)

    def test_the_claim_of_a_long_command_stays_fresh(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Renewed beside the work, so that it does not run out under it."""
        monkeypatch.setattr(lease, "CHECK_S", 0.01)
        monkeypatch.setattr(lease, "RENEW_S", 0.0)
        again = threading.Event()
        puts: list[str] = []

        class Listening(DirectoryTier):
            def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
                puts.append(name)
                if puts.count(LEASE) > 2:
                    again.set()
                return super().put(name, chunks)

        tier = Listening(tmp_path, create=True)
        with lease.held(tier, "long"):
            assert again.wait(10)
        assert lease.read(tier) is None

    def test_what_is_removed_while_it_is_read_is_said_so(
        self, capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not 'damaged': another one can be taken. Nothing is left of the copy or the export."""
        older = Version(5, 1)
        tier = DirectoryTier(place)
        payload, entries = made.payload_of(state(5))
        made.complete(tier, older, [made.write_part(tier, older, 0, payload, entries, plain=PLAIN)])
        pick = ckpt_hand.pick

        def and_then_it_goes(*args: Any, **more: Any) -> Any:
            found = pick(*args, **more)
            collect.remove(DirectoryTier(place), found.version)
            return found

        monkeypatch.setattr(ckpt_hand, "pick", and_then_it_goes)
        said = refuse(capsys, "restore", place, "--to", tmp_path / "to")
        assert f"step 10 was removed from {place} while it was read" in said
        assert "--step 5" in said
        said = refuse(capsys, "export", place, "--to", tmp_path / "to", "--format", "safetensors")
        assert "step 5 was removed" in said
        assert not (tmp_path / "to").exists()


def test_json_stays_clean(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    """Words for people go to stderr."""
    assert main(["ckpt", "restore", str(place), "--to", str(tmp_path / "to"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 10
