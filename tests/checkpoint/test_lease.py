"""Lease: of two runs that share a place by mistake one writes, and nobody waits long for the dead."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import msgspec
import pytest
from msgspec import structs

from keepstep.checkpoint import catalog, lease, process
from keepstep.checkpoint import config as settings
from keepstep.checkpoint.archiver import IDLE_S, Archiver
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import TierAway, TierHeld
from keepstep.checkpoint.lease import CHECK_S, LEASE, LEASE_S, RENEW_S, Claim, Lease
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.target import Seen, Target
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from tests.checkpoint.states import slot_path, write_slot
from tests.checkpoint.test_archiver import Node, await_, complete_steps

_NS = 1_000_000_000


class Time:
    """One clock for all."""

    def __init__(self) -> None:
        self.s = 1000.0

    def claim(self, job: str, run: str, *, leads: bool = True) -> Claim:
        found = Claim(clock=lambda: self.s, now=self.ns)
        found.belongs(job, run)
        found.leads = leads
        return found

    def ns(self) -> int:
        return int(self.s * _NS)


def put(tier: MemoryTier, found: Lease) -> None:
    tier.put(LEASE, [msgspec.json.encode(found)])


def elsewhere(job: str, run: str, at_ns: int) -> Lease:
    return Lease(job=job, run=run, host="n7", place="another boot", pid=1, start="5", since_ns=1, at_ns=at_ns)


def gone() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_another_jobs_living_writer_is_left_in_peace_until_it_falls_silent() -> None:
    """Refused with the way out while it renews; free ``LEASE_S`` after its last word."""
    time, tier = Time(), MemoryTier()
    put(tier, elsewhere("first", "a", time.ns()))
    claim = time.claim("second", "b")
    with pytest.raises(TierHeld, match=r"job first \(host n7, pid 1, 0 s ago\).*directory of its own"):
        claim.admit(tier)
    time.s += LEASE_S - 1
    with pytest.raises(TierHeld):
        claim.admit(tier)
    time.s += 1
    with pytest.raises(TierHeld):
        claim.admit(tier)  # the answer of a moment ago
    time.s += CHECK_S
    claim.admit(tier)
    found = lease.read(tier)
    assert found is not None
    assert (found.job, found.run, found.pid) == ("second", "b", os.getpid())


def test_the_later_run_of_a_job_takes_over_at_once() -> None:
    """A restart waits for nobody, and whatever is left of the run before leaves it in peace."""
    time, tier = Time(), MemoryTier()
    put(tier, elsewhere("job", "a", time.ns()))
    left = time.claim("job", "a")  # another node of the same run
    left.admit(tier)
    time.s += 1
    restarted = time.claim("job", "b")
    put(tier, elsewhere("job", "a", time.ns()))
    restarted.admit(tier)
    found = lease.read(tier)
    assert found is not None
    assert found.run == "b"
    put(tier, structs.replace(found, place="another boot"))
    time.s += CHECK_S
    with pytest.raises(TierHeld):
        left.admit(tier)
    time.s += LEASE_S
    restarted.admit(tier)


def test_a_lease_of_the_dead_on_this_host_holds_nobody_up() -> None:
    """The process is asked for: gone, or another one of its number."""
    time, tier = Time(), MemoryTier()
    here = lease.mine("first", "a", time.ns())
    parent = structs.replace(here, pid=os.getppid(), start=process.started(os.getppid()))
    for other, free in (
        (parent, False),
        (structs.replace(parent, start="1"), True),
        (structs.replace(here, pid=gone(), start="1"), True),
        (structs.replace(here, pid=gone(), start=""), True),
    ):
        put(tier, other)
        claim = time.claim("second", "b")
        if free:
            claim.admit(tier)
        else:
            with pytest.raises(TierHeld):
                claim.admit(tier)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"job": 1}', b"[" * 100])
def test_a_lease_that_cannot_be_read_counts_for_none(data: bytes) -> None:
    """It is written anew."""
    time, tier = Time(), MemoryTier()
    tier.put(LEASE, [data])
    time.claim("job", "a").admit(tier)
    assert lease.read(tier) is not None


@pytest.mark.parametrize("jump_s", [-10 * LEASE_S, 10 * LEASE_S])
def test_a_clock_that_has_jumped_holds_nobody_up(jump_s: float) -> None:
    """Neither a lease from the future nor one from the past is waited for."""
    time, tier = Time(), MemoryTier()
    put(tier, elsewhere("first", "a", time.ns() + int(jump_s * _NS)))
    time.claim("second", "b").admit(tier)


def test_only_the_node_with_rank_0_writes_it_and_renews_it_in_time() -> None:
    """The others look. What is renewed is never older than ``RENEW_S`` where it is asked for all the time."""
    time, tier = Time(), MemoryTier()
    time.claim("job", "a", leads=False).admit(tier)
    assert lease.read(tier) is None
    leader = time.claim("job", "a")
    for _ in range(20):
        leader.admit(tier)
        found = lease.read(tier)
        assert found is not None
        assert time.ns() - found.at_ns <= RENEW_S * _NS
        assert leader.due is False
        time.s += RENEW_S / 3
    time.claim("job", "a", leads=False).admit(tier)
    leader.release(tier)
    assert lease.read(tier) is None


def test_nobody_removes_anothers_lease() -> None:
    """Whoever has been replaced leaves the place as it is."""
    time, tier = Time(), MemoryTier()
    leader = time.claim("job", "a")
    leader.admit(tier)
    put(tier, elsewhere("other", "b", time.ns()))
    leader.release(tier)
    assert lease.read(tier) is not None


def test_a_tier_that_does_not_answer_is_not_taken_for_free() -> None:
    """Its trouble is the writer's trouble."""

    class Away(MemoryTier):
        def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
            raise TierAway("no answer")

    with pytest.raises(TierAway):
        Time().claim("job", "a").admit(Away())


def test_an_archiver_that_is_left_alone_lets_the_place_go(tmp_path: Path) -> None:
    """It renews while trainers are heard of, and while it writes; not for ever when nobody is there any more."""

    class Twice(threading.Event):
        """Lets the thread look twice."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            assert timeout <= RENEW_S / 2
            looks.append(timeout)
            return len(looks) > 2

    class Counting(Target):
        def renew(self) -> None:
            renewed.append(1)

    node = Archiver(tmp_path)
    node._targets = [Counting(str(tmp_path), "remote", 0, Seen(tmp_path), lambda _: None)]
    for working, silent_s, times in ((False, 0.0, 2), (False, IDLE_S, 0), (True, IDLE_S, 2)):
        looks, renewed = list[float](), list[int]()
        node._working, node._alive = working, monotonic() - silent_s
        node._renew(Twice())
        assert len(renewed) == times


@pytest.mark.acceptance
def test_two_jobs_in_one_directory_one_writes(tmp_path: Path) -> None:
    """Real archivers: the second writes nothing, removes nothing, halves neither, until the first is killed."""
    shared = str(tmp_path / "shared")
    first, second = (Node(tmp_path / name, CheckpointPolicy(dir=shared, keep=1), job=name) for name in ("one", "two"))
    try:
        for number, node in enumerate((first, second)):
            settings.write(
                node.dir,
                CheckpointConfig(
                    job=JobId(node.dir.name), policy=CheckpointPolicy(dir=shared, keep=1), run=str(number)
                ),
            )
        write_slot(slot_path(first.dir, 0), Version(300, 1))
        writer = first.start()
        first.hear("verified", 300)
        write_slot(slot_path(second.dir, 0), Version(300, 1))
        second.start()
        assert "job one" in second.hear("skipped", 300).why
        await_(lambda: not second.pinned())
        assert second.said.count("is being written by job one") == 1
        assert "directory of its own" in second.said
        for node in (first, second):  # of two ranks, so that the first one's is there and not complete
            write_slot(slot_path(node.dir, 0), Version(400, 1), world_size=2)
            node.ring()
            await_(lambda node=node: not node.pinned())  # type: ignore[misc]
        second.hear("skipped", 400)
        tier = open_tier(shared)
        assert [(found.version.step, found.job) for found in catalog.read(tier) if found.verified] == [(300, "one")]
        assert catalog.part(tier, Version(400, 1), 0).job == "one"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        steps = itertools.count(500, 100)

        def written() -> bool:
            if not second.pinned():
                write_slot(slot_path(second.dir, 0), Version(next(steps), 1))
                second.ring()
            return complete_steps(shared)[0] > 400

        await_(written)
        assert second.finish() == 0
        assert not (Path(shared) / LEASE).exists()
    finally:
        first.close()
        second.close()
