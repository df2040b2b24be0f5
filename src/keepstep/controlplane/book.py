"""What agents are told out of the durable state: read from the mind at the moment of asking, never kept beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.controlplane.leases import Contact, NodeKey
from keepstep.core.controller import Controller
from keepstep.core.state import Link
from keepstep.model.actions import AnyAction
from keepstep.model.ids import JobId
from keepstep.model.topology import JobSpec

_CONTACT: dict[Link, Contact] = {
    "up": Contact.ALIVE,
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
        return self._mind().acked(key.job, key.node)

    def pending(self, key: NodeKey) -> Sequence[AnyAction]:
        return self._mind().pending_orders(key.node, key.job)

    def ended(self, job: JobId) -> tuple[str, int] | None:
        found = self._mind().job(job)
        if found is None or not found.over:
            return None
        return found.state, found.exit_code or 0


def known_nodes(mind: Controller) -> list[tuple[NodeKey, Contact]]:
    """Every node of a running job that has not left, and how the log last saw it."""
    return [
        (NodeKey(job.id, node.node), _CONTACT[node.link])
        for job in mind.jobs()
        if not job.over
        for node in job.nodes.values()
        if node.link in _CONTACT
    ]
