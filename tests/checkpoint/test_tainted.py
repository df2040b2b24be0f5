"""Generations that a machine may have spoilt: marked part by part, passed over, found again when they are cleared."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from keepstep.checkpoint import archive, catalog, generation, retention, tainted
from keepstep.checkpoint.saved import on_node, on_shared
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.model.settings import CheckpointPolicy
from tests.checkpoint import durable_made as made

STEPS = (10, 20, 30)


@pytest.fixture
def tier() -> MemoryTier:
    found = MemoryTier()
    payload, entries = made.payload_of({"p/m/a": np.arange(50, dtype="float32")})
    for step in STEPS:
        made.complete(found, Version(step, 1), [made.write_part(found, Version(step, 1), 0, payload, entries)])
    return found


def mark(tier: MemoryTier, since: int, until: int, why: str = "lm-sdc1", before: int = 0) -> list[int]:
    return [v.step for v in tainted.mark(tier, since=since, until=until, why=why, now_ns=7, before_ns=before)]


def test_what_lies_between_is_passed_over(tier: MemoryTier) -> None:
    """``since`` is clean itself, ``until`` is not; what is newer was computed by others."""
    assert mark(tier, 10, 20) == [20]
    assert [(one.version.step, one.tainted, one.complete) for one in catalog.read(tier)] == [
        (30, False, True), (20, True, True), (10, False, True),
    ]  # fmt: skip
    found, lost = on_shared(tier)
    assert [one.step for one in found] == [30, 10]
    assert "step 20: tainted: lm-sdc1 (KEEPSTEP_ALLOW_TAINTED=1 takes it)" in lost
    assert [one.step for one in on_node(tier)] == [30, 10]


def test_a_person_may_take_it_all_the_same(tier: MemoryTier) -> None:
    mark(tier, 10, 30)
    assert [one.step for one in on_shared(tier, allow_tainted=True)[0]] == [30, 20, 10]
    assert [one.step for one in on_node(tier, allow_tainted=True)] == [30, 20, 10]
    assert (tainted.allowed({"KEEPSTEP_ALLOW_TAINTED": "1"}), tainted.allowed({})) == (True, False)


def test_the_newest_is_the_newest_clean_one(tier: MemoryTier) -> None:
    mark(tier, 20, 99)
    newest = catalog.newest(catalog.read(tier))
    assert newest is not None
    assert newest.version.step == 20


def test_one_mark_goes_and_another_stays(tier: MemoryTier) -> None:
    """Two investigations doubt the same generation: it is clean when both are over."""
    mark(tier, 10, 20)
    mark(tier, 10, 30, why="lm-sdc2")
    assert [v.step for v in tainted.clear(tier, why="lm-sdc1", now_ns=8)] == [20]
    assert [one.step for one in on_shared(tier)[0]] == [10]
    assert [v.step for v in tainted.clear(tier, why="lm-sdc2", now_ns=8)] == [20, 30]
    assert [one.step for one in on_shared(tier)[0]] == [30, 20, 10]
    assert not [name for name in tier.names("step-") if name.endswith(tainted.TAINTED)]


def test_marking_twice_writes_once(tier: MemoryTier) -> None:
    """Several nodes may be told the same."""
    mark(tier, 10, 20)
    before = dict(tier.objects)
    assert mark(tier, 10, 20) == [20]
    assert tier.objects == before


def test_what_was_written_after_the_roll_back_is_clean(tier: MemoryTier) -> None:
    """The same step was done again on clean state before the order arrived."""
    part = structs.replace(catalog.part(tier, Version(20, 1), 0), written_ns=1000)
    tier.put(generation.part_name(part.version, 0), [generation.seal(part)])
    assert mark(tier, 10, 20, before=1000) == []
    assert mark(tier, 10, 20, before=1001) == [20]


def test_a_part_written_anew_is_another_one(tier: MemoryTier) -> None:
    """The mark is about bytes, not about a step; and tainted bytes are not taken for the new state's."""
    mark(tier, 10, 20)
    part = catalog.part(tier, Version(20, 1), 0)
    assert archive._is_marked(tier, part)
    payload, entries = made.payload_of({"p/m/a": np.arange(50, dtype="float32") + 1})
    made.complete(tier, Version(20, 1), [made.write_part(tier, Version(20, 1), 0, payload, entries, plain=b"x")])
    assert [one.step for one in on_shared(tier)[0]] == [30, 20, 10]


def test_retention_keeps_clean_ones(tier: MemoryTier) -> None:
    """With room for one generation, the newest clean one stays, however many tainted ones are newer."""
    mark(tier, 10, 30)
    verdicts = retention.judge(catalog.read(tier), CheckpointPolicy(keep=1), now_ns=10**18)
    assert {one.version.step: one.keep for one in verdicts} == {10: True, 20: True, 30: True}
    verdicts = retention.judge(
        [g for g in catalog.read(tier) if g.version.step < 30], CheckpointPolicy(keep=1), now_ns=10**18
    )
    assert verdicts[0].keep


def test_a_mark_that_cannot_be_read_counts_for_none(tier: MemoryTier) -> None:
    mark(tier, 10, 20)
    name = next(name for name in tier.names("step-") if name.endswith(tainted.TAINTED))
    tier.objects[name] = b"garbage"
    assert [one.step for one in on_shared(tier)[0]] == [30, 20, 10]
