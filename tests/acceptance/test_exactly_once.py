"""Ranks are killed again and again, and every kind of data still uses every sample exactly once in each pass."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.acceptance.checks import MakeCluster, assert_log_folds_to_one_state

pytest.importorskip("torchdata", reason="torchdata is not installed")

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
WORLD, BATCH, SAMPLES, SHARDS = 3, 3, 310, 12
STEPS = 150
KILLS = ((1, 12), (0, 40), (2, 75))
"""(rank, the step behind which it is killed)"""
START_LIMIT_S = 90.0
STEP_LIMIT_S = 60.0


def test_killed_ranks_leave_no_sample_out_and_use_none_twice(tmp_path: Path, make_cluster: MakeCluster) -> None:
    """Three kills; survivors are rolled back in place with their iterators and prefetching workers, the killed ranks
    come back as other processes. Over all committed steps each pass has each sample once."""
    out = tmp_path / "used"
    out.mkdir()
    cluster = make_cluster(
        script=HERE / "exact_train.py", args=("--steps", str(STEPS), "--pace", "0.03", "--out", str(out)),
        nodes=1, nproc=WORLD, flags=("--standbys", "1"),
    )  # fmt: skip
    cluster.start()
    cluster.until(cluster.watch.settled, START_LIMIT_S, "the job to start")
    for rank, behind in KILLS:
        cluster.until(cluster.watch.settled, STEP_LIMIT_S, "calm")
        cluster.until(lambda: cluster.watch.standbys_on("node-0") == 1, STEP_LIMIT_S, "a standby")
        cluster.until(lambda behind=behind: cluster.floor() > behind, STEP_LIMIT_S, f"step {behind}")  # type: ignore[misc]
        (victim,) = [s["pid"] for s in cluster.slots("node-0") if s["role"] == "worker" and s["rank"] == rank]
        os.kill(victim, signal.SIGKILL)
    assert cluster.wait(START_LIMIT_S) == {"node-0": 0}, cluster.tail()
    assert len(cluster.watch.incidents) == len(KILLS)

    used = read(out)
    assert {name for name, _, _ in used} == {"map", "loader", "kept", "stream", "shards", "bare"}
    for name, total in (("map", SAMPLES), ("loader", SAMPLES), ("kept", SAMPLES), ("stream", SAMPLES)):
        line = [sample for step in range(STEPS) for rank in range(WORLD) for sample in used[name, step, rank]]
        assert len(line) == STEPS * WORLD * BATCH
        assert_passes(name, line, total)
    # Ranks read shards of their own and end their passes one sample apart at most, each in its own time.
    counts = Counter(s for (name, _, _), samples in used.items() if name == "shards" for s in samples)
    passes = STEPS * WORLD * BATCH // (SAMPLES // SHARDS * SHARDS)
    assert set(counts) == set(range(SAMPLES // SHARDS * SHARDS))
    assert set(counts.values()) <= {passes, passes + 1}
    # A sampler of torch leaves the tail of each pass out and begins anew.
    per_pass = (SAMPLES // WORLD) // BATCH
    for rank in range(WORLD):
        mine = [used["bare", step, rank] for step in range(STEPS)]
        assert mine[:per_pass] == mine[per_pass : 2 * per_pass], "the same order again: set_epoch was not called"
    first = [s for step in range(per_pass) for rank in range(WORLD) for s in used["bare", step, rank]]
    assert len(first) == len(set(first))
    assert_log_folds_to_one_state(cluster.run_dir)


def read(out: Path) -> dict[tuple[str, int, int], list[int]]:
    """(kind of data, step, rank) to the samples that the committed try of the step used."""
    used: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(WORLD):
        for line in (out / f"rank_{rank}").read_text().splitlines():
            name, step, *samples = line.split()
            used[name, int(step), rank] = [int(sample) for sample in samples]
    return used


def assert_passes(name: str, line: list[int], size: int) -> None:
    for first in range(0, len(line), size):
        twice = [s for s, times in Counter(line[first : first + size]).items() if times > 1]
        assert not twice, f"{name}: samples {twice[:5]} were used twice in pass {first // size}"
