"""What one world has saved another one restores: every bit of the gathered state, for any pair of layouts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint import generation
from keepstep.checkpoint.slot import Version
from tests.trainer.sdk.zygote import Zygote

SCRIPT = Path(__file__).with_name("world_script.py")
_numbers = itertools.count()


class Worlds:
    """Starts worlds below one directory."""

    def __init__(self, zygote: Zygote, root: Path) -> None:
        self._zygote, self.root = zygote, root

    def run(self, do: str, kind: str, world: int, **more: str) -> list[dict[str, Any]]:
        name = f"run{next(_numbers)}"
        children = []
        for rank in range(world):
            home = self.root / "memory" / name / str(rank)
            home.mkdir(parents=True)
            told = {
                "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD": str(world),
                "KIND": kind, "DO": do, "ROOT": str(self.root), "NAME": name, "NODE_DIR": str(home),
                "MEETING": str(self.root / f"{name}.meet"), **more,
            }  # fmt: skip
            err = self.root / f"{name}.{rank}.err"
            children.append(self._zygote.spawn(str(SCRIPT), told, str(self.root / f"{name}.{rank}.out"), str(err)))
        for rank, child in enumerate(children):
            assert child.wait(90) == 0, (self.root / f"{name}.{rank}.err").read_text()[-3000:]
        self.errors = "".join((self.root / f"{name}.{rank}.err").read_text() for rank in range(world))
        shutil.rmtree(self.root / "memory" / name)
        return [json.loads((self.root / f"{name}.{rank}").read_text()) for rank in range(world)]


@pytest.fixture
def worlds(zygote: Zygote, tmp_path: Path) -> Worlds:
    return Worlds(zygote, tmp_path)


def same(saved: list[dict[str, Any]], restored: list[dict[str, Any]], step: int) -> None:
    """The gathered state is the saved one, bit by bit, and every rank's own things are its own again."""
    for rank, got in enumerate(restored):
        assert "error" not in got, got["error"]
        before = saved[min(rank, len(saved) - 1)][str(step)]
        assert (got["step"], got["source"]) == (step, "saved")
        assert got["tensors"].keys() == before["tensors"].keys()
        for name, value in before["tensors"].items():
            assert got["tensors"][name] == value, name
        for key in ("buffers", "lr", "position", "schedule"):
            assert got[key] == before[key], key
        if rank < len(saved):
            assert got["random"] == before["random"]
    assert len({tuple(got["random"]) for got in restored}) == len(restored), "ranks draw different numbers"


@pytest.mark.parametrize(
    ("kind", "world", "then"),
    [
        ("fsdp", 2, [("fsdp", 1), ("fsdp", 3), ("fsdp", 4)]),
        ("ddp", 2, [("ddp", 3), ("fsdp", 2)]),
        ("hsdp", 4, [("tp", 2)]),
        ("plain", 1, [("hsdp", 2)]),
    ],
)
def test_any_world_goes_on_from_any_other(
    worlds: Worlds, tmp_path: Path, kind: str, world: int, then: list[tuple[str, int]]
) -> None:
    """Parameters and optimizer state of the whole, learning rates, scheduler and data position are equal; random states
    are the rank's own, or new ones for ranks that did not exist. And training goes on."""
    saved = worlds.run("save", kind, world, SHARED=str(tmp_path / "shared"))
    for other, size in then:
        restored = worlds.run("restore", other, size, SHARED=str(tmp_path / "shared"))
        same(saved, restored, 3)


def test_nodes_own_disks_are_put_together(worlds: Worlds, tmp_path: Path) -> None:
    """Each rank's node keeps its parts on its own disk and there is no shared tier: what only another node can read is
    handed out by it."""
    here = {"LOCAL": str(tmp_path / "disk-RANK")}
    saved = worlds.run("save", "ddp", 3, **here)
    same(saved, worlds.run("restore", "ddp", 3, **here), 3)
    shutil.rmtree(tmp_path / "disk-1")
    gone = worlds.run("restore", "ddp", 3, **here)
    assert [got["step"] for got in gone] == [None] * 3


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_damage_falls_to_the_next_holder_then_to_an_older_generation(worlds: Worlds, tmp_path: Path) -> None:
    """A shard that is damaged on the node's disk comes from the shared tier; damaged there, too, all ranks go on from
    the generation before; with none left, nothing is trained."""
    shared, local = tmp_path / "shared", tmp_path / "disk-RANK"
    both = {"SHARED": str(shared), "LOCAL": str(local)}
    saved = worlds.run("save", "fsdp", 2, **both)
    name = generation.payload_name(Version(3, 1), 1, "full")
    flip(tmp_path / "disk-1" / name)
    same(saved, worlds.run("restore", "fsdp", 2, **both), 3)
    assert "do not match their checksum" in worlds.errors
    flip(shared / name)
    same(saved, worlds.run("restore", "fsdp", 2, **both), 2)
    for step in (1, 2):
        flip(shared / generation.payload_name(Version(step, 1), 1, "full"))
        flip(tmp_path / "disk-1" / generation.payload_name(Version(step, 1), 1, "full"))
    lost = worlds.run("restore", "fsdp", 2, **both)
    assert all("CannotResume: no" in got["error"] for got in lost)


def test_what_does_not_fit_another_world_is_refused_by_name(worlds: Worlds, tmp_path: Path) -> None:
    """An object whose state differs from rank to rank and that cannot deal it anew: every rank says so."""
    shared = {"SHARED": str(tmp_path / "shared"), "ODD": "1"}
    saved = worlds.run("save", "fsdp", 2, **shared)
    same(saved, worlds.run("restore", "fsdp", 2, **shared), 3)
    refused = worlds.run("restore", "fsdp", 3, **shared)
    assert all("'odd' (PerRank) keeps a state of its own on each of 2 ranks" in got["error"] for got in refused)


def test_a_tier_that_cannot_be_read_is_no_reason_to_begin_anew(worlds: Worlds, tmp_path: Path) -> None:
    """Manifests that are there and damaged: going on from nothing would cost all that they stand for."""
    shared = {"SHARED": str(tmp_path / "shared")}
    worlds.run("save", "plain", 1, STEPS="1", **shared)
    flip(tmp_path / "shared" / generation.manifest_name(Version(1, 1)))
    (got,) = worlds.run("restore", "plain", 1, **shared)
    assert "cannot be used: step 1" in got["error"]
    assert "--no-resume" in got["error"]
