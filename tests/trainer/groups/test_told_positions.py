"""Positions of real gloo ranks, read from outside while they are stuck, and after their groups were built anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from keepstep.agent.positions import read_positions
from keepstep.core.locate.collectives import find, tell
from keepstep.model.ids import Rank, SlotId
from keepstep.model.position import GroupPosition, RankPosition
from tests.trainer.groups.conftest import Stage

LIMIT_S = 30.0


def until(done: Callable[[list[RankPosition]], bool], node: Path) -> list[RankPosition]:
    deadline = time.monotonic() + LIMIT_S
    while True:
        read = [read_positions(node, SlotId(f"s{rank}"), Rank(rank)) for rank in range(3)]
        found = [one for one in read if one is not None]
        if len(found) == 3 and done(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.005)


def inside(found: list[RankPosition]) -> list[str]:
    return [
        f"{at.rank}: {tell(one)} of {group.group}"
        for at in found
        for group in at.groups
        for one in [*([group.inside] if group.inside else []), *group.messages]
    ]


def world(at: RankPosition) -> GroupPosition:
    return next(group for group in at.groups if group.members == "0-2")


def test_ranks_that_are_stuck_are_read_without_their_help(stage: Stage, tmp_path: Path) -> None:
    """Two ranks wait in different groups, and both ways lead to a rank that has done all it ever will."""
    members = stage.all("tells_positions", 3, node=str(tmp_path))
    for member in members:
        assert member.hear() == "ready"
    found = until(lambda found: len(inside(found)) == 2, tmp_path)
    assert inside(found) == ["0: recv #1 from rank 1 (7 float32) of 0", "1: all_reduce #2 (4,096 float32) of 0"]
    assert [world(at).launched for at in found] == [1, 2, 1]
    assert [world(at).recent[0].elements for at in found] == [6, 6, 6]
    pair = next(group for group in found[0].groups if group.members == "0-1")
    assert (pair.launched, pair.finished, pair.recent[0].dtype) == (1, 1, "float64")
    assert len(found[2].groups) == 1, "rank 2 is no member of the pair"
    verdict = find(found)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("missing", (2,))
    for member in members:
        member.tell("abort")
    for member in members:
        assert member.hear() == "free"
    port = stage.store()
    for member in members:
        member.tell(port)
    for member in members:
        assert member.hear() == "again"
    again = until(lambda found: True, tmp_path)
    assert [[one.op for one in world(at).recent] for at in again] == [["barrier"]] * 3
    assert [(world(at).launched, world(at).finished) for at in again] == [(1, 1)] * 3
    for member in members:
        member.tell("leave")
