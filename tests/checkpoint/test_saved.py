"""What a world can restore, told from what each rank's node can read."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.checkpoint import generation
from keepstep.checkpoint.progress import TALK_AFTER_S, TALK_EVERY_S, Progress
from keepstep.checkpoint.saved import Seen, complete, on_node, on_shared
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.memory import MemoryTier
from tests.checkpoint import durable_made as made

RUN = ("j", "run", "key")
OTHER = ("j", "other", "key")


def seen(
    ranks: tuple[int, ...], *, history: tuple[str, str, str] = RUN, world: int = 2, everywhere: bool = False
) -> Seen:
    return Seen(5, 1, world, history, ranks, everywhere)


def test_nodes_make_up_a_generation_together() -> None:
    """Rank 0's node has part 0, rank 1's node part 1: nobody alone, both together."""
    (found,) = complete([[seen((0,))], [seen((1,))]], 2)
    assert (found.version, found.shared) == (Version(5, 1), False)
    assert found.readers == {0: [0], 1: [1]}
    assert complete([[seen((0,))], []], 2) == []


def test_what_the_shared_tier_lost_a_node_may_have() -> None:
    (found,) = complete([[seen((0,), everywhere=True)], [seen((1,))], []], 3)
    assert found.readers == {0: [0, 1, 2], 1: [1]}
    assert not found.shared


def test_parts_of_two_histories_never_make_one_generation() -> None:
    """Two runs reached the same step in the same epoch, each left half of its parts."""
    assert complete([[seen((0,))], [seen((1,), history=OTHER)]], 2) == []


def test_of_two_histories_the_shared_tier_decides() -> None:
    rows = [[seen((0, 1), history=OTHER, everywhere=True), seen((0,))], [seen((1,))]]
    (found,) = complete(rows, 2)
    assert (found.history, found.shared) == (OTHER, True)


def test_another_world_size_is_no_hindrance() -> None:
    (found,) = complete([[seen((0, 1, 2), world=3, everywhere=True)], []], 2)
    assert (found.world_size, sorted(found.readers)) == (3, [0, 1, 2])


@pytest.fixture
def chain() -> MemoryTier:
    tier = MemoryTier()
    first, entries = made.payload_of({"p/m/a": np.arange(50, dtype="float32")})
    made.complete(tier, Version(1, 1), [made.write_part(tier, Version(1, 1), 0, first, entries)])
    part = made.write_part(tier, Version(2, 1), 0, first, entries, base=(Version(1, 1), first))
    made.complete(tier, Version(2, 1), [part])
    return tier


def test_a_tier_is_listed_newest_first(chain: MemoryTier) -> None:
    found, lost = on_shared(chain)
    assert [(one.step, one.ranks, one.everywhere) for one in found] == [(2, (0,), True), (1, (0,), True)]
    assert lost == []
    assert [(one.step, one.everywhere) for one in on_node(chain)] == [(2, False), (1, False)]


def test_a_difference_without_its_base_is_not_offered(chain: MemoryTier) -> None:
    """And it is told why, so that nobody begins anew without knowing."""
    for name in list(chain.names("step-000000000001")):
        chain.remove(name)
    found, lost = on_shared(chain)
    assert found == []
    assert "rests on step 1" in lost[0]
    assert on_node(chain) == []


def test_a_damaged_manifest_is_told_and_an_unfinished_one_is_not(chain: MemoryTier) -> None:
    name = generation.manifest_name(Version(2, 1))
    chain.objects[name] = chain.objects[name][:-9]
    assert [why.partition(":")[0] for why in on_shared(chain)[1]] == ["step 2"]
    chain.remove(name)
    found, lost = on_shared(chain)
    assert ([one.step for one in found], lost) == ([1], [])


def test_progress_talks_late_and_seldom() -> None:
    """A quick restore says nothing; a long one says at most one line per second, with rate and time left."""
    now, lines = [0.0], list[str]()
    progress = Progress("restoring step 7", 100 * 2**20, lines.append, clock=lambda: now[0])
    for tenth in range(60):
        now[0] = tenth / 10
        progress.add(2**20)
    assert len(lines) == int((5.9 - TALK_AFTER_S) / TALK_EVERY_S) + 1
    assert lines[0] == "restoring step 7: 21.0 MiB of 100.0 MiB, 10.5 MiB/s, 8 s left"
