"""Asking ranks for what torch's recorder knows: those that answer are told, those that do not hold nobody up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from keepstep.agent.node import Node
from keepstep.agent.slots import Slot
from keepstep.agent.workers import Workers
from keepstep.model.ids import Rank, SlotId
from keepstep.model.position import GroupPosition, RankPosition
from keepstep.model.wire import AgentToWorker, ShowPositions, WorkerPositions

HERE = (GroupPosition(group="0", members="0-2", launched=7, finished=6),)


def slot(rank: int) -> Slot:
    return Slot(id=SlotId(f"s{rank}"), role="worker", out="", err="", rank=Rank(rank), attached=True)


class Door(Workers):
    """Rank 0 answers, rank 1 is stuck, rank 2 is not connected, rank 3 has nothing to tell."""

    def __init__(self) -> None:
        super().__init__(cast("Node", SimpleNamespace()))
        self.late: list[int] = []

    def send(self, slot_id: SlotId, frame: AgentToWorker) -> bool:
        assert isinstance(frame, ShowPositions)
        rank = int(slot_id[1:])
        self.late.append(frame.request)
        if rank in (0, 3):
            answer = WorkerPositions(request=frame.request, groups=HERE if rank == 0 else ())
            asyncio.get_running_loop().call_soon(self._positions, slot(rank), answer)
        return rank != 2


@pytest.mark.parametrize("ranks", [(0, 2, 3), (0, 1, 2, 3)])
def test_whoever_answers_is_told(ranks: tuple[int, ...]) -> None:
    async def ask() -> tuple[RankPosition, ...]:
        door = Door()
        found = await door.positions([slot(rank) for rank in ranks], within_s=30.0 if 1 not in ranks else 0.05)
        door._positions(slot(1), WorkerPositions(request=door.late[0], groups=HERE))  # far too late: nobody listens
        return found

    (only,) = asyncio.run(ask())
    assert (only.rank, only.groups, only.source) == (0, HERE, "flight-recorder")


def test_nobody_to_ask_is_an_answer_at_once() -> None:
    assert asyncio.run(Door().positions([])) == ()
    assert asyncio.run(Door().positions([slot(2)], within_s=30.0)) == ()
