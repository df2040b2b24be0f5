"""Crashes: whenever a writer, a collector or the whole machine stops, nothing complete is lost, nothing else counts.

``KEEPSTEP_KILLS`` asks for more kills than the default run does, ``KEEPSTEP_SEED`` sets the seed, which is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from keepstep.checkpoint import archive, catalog, collect
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.exceptions import TierMissing
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.retry import Retrying
from tests.checkpoint import crash_tool
from tests.checkpoint.powerloss import MOODS, Disk, PowerLoss

SEED = int(os.environ.get("KEEPSTEP_SEED", "20262"))
KILLS = int(os.environ.get("KEEPSTEP_KILLS", "500"))
ROOT = Path("/tier/of/job")
GENERATIONS = 4


@pytest.fixture
def fast_dir(tmp_path: Path) -> Iterator[Path]:
    """Memory where there is some: a kill loses nothing that was written, so the disk would only cost time."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=shm, prefix="keepstep-test-") as name:
        yield Path(name)


@pytest.mark.acceptance
@pytest.mark.timeout(max(120, KILLS // 2))
def test_hundreds_of_killed_writers_lose_nothing_and_fake_nothing(fast_dir: Path) -> None:
    """Real processes, real SIGKILL: alone, two at once, in the middle of a file, of a removal, of a manifest."""
    print(f"KEEPSTEP_SEED={SEED} KEEPSTEP_KILLS={KILLS}")
    command = [sys.executable, "-m", "tests.checkpoint.crash_tool", "--dir", str(fast_dir / "tier")]
    done = subprocess.run(
        [*command, "--kills", str(KILLS), "--seed", str(SEED)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    print(tally)
    assert tally["killed"] >= KILLS
    assert tally["ended_early"] == 0, done.stdout
    assert tally["unfinished"] > 0, "no kill hit the middle of a generation"
    assert tally["promised"] > 10, "writers got nowhere"


def write_all(disk: Disk, promises: set[int], going: set[int], first: int = 1) -> None:
    """Some generations of two ranks, differences between them, retention; notes what is promised and let go."""
    tier = DirectoryTier(ROOT, create=True, files=disk)
    bases: dict[int, Basis] = {}
    for step in range(first, first + GENERATIONS):
        version = Version(step, 1)
        crash_tool.generation(tier, version, range(crash_tool.RANKS), bases, full_every=2)
        archive.complete(tier, version, crash_tool.RANKS, now=lambda: 1)
        promises.add(step)
        verdicts, _ = collect.plan(tier, crash_tool.POLICY)
        going |= {verdict.version.step for verdict in verdicts if not verdict.keep}
        collect.collect(tier, crash_tool.POLICY)


def restorable(disk: Disk) -> set[int]:
    """Steps that a restart would offer; each of them is read whole and compared."""
    try:
        tier = Retrying(DirectoryTier(ROOT, files=disk), budget_s=0)
    except TierMissing:
        return set()
    found = [generation.version for generation in catalog.read(tier) if generation.complete]
    for version in found:
        archive.verify(tier, version, write=False)
        for rank in range(crash_tool.RANKS):
            part = catalog.part(tier, version, rank)
            assert part.plain == crash_tool.state(version, rank).description.plain
    return {version.step for version in found}


def test_every_prefix_of_operations_survives_a_power_loss() -> None:
    """Before each operation the power may go; what had been promised is there, whatever of the rest survives."""
    print(f"KEEPSTEP_SEED={SEED}")
    pytest.importorskip("zstandard")
    luck = random.Random(SEED)
    promises: set[int] = set()
    going: set[int] = set()
    losses = 0

    def lose(disk: Disk) -> None:
        nonlocal losses
        for mood in (*MOODS, "random", "random"):
            there = restorable(disk.after_loss(mood, luck))
            lost = promises - going - there
            assert not lost, f"{mood}: after operation {disk.steps} step {lost} is lost, {there} is there"
            assert there <= set(range(1, GENERATIONS + 1))
            losses += 1

    disk = Disk(before=lose)
    write_all(disk, promises, going)
    lose(disk)
    assert going, "retention let nothing go: the removal was not tested"
    assert losses > 1000


def test_after_a_power_loss_the_next_archiver_goes_on() -> None:
    """Leftovers are in nobody's way: the same steps are written again and become complete."""
    pytest.importorskip("zstandard")
    luck = random.Random(SEED)
    whole = Disk()
    write_all(whole, set(), set())
    for prefix in range(0, whole.steps, 9):
        disk = Disk(stop_after=prefix)
        with contextlib.suppress(PowerLoss):
            write_all(disk, set(), set())
        after = disk.after_loss("random", luck)
        newest = max(restorable(after), default=0)
        write_all(after, set(), set(), first=newest + 1)
        assert max(restorable(after)) == newest + GENERATIONS


def test_a_killed_collector_is_followed_by_one_that_finishes() -> None:
    """Removal stops after each operation; nothing kept is touched, and the next collection leaves the same result."""
    pytest.importorskip("zstandard")
    luck = random.Random(SEED)

    def fresh(stop_after: int = 10**9) -> Disk:
        disk = Disk()
        tier = DirectoryTier(ROOT, create=True, files=disk)
        for step in range(1, 6):
            crash_tool.generation(tier, Version(step, 1), range(crash_tool.RANKS), {})
            archive.complete(tier, Version(step, 1), crash_tool.RANKS)
        disk.stop_after = disk.steps + stop_after
        return disk

    def gather(disk: Disk) -> None:
        hours_later = 2 * 3600 * 10**9
        tier = DirectoryTier(ROOT, files=disk)
        collect.collect(tier, crash_tool.POLICY, now=lambda: 2**62 + hours_later)

    whole = fresh()
    before = whole.steps
    gather(whole)
    kept = restorable(whole)
    assert kept == {4, 5}
    for prefix in range(whole.steps - before):
        disk = fresh(prefix)
        with pytest.raises(PowerLoss):
            gather(disk)
        for mood in MOODS:
            after = disk.after_loss(mood, luck)
            assert kept <= restorable(after)
            gather(after)
            assert restorable(after) == kept
            tier = DirectoryTier(ROOT, files=after)
            assert {g.version.step for g in catalog.read(tier)} == kept
