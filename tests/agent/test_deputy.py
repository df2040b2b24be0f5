"""What a deputy declines, so that helping oneself stays the exception."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from keepstep.agent.deputy import LOCAL_LIMIT, Deputy
from keepstep.model.facts import WorkerFrozen
from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.wire import PeerFault


def test_recoveries_are_counted_anew_in_each_absence_of_the_controller() -> None:
    """So many without anybody who remembers are a pattern; as many in a month of short absences are not."""
    node: Any = SimpleNamespace(id="n0", roster=object(), outbox=SimpleNamespace(pending=list))
    uplink: Any = SimpleNamespace(up=False, since=1.0)
    supervisor: Any = SimpleNamespace(stopping=False)
    helpers: Any = None
    deputy = Deputy(node, supervisor, helpers, uplink)
    cause = WorkerFrozen(
        job=JobId("j"),
        at=Nanos(1),
        node=NodeId("n1"),
        slot=SlotId("r1"),
        rank=Rank(1),
        epoch=Epoch(1),
        state="T",
        for_s=1,
    )
    fault = PeerFault(job=JobId("j"), node=NodeId("n1"), token="", epoch=Epoch(1), cause=cause, offer=SlotId("s0"))
    for _ in range(LOCAL_LIMIT):
        assert deputy._reason_to_decline(fault) is None
        deputy._count += 1
    assert "are enough" in (deputy._reason_to_decline(fault) or "")
    uplink.since = 2.0
    assert deputy._reason_to_decline(fault) is None
