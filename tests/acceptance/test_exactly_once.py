"""Ranks are killed again and again, and every kind of data still uses every sample exactly once in each pass."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
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


STAGES = ((2, 3, 30), (3, 4, 48))
"""(ranks, batch size, the step at which this stage ends)"""


def test_another_number_of_ranks_goes_on_behind_the_last_sample(tmp_path: Path) -> None:
    """Two ranks, then three with another batch size, from a durable checkpoint: every kind of data goes on where both
    ranks were, and each pass has each sample once."""
    used: dict[str, list[int]] = {}
    began = 0
    for ranks, batch, end in STAGES:
        out = tmp_path / f"used-{ranks}"
        out.mkdir()
        run_stage(tmp_path, ranks, "--batch", str(batch), "--steps", str(end), "--out", str(out))
        found = read(out, ranks)
        assert {step for _, step, _ in found} == set(range(began, end))
        for name in ("map", "loader", "kept", "stream", "shards"):
            used.setdefault(name, []).extend(
                s for step in range(began, end) for rank in range(ranks) for s in found[name, step, rank]
            )
        began = end
    total = sum(ranks * batch * (end - start) for (ranks, batch, end), start in zip(STAGES, (0, 30), strict=True))
    for name, line in used.items():
        assert len(line) == total
        if name != "shards":
            assert_passes(name, line, SAMPLES)
    counts = Counter(used["shards"])
    assert set(counts) == set(range(SAMPLES // SHARDS * SHARDS))
    assert max(counts.values()) - min(counts.values()) <= 1


def run_stage(home: Path, ranks: int, *args: str) -> None:
    """The script under no agent, one process per rank, with durable checkpoints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    names = {"KEEPSTEP_JOB_NAME": "stages", "KEEPSTEP_RUNTIME_DIR": str(home / "runtime")}
    command = [sys.executable, str(HERE / "exact_train.py"), "--dir", str(home / "ckpt"), *args]
    started = [
        subprocess.Popen(
            command, env={**kept, **common, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=START_LIMIT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, said


def read(out: Path, world: int = WORLD) -> dict[tuple[str, int, int], list[int]]:
    """(kind of data, step, rank) to the samples that the committed try of the step used."""
    used: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(world):
        for line in (out / f"rank_{rank}").read_text().splitlines():
            name, step, *samples = line.split()
            used[name, int(step), rank] = [int(sample) for sample in samples]
    return used


def assert_passes(name: str, line: list[int], size: int) -> None:
    for first in range(0, len(line), size):
        twice = [s for s, times in Counter(line[first : first + size]).items() if times > 1]
        assert not twice, f"{name}: samples {twice[:5]} were used twice in pass {first // size}"
