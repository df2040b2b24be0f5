"""Groups over real processes: same results as torch's own, freed at once, rebuilt in place."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest


def test_every_collective_gives_what_torchs_own_backend_gives(stage: Any) -> None:
    """Each operation of torch.distributed, synchronous, with a future, functional and of objects, agrees with gloo."""
    ours = stage.all("operations", 3, ours=True)
    found = [member.hear() for member in ours]
    for member in ours:
        started, finished = member.hear()
        assert started == finished > 20
    theirs = stage.all("operations", 3, ours=False)
    assert found == [member.hear() for member in theirs]
    assert [m.left() for m in ours] == [0, 0, 0]


WAITS = (
    "sync future recv irecv funcol funcol_reduce_scatter reducer new_group object all_gather all_gather_into_tensor "
    "all_to_all_single barrier broadcast gather reduce reduce_scatter reduce_scatter_tensor scatter"
)


def test_abort_ends_gloos_own_operations(stage: Any) -> None:
    """All connections of a group are known, and shutting them down ends what gloo does, so that it can be scrapped."""
    members = stage.all("ended", 3)
    connections, done = members[0].hear()
    assert (connections, done) == (2, [False, False])
    for member in members[1:]:
        assert member.hear() == "absent"
        os.kill(member.process.pid, signal.SIGSTOP)
    members[0].tell("abort")
    assert members[0].hear() == (True, [True, True])
    assert members[0].left(10) == 0


@pytest.mark.parametrize("how", WAITS.split())
def test_abort_frees_whoever_waits(stage: Any, how: str) -> None:
    """Whatever the main thread waits in, an abort ends it at once with a real error, even if gloo never returns."""
    first, second = stage.all("waiter", 2, how=how)
    assert first.hear() == "waiting"
    assert second.hear() == "absent"
    os.kill(second.process.pid, signal.SIGSTOP)
    time.sleep(0.2)  # let it sink into the wait; an abort before that is the easier case
    began = time.monotonic()
    first.tell("abort")
    freed, kind, text, aborted, broken = first.hear()
    assert freed - began < 1.0
    assert aborted
    assert "abort" in text or "Abort" in kind or broken is not None
    assert "the test says so" in first.hear()  # later collectives say why
    assert first.hear() == 2  # a repetition counts and does no harm
    assert first.left(10) == 0


def test_survivors_use_the_same_groups_with_a_newcomer(stage: Any) -> None:
    """After a kill in mid-collective, world, subgroup and mesh work again as the same objects, and new_group too."""
    members = stage.all("survivor", 4)
    for member in members:
        assert member.hear() == "up"
    members[2].kill()
    port = stage.store()
    members[2] = stage.start("newcomer", rank=2, world=4, port=0)
    assert members[2].hear() == "up"
    for member in members:
        member.tell(port)
    # world and mesh: 0+1+2+3; pair: 0+1; the group made afterwards: 0+3.
    assert [m.hear() for m in members] == [[6.0, 6.0, 1.0, 3.0], [6.0, 6.0, 1.0], [6.0, 6.0], [6.0, 6.0, 3.0]]
    for member in members:
        assert {"settle", "store", "total"} < set(member.hear())
    assert [m.left() for m in members] == [0, 0, 0, 0]


def test_a_second_fault_ends_a_rebuild_at_once(stage: Any) -> None:
    """A rebuild that waits for somebody who never comes ends within a second of an abort, and the process can leave."""
    member = stage.start("alone", rank=0, world=2, port=stage.store(), limit_s=60.0)
    # The scenario joins as a stand-in, so the port only serves the rebuild.
    assert member.hear() == "rebuilding"
    time.sleep(0.2)
    member.tell("abort")
    took, kind, _ = member.hear()
    assert kind == "GroupsAborted"
    assert took < 1.5
    assert member.hear()["abandoned"] <= 1
    assert member.left(10) == 0


def test_a_rebuild_without_everybody_names_who_is_missing(stage: Any) -> None:
    """The limit is kept and the message says which ranks never came."""
    member = stage.start("alone", rank=1, world=4, port=stage.store(), limit_s=1.0)
    assert member.hear() == "rebuilding"
    took, kind, text = member.hear()
    assert kind == "RebuildTimeout"
    assert took < 5.0
    assert "ranks 0,2-3 never came" in text
    assert member.hear()["abandoned"] <= 1
    assert member.left(10) == 0


def test_a_group_that_others_lack_is_named(stage: Any) -> None:
    """A group made after the set-up exists on survivors only; the message says which, where, and what to do."""
    first, second = stage.all("odd_group", 2)
    assert second.hear() == "rebuilt"
    text = first.hear()
    assert "group 1 (ranks 0-1) does not exist on ranks 1" in text
    assert "make all groups before the training loop" in text


def test_after_an_interrupted_rebuild_the_next_one_succeeds(stage: Any) -> None:
    """A second fault during the rebuild costs nothing but time; an epoch chosen before an abort is refused unseen."""
    port = stage.store()
    first = stage.start("interrupted", rank=0, world=2, port=port)
    assert first.hear() == "rebuilding"
    first.tell("abort")
    assert first.hear() == "interrupted"
    assert first.hear() == "stale"
    second = stage.start("interrupted", rank=1, world=2, port=port)
    assert second.hear() == "rebuilding"
    second.tell("abort")
    assert [second.hear(), second.hear()] == ["interrupted", "stale"]
    for member in (first, second):
        member.tell("go")
    assert [first.hear(), second.hear()] == ["rebuilt", "rebuilt"]
    assert [first.left(), second.left()] == [0, 0]


def test_what_cannot_be_rebuilt_says_why(stage: Any) -> None:
    """A second initialisation, another rank and a group of another backend are refused, each with its way out."""
    twice, rank, foreign = stage.start("refused", port=stage.store()).hear()
    assert "keepstep.init()" in twice
    assert "is rank 0 of 2 and cannot become rank 1 of 2" in rank
    assert "leave out backend=" in foreign


def test_counters_marks_and_the_hook_before_the_first_reduction(stage: Any) -> None:
    """World reductions are counted per step; the hook runs once per step, before a reduction, and not recursively."""
    for member in stage.all("counting", 2):
        told, level, beats = member.hear()
        # The hook runs at the first reduction, whatever its group; its own collective spans the world.
        assert told == ["hook", 1, 2, 0, "no hook before a barrier", "hook", 7]
        assert level
        assert beats


def test_cuda_groups_are_swapped_inside_torchs_own_objects(stage: Any) -> None:
    """With a double for NCCL: one backend per group and epoch, the old ones aborted, the ProcessGroup object kept."""
    said = stage.start("nccl_double", port=stage.store()).hear()
    assert said["type"] == "ProcessGroup"
    assert [(rank, ranks) for _, rank, ranks in said["made"]] == [(0, [0])] * 4
    names = [name for name, _, _ in said["made"]]
    assert names[:2] == names[2:]
    assert said["aborted"] == 2
    assert said["the first was aborted"]
    assert said["swapped"]
    assert said["result"] == [1.0, 1.0, 1.0]
