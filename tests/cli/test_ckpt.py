"""``keepstep ckpt``: what a person sees of checkpoints, sound and damaged, and every way out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.checkpoint import durable_made as made

from keepstep.checkpoint import archive, catalog, generation
from keepstep.checkpoint.exceptions import BaseDamaged, PayloadDamaged
from keepstep.checkpoint.saved import on_shared
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.cli.main import main
from keepstep.model import exits

PLAIN = msgspec.msgpack.encode(
    {"groups": {}, "values": {}, "others": {}, "random": None, "buckets": b"\x90",
     "owners": msgspec.msgpack.encode({"optimizer": [["model/w"]]})}
)  # fmt: skip


LONG = "/tmp/" + "x" * 300
"""Longer than a file system's names."""


def state(step: int) -> dict[str, np.ndarray]:
    luck = np.random.default_rng(step)
    return {
        "p/model/w": luck.standard_normal((6, 4), dtype="float32"),
        "o/optimizer/0/0/exp_avg": luck.standard_normal((6, 4), dtype="float32"),
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Steps 10 (in full), 20 and 30 (differences), all complete, and step 40 that lacks its manifest."""
    tier = DirectoryTier(tmp_path / "ckpt", create=True)
    before: tuple[Version, bytes] | None = None
    for step in (10, 20, 30, 40):
        payload, entries = made.payload_of(state(step))
        part = made.write_part(tier, Version(step, 1), 0, payload, entries, base=before, plain=PLAIN)
        if step != 40:
            made.complete(tier, Version(step, 1), [part])
        before = Version(step, 1), payload
    return tmp_path / "ckpt"


def flip(place: Path, name: str) -> None:
    data = bytearray((place / name).read_bytes())
    data[-3] ^= 16
    (place / name).write_bytes(data)


def ask(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert main(["ckpt", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refuse(capsys: pytest.CaptureFixture[str], *words: object, code: int = 1) -> str:
    assert main(["ckpt", *map(str, words)]) == code
    return capsys.readouterr().err


def test_ls_tells_what_there_is(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    found = ask(capsys, "ls", place)
    assert [(one["step"], one["state"]) for one in found["generations"]] == [
        (40, "parts"), (30, "complete"), (20, "complete"), (10, "complete"),
    ]  # fmt: skip
    assert [one["bases"] for one in found["generations"]] == [[], [20], [10], []]
    assert main(["ckpt", "ls", str(place)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("STEP\tSTATE\tAGE")


def test_show_lists_parts_and_tensors(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    """The newest complete one where no step is named."""
    found = ask(capsys, "show", place)
    assert (found["step"], found["parts"][0]["kind"], found["parts"][0]["base"]) == (30, "delta", 20)
    found = ask(capsys, "show", place, "--step", 10, "--tensors")
    assert found["tensors"][0]["name"] == "p/model/w"
    assert found["tensors"][0]["shape"] == [6, 4]


def test_verify_reads_all_that_a_checkpoint_rests_on(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    found = ask(capsys, "verify", place, "--write")
    assert found["sound"]
    assert [one["step"] for one in found["generations"]] == [30, 20, 10]
    assert (place / generation.verified_name(Version(30, 1))).exists()
    assert [one["state"] for one in ask(capsys, "ls", place)["generations"]][1:] == ["verified"] * 3


def test_verify_names_the_damaged_shard_and_the_way_out(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    """A flipped bit in the middle of the chain: exit code 1, the file, the bytes, and the next older step."""
    flip(place, generation.payload_name(Version(20, 1), 0, "delta"))
    assert main(["ckpt", "verify", str(place), "--json"]) == 1
    out = capsys.readouterr()
    found = {one["step"]: one for one in json.loads(out.out)["generations"]}
    assert [found[step]["sound"] for step in (30, 20, 10)] == [True, False, True]
    assert "rank00000.delta: bytes 0 to" in found[20]["why"]
    assert "the next older complete one is --step 10" in out.err


def test_what_verify_found_is_remembered_by_all(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
) -> None:
    """Marked with ``--write``: ls and show say so, a restore passes over it and what rests on it, and gc keeps the last
    good one; read again and sound, it counts again."""
    name = generation.payload_name(Version(20, 1), 0, "delta")
    flip(place, name)
    ask(capsys, "verify", place, "--write", code=1)
    rows = {one["step"]: one for one in ask(capsys, "ls", place)["generations"]}
    assert [rows[step]["state"] for step in (40, 30, 20, 10)] == ["parts", "damaged", "damaged", "verified"]
    assert "rank00000.delta: bytes 0 to" in rows[20]["why"]
    assert "rests on step 20" in rows[30]["why"]
    assert ask(capsys, "show", place, "--step", 20)["state"] == "damaged"
    seen, lost = on_shared(DirectoryTier(place))
    assert [one.step for one in seen] == [10], "nor does a run go on from it"
    assert "step 20: damaged: " in " ".join(lost)
    assert ask(capsys, "restore", place, "--to", tmp_path / "full")["step"] == 10
    assert main(["ckpt", "restore", str(place), "--to", str(tmp_path / "other")]) == 0
    assert "step 30 is passed over: rests on step 20" in capsys.readouterr().err
    assert "step 20 in" in refuse(capsys, "restore", place, "--to", tmp_path / "x", "--step", 20)
    ask(capsys, "gc", place, "--keep", 1, "--yes")
    assert 10 in [one["step"] for one in ask(capsys, "ls", place)["generations"] if one["complete"]]
    flip(place, name)
    assert ask(capsys, "verify", place, "--step", 30, "--write")["sound"]
    assert [one["step"] for one in ask(capsys, "ls", place)["generations"] if one["complete"]] == [30, 20, 10]


def test_a_part_that_is_written_anew_is_not_the_damaged_one(place: Path) -> None:
    """A mark is about the very bytes that the manifest named, never about the step."""
    tier = DirectoryTier(place)
    flip(place, generation.payload_name(Version(10, 1), 0, "full"))
    with pytest.raises(PayloadDamaged):
        archive.verify(tier, Version(10, 1))
    assert catalog.look(tier, Version(30, 1)).damaged
    with pytest.raises(PayloadDamaged, match="damaged: "):
        archive.complete(tier, Version(10, 1), 1)
    with pytest.raises(BaseDamaged, match="rests on step 10"):
        archive.complete(tier, Version(20, 1), 1)
    payload, entries = made.payload_of(state(11))
    made.complete(tier, Version(10, 1), [made.write_part(tier, Version(10, 1), 0, payload, entries, plain=PLAIN)])
    assert catalog.look(tier, Version(10, 1)).complete
    archive.complete(tier, Version(10, 1), 1)
    assert not (place / generation.damaged_name(Version(10, 1))).exists()


def test_a_chain_of_two_thousand_is_judged_in_one_go() -> None:
    """Neither recursion nor a second look at any of them; what is broken at the bottom is said in one sentence."""
    asked: list[str] = []

    class Counting(MemoryTier):
        def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
            asked.append(name)
            return super().get(name, start, length)

        def names(self, prefix: str = "") -> Iterator[str]:
            return iter([f"{prefix}{tail}" for tail in ("manifest.json", "rank00000.delta", "rank00000.json")])

    tier, length = Counting(), 2000
    for step in range(1, length + 1):
        bases = (Version(step - 1, 1),) if step > 1 else ()
        ref = generation.PartRef(rank=0, sum=1, size=1, bytes=1)
        manifest = generation.Manifest(
            job="j", version=Version(step, 1), world_size=1, created_ns=1, parts=(ref,), bases=bases
        )
        tier.objects[generation.manifest_name(Version(step, 1))] = generation.seal(manifest)
    assert catalog.look(tier, Version(length, 1)).complete
    assert len(asked) == length
    tier.remove(generation.manifest_name(Version(1, 1)))
    assert catalog.look(tier, Version(length, 1)).why.startswith(
        "rests on step 1999, which in the end rests on step 1,"
    )


def test_restore_writes_the_end_of_a_chain_in_full(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
) -> None:
    done = ask(capsys, "restore", place, "--to", tmp_path / "full")
    assert done["step"] == 30
    file = tmp_path / "full" / generation.payload_name(Version(30, 1), 0, "full")
    assert load_file(file)["p/model/w"].tobytes() == state(30)["p/model/w"].tobytes()
    assert [one["state"] for one in ask(capsys, "ls", tmp_path / "full")["generations"]] == ["verified"]


def test_export_and_import_safetensors(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    """Out and in again without torch: the same bits, under the user's names."""
    ask(capsys, "export", place, "--to", tmp_path / "out", "--format", "safetensors", "--step", 20)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tobytes() == state(20)["p/model/w"].tobytes()
    optimizer = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert optimizer["w.exp_avg"].tobytes() == state(20)["o/optimizer/0/0/exp_avg"].tobytes()
    (tmp_path / "in").mkdir()
    save_file({"w": state(5)["p/model/w"]}, tmp_path / "in" / "model.safetensors")
    save_file({"w.exp_avg": state(5)["o/optimizer/0/0/exp_avg"]}, tmp_path / "in" / "optimizer.safetensors")
    ask(capsys, "import", tmp_path / "in", "--to", tmp_path / "new", "--step", 500, "--format", "safetensors")
    names = [one["name"] for one in ask(capsys, "show", tmp_path / "new", "--tensors")["tensors"]]
    assert names == ["p/model/w"], "a moment is no weight"
    (there,) = ask(capsys, "ls", tmp_path / "new")["generations"]
    assert (there["step"], there["state"], there["world_size"]) == (500, "verified", 1)


def test_export_and_import_dcp(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ask(capsys, "export", place, "--to", tmp_path / "dcp", "--format", "dcp")
    into = ("import", tmp_path / "dcp", "--to", tmp_path / "new", "--step", 30, "--format", "dcp")
    assert "under 'net' but model, optimizer; say --model NAME" in refuse(capsys, *into, "--model", "net")
    ask(capsys, *into)
    ask(capsys, "export", tmp_path / "new", "--to", tmp_path / "out", "--format", "safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tobytes() == state(30)["p/model/w"].tobytes()


def test_a_damaged_export_names_the_next_older_one(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path
) -> None:
    flip(place, generation.payload_name(Version(30, 1), 0, "delta"))
    said = refuse(capsys, "export", place, "--to", tmp_path / "out", "--format", "safetensors")
    assert "error: damaged: " in said
    assert "rank00000.delta" in said
    assert "help: the next older complete one is --step 20" in said
    assert not (tmp_path / "out").exists(), "nothing that looks whole is left behind"


def test_gc_keeps_what_was_asked_and_what_that_rests_on(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    """Without a terminal nobody can be asked; the newest stays with its whole chain."""
    assert "--yes" in refuse(capsys, "gc", gc_place(place), "--keep", 1, code=exits.BAD_USAGE)
    found = ask(capsys, "gc", gc_place(place), "--keep", 1, "--dry-run")
    assert (found["done"], found["removed"]) == (False, [5])
    found = ask(capsys, "gc", gc_place(place), "--keep", 1, "--yes")
    assert found["done"]
    assert [one["step"] for one in ask(capsys, "ls", place)["generations"] if one["complete"]] == [30, 20, 10]


def gc_place(place: Path) -> Path:
    """With one more generation, on which nothing rests."""
    tier = DirectoryTier(place)
    if not (place / generation.manifest_name(Version(5, 1))).exists():
        payload, entries = made.payload_of(state(5))
        made.complete(tier, Version(5, 1), [made.write_part(tier, Version(5, 1), 0, payload, entries)])
    return place


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["ls"], exits.BAD_USAGE, "a path or URL, or --job NAME"),
        (["ls", "/nowhere/at/all"], 1, "there is no such directory"),
        (["ls", "ftp://host/x"], 1, "ftp:// is not a place for checkpoints"),
        (["show", "PLACE", "--step", "21"], 1, "the nearest is --step 20"),
        (["show", "PLACE", "--step", "40"], 1, "unfinished: has no manifest"),
        (["show", "EMPTY"], 1, "there are no checkpoints in"),
        (["gc", "PLACE"], exits.BAD_USAGE, "say what to keep"),
        (["gc", "PLACE", "--keep-for", "soon"], exits.BAD_USAGE, "--keep-for 'soon' is not a duration"),
        (["gc", "PLACE", "--keep-for", "0", "--yes"], exits.BAD_USAGE, "--keep-for '0' must be above 0"),
        (["gc", "PLACE", "--keep", "0", "--yes"], exits.BAD_USAGE, "--keep 0 must be 1 or more"),
        (["gc", "PLACE", "--keep-every=-2", "--yes"], exits.BAD_USAGE, "--keep-every -2 must be 0 or more"),
        (["export", "PLACE", "--to", "s3://b/x", "--format", "dcp"], exits.BAD_USAGE, "on a file system"),
        (["export", "PLACE", "--to", "PLACE", "--format", "dcp"], 1, "holds checkpoints of keepstep"),
        (["export", "PLACE", "--to", "FULL", "--format", "dcp"], 1, "is not empty"),
        (["export", "PLACE", "--to", LONG, "--format", "safetensors"], 1, "File name too long"),
        (["restore", "PLACE", "--to", LONG], 1, "File name too long"),
        (["restore", "PLACE", "--to", "PLACE"], 1, "holds step 30 already"),
        (["restore", "PLACE", "--to", ""], exits.BAD_USAGE, "--to is empty"),
        (["import", LONG, "--to", "EMPTY", "--step", "1", "--format", "safetensors"], 1, "no such folder"),
        (["import", LONG, "--to", "EMPTY", "--step", "1", "--format", "dcp"], 1, "is no DCP folder"),
        (["import", "FULL", "--to", "EMPTY", "--step", "1", "--format", "safetensors"], 1, "one such file"),
        (["import", "FULL/a.txt", "--to", "EMPTY", "--step", "1", "--format", "safetensors"], 1, "not a safetensors"),
        (["ls", "FULL/a.txt"], 1, "a.txt is a file"),
        (["ls", "PLACE", "--job", "lm"], exits.BAD_USAGE, "name two places"),
        (["gc", "EMPTY", "--keep", "1", "-y"], 0, "there are no checkpoints in"),
        (["export", "PLACE", "--to", "x", "--format", "zip"], exits.BAD_USAGE, "zip"),
        (["import", "EMPTY", "--to", "EMPTY", "--step", "1", "--format", "safetensors"], 1, "holds no *.safetensors"),
        (["import", "/nowhere", "--to", "EMPTY", "--step", "1", "--format", "safetensors"], 1, "no such folder"),
        (["import", "EMPTY", "--to", "EMPTY", "--step", "-1", "--format", "dcp"], exits.BAD_USAGE, "0 or more"),
        (["ls", "--job", "no-such-job", "--state-dir", "EMPTY"], 1, "no run"),
    ],
)
def test_mistakes_are_answered_with_the_way_out(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    names = {"PLACE": place, "EMPTY": tmp_path / "empty", "FULL": tmp_path / "full"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("no checkpoint of any kind")
    told = words
    for name, path in names.items():
        told = [word.replace(name, str(path)) for word in told]
    said = refuse(capsys, *told, code=code)
    assert says in said
    assert "Traceback" not in said


def test_a_newer_format_says_to_update(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    for step in (10, 20, 30):
        name = generation.manifest_name(Version(step, 1))
        manifest = generation.unseal((place / name).read_bytes(), generation.Manifest, name)
        newer = msgspec.structs.replace(manifest, format=generation.FORMAT + 1)
        (place / name).write_bytes(generation.seal(newer))
    assert "this keepstep reads up to" in refuse(capsys, "verify", place)


def test_without_torch_everything_but_dcp_works(
    capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("keepstep.trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    ask(capsys, "export", place, "--to", tmp_path / "out", "--format", "safetensors")
    said = refuse(capsys, "export", place, "--to", tmp_path / "dcp", "--format", "dcp")
    assert "--format dcp needs torch" in said


def test_a_job_is_found_by_its_name(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    """Where a run on this machine keeps its checkpoints is told by what its launcher told the agent."""
    nodes = tmp_path / "state" / "runs" / "lm-7" / "nodes"
    nodes.mkdir(parents=True)
    (nodes / "n.json").write_text(json.dumps({"node_dir": "x", "spec": {"ckpt": {"dir": str(place)}}}))
    found = ask(capsys, "ls", "--job", "lm", "--state-dir", tmp_path / "state")
    assert found["where"] == str(place)
