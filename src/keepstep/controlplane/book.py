"""What agents are told out of the durable state: read from the mind at the moment of asking, never kept beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.controlplane.leases import Contact, LeaseTable, NodeKey
from keepstep.core.controller import Controller
from keepstep.core.state import Link
from keepstep.model.actions import AnyAction
from keepstep.model.ids import JobId
from keepstep.model.topology import JobSpec

_CONTACT: dict[Link, Contact] = {
    "up": Contact.EXPECTED,
    "away": Contact.BROKEN,
    "broken": Contact.BROKEN,
    "expired": Contact.EXPIRED,
}


class DurableBook:
    """See ``agents.Book``. ``mind`` is asked for anew each time."""

    def __init__(self, mind: Callable[[], Controller]) -> None:
        self._mind = mind

    def spec(self, job: JobId) -> JobSpec | None:
        found = self._mind().job(job)
        return found.spec if found else None

    def acked(self, key: NodeKey) -> int:
        found = self._mind().job(key.job)
        return found.seqs.get(key.node, 0) if found else 0

    def pending(self, key: NodeKey) -> Sequence[AnyAction]:
        return [action for action in self._mind().pending_orders(key.node) if action.job == key.job]

    def ended(self, job: JobId) -> tuple[str, int] | None:
        found = self._mind().job(job)
        if found is None or not found.over:
            return None
        return found.state, found.exit_code or 0


def expect_nodes(mind: Controller, leases: LeaseTable, now: float) -> None:
    """After a restart: every node that the log knows and that has not left is expected back."""
    for job in mind.jobs():
        if job.over:
            continue
        for node in job.nodes.values():
            contact = _CONTACT.get(node.link)
            if contact is not None:
                leases.expect(NodeKey(job.id, node.node), now, contact)
