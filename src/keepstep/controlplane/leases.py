"""Who has been heard of lately: a table in memory that turns heartbeats into edges.

Heartbeats never reach the mind or the log. What does are the moments at which something changes: a connection broke,
a lease ran out (once), a node speaks again. The table has no clock and no timer; its owner passes monotonic seconds
and asks when to look next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from keepstep.model.ids import JobId, NodeId


class NodeKey(NamedTuple):
    """A node of a job; the same host may serve several jobs under one name."""

    job: JobId
    node: NodeId


class Contact(Enum):
    ALIVE = "alive"
    BROKEN = "broken"
    EXPIRED = "expired"


class Expired(NamedTuple):
    key: NodeKey
    silent_s: float


@dataclass
class _Lease:
    heard: float
    contact: Contact
    extra: float = 0.0
    """Seconds beyond the lease that this silence may last."""


class LeaseTable:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[NodeKey, _Lease] = {}

    def expect(self, key: NodeKey, now: float, contact: Contact) -> None:
        """Start from what the log says about a node; its lease runs anew from ``now``."""
        self._leases[key] = _Lease(now, contact)

    def heard(self, key: NodeKey, now: float) -> bool:
        """Note a sign of life; True when the node had been given up or its connection had broken."""
        lease = self._leases.get(key)
        if lease is None:
            self._leases[key] = _Lease(now, Contact.ALIVE)
            return False
        renewed = lease.contact in (Contact.BROKEN, Contact.EXPIRED)
        lease.heard, lease.contact, lease.extra = now, Contact.ALIVE, 0.0
        return renewed

    def broken(self, key: NodeKey) -> bool:
        """Note a lost connection; True when that is news. The lease runs on from the last sign of life."""
        lease = self._leases.get(key)
        if lease is None or lease.contact is not Contact.ALIVE:
            return False
        lease.contact = Contact.BROKEN
        return True

    def forget(self, key: NodeKey) -> None:
        """The node left in good order, or its job ended: no longer anybody's concern."""
        self._leases.pop(key, None)

    def forget_job(self, job: JobId) -> None:
        for key in [key for key in self._leases if key.job == job]:
            del self._leases[key]

    def expired(self, now: float) -> list[Expired]:
        """Leases that have run out; each is returned once."""
        out = []
        for key, lease in self._leases.items():
            if lease.contact is not Contact.EXPIRED and now - lease.heard >= self._lease_s + lease.extra:
                lease.contact = Contact.EXPIRED
                out.append(Expired(key, now - lease.heard))
        return out

    def next_look(self) -> float | None:
        """The monotonic second at which ``expired`` can next have something to say."""
        return min(
            (
                lease.heard + self._lease_s + lease.extra
                for lease in self._leases.values()
                if lease.contact is not Contact.EXPIRED
            ),
            default=None,
        )

    def forgive(self, now: float, grace_s: float) -> None:
        """We ourselves were held up (stopped, starved of CPU) and may have signs of life unread.

        Leases that would run out now get ``grace_s`` more, once per silence: a controller that is always late must
        still find out who is gone.
        """
        for lease in self._leases.values():
            if lease.contact is not Contact.EXPIRED and not lease.extra and now - lease.heard >= self._lease_s:
                lease.extra = now - lease.heard - self._lease_s + grace_s

    def silent_s(self, key: NodeKey, now: float) -> float | None:
        """Seconds since the last sign of life; ``None`` for a node that nobody has heard."""
        lease = self._leases.get(key)
        return now - lease.heard if lease else None

    def contact(self, key: NodeKey) -> Contact | None:
        lease = self._leases.get(key)
        return lease.contact if lease else None
