"""What the terminal says about a recovery."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.agent.herald import announce
from keepstep.model.ids import Epoch, IncidentId, JobId, NodeId, Rank, SlotId
from keepstep.model.topology import Member, Roster


def roster(newcomer: int | None = None, **changes: Any) -> Roster:
    members = tuple(
        Member(rank=Rank(rank), node=NodeId("vm"), slot=SlotId(f"s{rank}"), local_rank=rank, newcomer=rank == newcomer)
        for rank in range(4)
    )
    fields: dict[str, Any] = {
        "job": JobId("lm"),
        "epoch": Epoch(2 << 16),
        "origin": "controller",
        "mode": "in_process",
        "world_size": 4,
        "members": members,
        "places": (),
        "store_host": "127.0.0.1",
        "store_port": 1,
        "incident": IncidentId("lm-i1"),
    }
    return Roster(**{**fields, **changes})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (roster(mode="fresh", incident=None), None),
        (
            roster(newcomer=2),
            "rank 2 is replaced on vm, 3 other ranks keep their processes (epoch 2); next: keepstep incident lm-i1",
        ),
        (
            roster(),
            "all ranks keep their processes and connect anew (epoch 2); next: keepstep incident lm-i1",
        ),
        (
            roster(mode="restart", attempt=1),
            "all 4 ranks start again, restart 1 (epoch 2); next: keepstep incident lm-i1",
        ),
        (
            roster(newcomer=0, origin="node-1", incident=None, epoch=Epoch((2 << 16) + 1)),
            "rank 0 is replaced on vm, 3 other ranks keep their processes "
            "(epoch 2.1, decided by node-1 while no controller answered)",
        ),
    ],
)
def test_one_line_per_recovery(given: Roster, line: str | None) -> None:
    """A first start is no news; a recovery names the ranks, the others' fate and the next command."""
    assert announce(given) == line
