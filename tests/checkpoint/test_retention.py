"""Retention: what a policy promises to keep is kept, whatever the clocks say; collection removes the rest."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from keepstep.checkpoint import archive, catalog, collect
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.exceptions import PayloadDamaged
from keepstep.checkpoint.generation import folder, manifest_name, part_name, payload_name
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.retention import UNFINISHED_S, judge
from keepstep.checkpoint.saved import on_node
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.model.settings import CheckpointPolicy
from tests.checkpoint import crash_tool
from tests.checkpoint import durable_made as made
from tests.checkpoint.test_archive import LARGE, put

S = 1_000_000_000
HOUR = 3600 * S


def at(
    step: int,
    created_s: float = 0.0,
    *,
    complete: bool = True,
    bases: tuple[int, ...] = (),
    epoch: int = 1,
    verified: bool = True,
) -> Generation:
    return Generation(
        version=Version(step, epoch),
        complete=complete,
        verified=complete and verified,
        created_ns=int(created_s * S),
        bases=tuple(Version(base, epoch) for base in bases),
        ranks=(0,),
    )


def kept(generations: list[Generation], policy: CheckpointPolicy, now_s: float = 0.0, **more: object) -> set[int]:
    verdicts = judge(generations, policy, now_ns=int(now_s * S), **more)  # type: ignore[arg-type]
    assert all(verdict.why for verdict in verdicts)
    return {verdict.version.step for verdict in verdicts if verdict.keep}


def test_the_newest_stay_and_multiples_stay() -> None:
    """``--ckpt-keep`` and ``--ckpt-keep-every``."""
    tier = [at(step, step) for step in range(100, 1100, 100)]
    assert kept(tier, CheckpointPolicy(keep=2), 2000) == {900, 1000}
    assert kept(tier, CheckpointPolicy(keep=1, keep_every=500), 2000) == {500, 1000}
    assert kept(tier, CheckpointPolicy(keep=0), 2000) == {1000}
    assert kept(tier, CheckpointPolicy(keep=1, keep_s=350), 1000) == {700, 800, 900, 1000}


def test_a_damaged_one_is_never_kept_in_place_of_a_good_one() -> None:
    """Neither in a shared place nor on a node's own disk, where parts count by themselves."""
    tier = [at(100), structs.replace(at(200, complete=False), damaged=True)]
    for by_itself in (False, True):
        assert 100 in kept(tier, CheckpointPolicy(keep=1), by_itself=by_itself)
        assert kept([*tier, at(300), at(400)], CheckpointPolicy(keep=1), by_itself=by_itself) <= {300, 400}


def test_damage_is_passed_on_to_parts_that_rest_on_it(tmp_path: Path) -> None:
    """On a node's own disk no manifest says so."""
    tier = DirectoryTier(tmp_path, "local", create=True)
    before: tuple[Version, bytes] | None = None
    for step in (1, 2, 3):
        payload, entries = made.payload_of({"p/m/w": np.full(2000, step, dtype="float32")})
        part = made.write_part(tier, Version(step, 1), 0, payload, entries, base=before)
        if step < 3:
            made.complete(tier, Version(step, 1), [part])
        before = Version(step, 1), payload
    file = tmp_path / payload_name(Version(2, 1), 0, "delta")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(PayloadDamaged):
        archive.verify(tier, Version(2, 1))
    verdicts, found = collect.plan(tier, CheckpointPolicy(keep=1), by_itself=True)
    assert [one.damaged for one in found] == [True, True, False]
    assert {verdict.version.step: verdict.why for verdict in verdicts}[1] == "the newest complete one"
    assert [seen.step for seen in on_node(tier)] == [1]


def test_what_a_kept_difference_rests_on_stays() -> None:
    """The whole chain, down to the full one."""
    tier = [at(100), at(200, bases=(100,)), at(300, bases=(200,)), at(400), at(500, bases=(400,))]
    assert kept(tier, CheckpointPolicy(keep=1)) == {400, 500}
    assert kept(tier, CheckpointPolicy(keep=1, keep_every=300)) == {100, 200, 300, 400, 500}


def test_one_from_before_the_window_always_stays() -> None:
    """A generation an hour old is found each time, at most two windows old, with two files more and no others."""
    policy, tier, window = CheckpointPolicy(keep=2, sdc_window_s=3600), [], 3600
    for minute in range(0, 600, 5):
        tier.append(at(minute, minute * 60))
        now = minute * 60 + 30
        stay = kept(tier, policy, now)
        tier = [generation for generation in tier if generation.version.step in stay]
        assert len(tier) <= 4
        if minute >= 65:
            ages = [now - generation.created_ns / S for generation in tier]
            assert window <= max(ages) <= 2 * window + 300


def test_from_before_the_window_a_verified_one_is_preferred() -> None:
    """A newer one that nobody has read back is worth less."""
    tier = [at(100, 100), at(200, 200, verified=False), at(300, 9000), at(400, 9100)]
    assert kept(tier, CheckpointPolicy(keep=1, sdc_window_s=3600), 9200) == {100, 300, 400}


def test_a_run_that_starts_over_keeps_what_it_writes() -> None:
    """Lower steps than those of an earlier run in the same place are not taken for old ones."""
    tier = [at(step, 10, epoch=1) for step in (800, 900, 1000)] + [at(step, 500 + step, epoch=2) for step in (100, 200)]
    assert {100, 200, 1000} <= kept(tier, CheckpointPolicy(keep=2), 2000)


def test_while_nothing_is_complete_nothing_goes() -> None:
    """Perhaps the first one is just being written."""
    assert kept([at(100, complete=False), at(200, complete=False)], CheckpointPolicy(keep=1)) == {100, 200}


def test_on_a_nodes_own_disk_parts_count_by_themselves() -> None:
    """Without manifests, and one more than asked for: another node may lack the newest."""
    tier = [at(step, complete=False) for step in (100, 200, 300, 400)]
    assert kept(tier, CheckpointPolicy(keep=2), by_itself=True) == {200, 300, 400}


times = st.one_of(st.floats(0, 1e5), st.sampled_from([0.0, 4e9]))
"""In seconds; some from before or long after everything else: clocks jump."""


@st.composite
def tiers(draw: st.DrawFn) -> list[Generation]:
    steps = sorted(draw(st.sets(st.integers(0, 60), max_size=14)))
    found: list[Generation] = []
    for step in steps:
        bases = (found[-1].version.step,) if found and found[-1].complete and draw(st.booleans()) else ()
        complete = draw(st.booleans()) or bool(bases)
        found.append(at(step, draw(times), complete=complete, bases=bases, verified=draw(st.booleans())))
    return found


policies = st.builds(
    CheckpointPolicy,
    keep=st.integers(0, 5),
    keep_every=st.integers(0, 9),
    keep_s=st.sampled_from([0.0, 10.0, 5e4]),
    sdc_window_s=st.sampled_from([0.0, 100.0, 5e4]),
)


@given(tier=tiers(), policy=policies, now_s=times, writing=st.sets(st.integers(0, 60), max_size=2))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_clock_and_no_policy_takes_what_is_needed(
    tier: list[Generation], policy: CheckpointPolicy, now_s: float, writing: set[int]
) -> None:
    """The newest complete one, as many as promised, what is being written, and all that these rest on."""
    stay = kept(tier, policy, now_s, writing=[Version(step, 1) for step in writing])
    complete = [generation.version.step for generation in tier if generation.complete]
    assert set(complete[-max(1, policy.keep) :]) <= stay
    steps = {generation.version.step for generation in tier}
    assert writing & steps <= stay
    for generation in tier:
        if generation.version.step in stay:
            assert {base.step for base in generation.bases} <= stay
        if policy.keep_every and generation.complete and generation.version.step % policy.keep_every == 0:
            assert generation.version.step in stay
        if not generation.complete and (not complete or generation.version.step > complete[-1]):
            assert generation.version.step in stay
    if policy.sdc_window_s and complete:
        edge = min(now_s, 4e9) - policy.sdc_window_s
        latest = list(itertools.accumulate((min(g.created_ns / S, now_s) for g in tier if g.complete), max))
        if any(made <= edge for made in latest):
            assert any(made <= edge for made, step in zip(latest, complete, strict=True) if step in stay)


@given(tier=tiers(), policy=policies, now_s=times)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_second_collection_finds_nothing_more(tier: list[Generation], policy: CheckpointPolicy, now_s: float) -> None:
    """What was kept once is kept again: two collectors, or one that runs twice, do not eat their way up."""
    stay = kept(tier, policy, now_s)
    assert kept([g for g in tier if g.version.step in stay], policy, now_s) == stay


# -------------------------------------------------------------------- collection


def write(tier: object, steps: range, path: Path) -> None:
    for step in steps:
        put(tier, path, Version(step, 1))  # type: ignore[arg-type]
        archive.complete(tier, Version(step, 1), 1)  # type: ignore[arg-type]


def test_collection_removes_what_retention_lets_go(tmp_path: Path) -> None:
    """A dry run says the same and removes nothing."""
    tier = MemoryTier()
    write(tier, range(100, 600, 100), tmp_path / "rank0.0")
    policy = CheckpointPolicy(keep=2)
    said = collect.collect(tier, policy, dry_run=True)
    assert len(catalog.read(tier)) == 5
    done = collect.collect(tier, policy)
    assert [v.version.step for v in done.removed] == [v.version.step for v in said.removed] == [100, 200, 300]
    assert [g.version.step for g in catalog.read(tier)] == [500, 400]
    assert all(g.verified for g in catalog.read(tier))


def test_the_unfinished_go_when_nobody_can_be_writing_them(tmp_path: Path) -> None:
    """Older than a complete one and an hour old; the newest unfinished one stays whatever its age."""
    tier = MemoryTier()
    put(tier, tmp_path / "rank0.0", Version(100, 1), world_size=2)
    write(tier, range(200, 201), tmp_path / "rank0.0")
    put(tier, tmp_path / "rank0.0", Version(300, 1), world_size=2)
    written = catalog.part(tier, Version(100, 1), 0).written_ns
    policy = CheckpointPolicy(keep=1)

    def steps_after(now_ns: int) -> list[int]:
        collect.collect(tier, policy, now=lambda: now_ns)
        return [g.version.step for g in catalog.read(tier)]

    assert steps_after(written + int((UNFINISHED_S - 1) * S)) == [300, 200, 100]
    assert steps_after(written - 10 * HOUR) == [300, 200, 100]
    assert steps_after(written + int((UNFINISHED_S + 1) * S)) == [300, 200]
    assert steps_after(written + 10_000 * HOUR) == [300, 200]


def test_a_nodes_own_tier_is_tidied_by_its_parts(tmp_path: Path) -> None:
    """One more than ``keep`` stays, though no manifest says what is complete."""
    tier = MemoryTier()
    for step in range(100, 700, 100):
        put(tier, tmp_path / "rank0.0", Version(step, 1), rank=3, world_size=8)
    collect.collect(tier, CheckpointPolicy(keep=2), by_itself=True)
    assert [g.version.step for g in catalog.read(tier)] == [600, 500, 400]


def test_on_a_nodes_own_tier_each_ranks_difference_keeps_what_it_rests_on(tmp_path: Path) -> None:
    """Of two ranks of a node one writes in full, the other differences: their chain stays, down to the full one."""
    pytest.importorskip("zstandard")
    tier, basis = MemoryTier(), Basis()
    for step in range(100, 700, 100):
        version = Version(step, 1)
        put(tier, tmp_path / "rank2.0", version, rank=2, world_size=8, specs=LARGE)
        on = basis if step > 300 else None
        put(tier, tmp_path / "rank3.0", version, rank=3, world_size=8, specs=LARGE, basis=on, hold=basis)
    collect.collect(tier, CheckpointPolicy(keep=1), by_itself=True)
    assert [g.version.step for g in catalog.read(tier)] == [600, 500, 400, 300]
    Reader([tier], Version(600, 1)).stretch(3, 0, 100)


def test_two_collectors_at_once_are_harmless(tmp_path: Path) -> None:
    """Both remove the same; neither fails, nothing kept is touched."""
    pytest.importorskip("zstandard")
    tier = DirectoryTier(tmp_path / "tier", create=True)
    for step in range(1, 9):
        crash_tool.generation(tier, Version(step, 1), range(2), {})
        archive.complete(tier, Version(step, 1), 2)
    failed: list[BaseException] = []
    together = threading.Barrier(3)

    def gather() -> None:
        try:
            other = DirectoryTier(tmp_path / "tier")
            together.wait()
            collect.collect(other, CheckpointPolicy(keep=2))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=gather) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [g.version.step for g in catalog.read(tier) if g.verified] == [8, 7]
    assert sorted(path.name for path in (tmp_path / "tier").glob("step-*")) == [folder(Version(s, 1)) for s in (7, 8)]


def test_what_makes_a_generation_exist_is_removed_first() -> None:
    """Manifest, mark, descriptions, bytes."""
    version = Version(5, 1)
    inside = ["rank00000.safetensors", "rank00000.json", "verified.json", "manifest.json", "rank00001.delta"]
    names = [f"{folder(version)}/{name}" for name in inside] + [manifest_name(Version(6, 1))]
    order = catalog.objects(names, version)
    assert order[0] == manifest_name(version)
    assert order[1].endswith("verified.json")
    assert order[2] == part_name(version, 0)
    assert len(order) == 5
