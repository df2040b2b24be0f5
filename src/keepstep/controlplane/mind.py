"""What the shell asks of the mind. ``core.controller.Controller`` is the mind; tests bring simpler ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keepstep.model.actions import AnyAction
from keepstep.model.facts import AnyFact
from keepstep.model.ids import Nanos, NodeId
from keepstep.model.records import AnyRecord


class Mind(Protocol):
    def decide(self, fact: AnyFact, now: Nanos) -> list[AnyRecord]:
        """Read the state, change nothing."""
        ...

    def evolve(self, record: AnyRecord) -> None:
        """The only thing that changes the state."""
        ...

    def next_deadline(self) -> Nanos | None: ...

    def pending_orders(self, node: NodeId) -> Sequence[AnyAction]:
        """Orders of the newest epoch that have neither been done nor failed."""
        ...

    def dump(self) -> bytes: ...
