"""A job that has ended, in whatever way, goes on from its newest durable checkpoint when it is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.acceptance.checks import WORLD, MakeCluster

from keepstep.checkpoint import catalog
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.cli import ckpt_place
from keepstep.cli.demo_watch import differences

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

LIMIT_S = 110.0
TOTAL = 300


def newest(place: Path) -> int:
    """Step of the newest complete generation; -1 for none."""
    if not place.is_dir():
        return -1
    found = catalog.newest(catalog.read(DirectoryTier(place)))
    return found.version.step if found else -1


def test_a_killed_job_goes_on_from_its_newest_checkpoint_with_the_same_losses(
    make_cluster: MakeCluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Everything of the job is killed in the middle, memory included; started again under another name it takes up the
    newest complete generation, and every later loss of every rank is that of the undisturbed run."""
    place = tmp_path / "ckpt"
    flags = ("--standbys", "0", "--ckpt-dir", str(place), "--ckpt-every", "20")
    first = make_cluster("first", args=("--steps", str(TOTAL), "--pace", "0.02"), nodes=1, nproc=WORLD, flags=flags)
    first.start()
    first.until(lambda: newest(place) >= 40, LIMIT_S, "two generations")
    first.lose_node("node-0")
    start = newest(place)
    assert 40 <= start < TOTAL
    again = make_cluster("again", args=("--steps", str(TOTAL)), nodes=1, nproc=WORLD, flags=flags)
    again.start()
    assert again.wait(LIMIT_S) == {"node-0": 0}, again.tail()
    lines = (again.run_dir / "steps" / "rank0.jsonl").read_text().splitlines()
    assert f'"step":{start}' in lines[0].replace(" ", "")
    found = differences(again.run_dir, undisturbed, world_size=WORLD, steps=range(start, TOTAL))
    assert not found, f"{len(found)} differ, first: {found[:3]}"
    assert newest(place) == TOTAL, "the last step is durable when the job has ended"
    assert ckpt_place.place("", "again", str(again.run_dir.parents[1])).tier.where == str(place)


def test_another_number_of_ranks_takes_up_the_same_state(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Two ranks of FSDP2 finish, three go on: what they gather before their first step is what the two had. Started
    once more there is nothing to do, and nothing is written again."""
    place, out = tmp_path / "ckpt", tmp_path / "out"
    for world, steps in ((2, 9), (3, 11)):
        cluster = make_cluster(
            f"of-{world}",
            script=Path(__file__).with_name("sharded_train.py"),
            args=("--steps", str(steps), "--out", str(out)),
            nodes=1,
            nproc=world,
            flags=("--standbys", "0", "--ckpt-dir", str(place), "--ckpt-every", "4"),
        )
        cluster.start()
        assert cluster.wait(LIMIT_S) == {"node-0": 0}, cluster.tail()
        assert newest(place) == steps
    assert {path.name for path in out.glob("*.3.0")} == {"9.3.0", "10.3.0", "11.3.0"}, "no step was done again"
    (two, three) = [{(out / f"9.{world}.{rank}").read_text() for rank in range(world)} for world in (2, 3)]
    assert len(two) == 1
    assert two == three
    before = manifest(place, 11)
    cluster = make_cluster(
        "over",
        script=Path(__file__).with_name("sharded_train.py"),
        args=("--steps", "11", "--out", str(out)),
        nodes=1,
        nproc=3,
        flags=("--standbys", "0", "--ckpt-dir", str(place), "--ckpt-every", "4"),
    )
    cluster.start()
    assert cluster.wait(LIMIT_S) == {"node-0": 0}, cluster.tail()
    assert manifest(place, 11) == before, "a job with nothing left to do wrote its checkpoint anew"


def manifest(place: Path, step: int) -> tuple[int, int]:
    """Which file it is, and since when."""
    (path,) = place.glob(f"step-{step:012d}.*/manifest.json")
    return path.stat().st_ino, path.stat().st_mtime_ns
