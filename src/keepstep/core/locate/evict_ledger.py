"""Over-eviction, kept account of: nodes that went without proof are examined together and come back within minutes.

Evicting a whole parallel group costs six or seven healthy nodes for each faulty one (ByteRobust, SOSP '25).
That is a fair price only if it is paid back: each node that went on suspicion is a debt until an examination has
cleared it or convicted it. What one examination is about is all nodes that are out and untested, whichever incident
took them, since they can fill each other's groups. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec import Struct

from keepstep.core.exceptions import IllegalMove
from keepstep.core.locate.evict import EvictionVerdict
from keepstep.model.ids import Nanos, NodeId

EvictedState = Literal["EVICTED", "EXAMINING", "RETURNED", "CONFIRMED"]

TRANSITIONS: Mapping[EvictedState, tuple[EvictedState, ...]] = MappingProxyType(
    {
        # Out on suspicion; a person may confirm or return it without an examination.
        "EVICTED": ("EXAMINING", "RETURNED", "CONFIRMED"),
        # Runs in replay groups; back to EVICTED when the examination ended without an answer about it.
        "EXAMINING": ("EVICTED", "RETURNED", "CONFIRMED"),
        # In the pool again, and on probation there.
        "RETURNED": (),
        # Faulty: a case for repair.
        "CONFIRMED": (),
    }
)
OPEN: tuple[EvictedState, ...] = ("EVICTED", "EXAMINING")


class Evicted(Struct, frozen=True, kw_only=True):
    """One eviction of one node. ``at`` is the moment of the latest move."""

    node: NodeId
    state: EvictedState
    evicted_at: Nanos
    at: Nanos
    suspicion: float
    why: str


class Ledger(Struct, frozen=True, kw_only=True):
    """All evictions, oldest first; a node that was returned may appear again."""

    entries: tuple[Evicted, ...] = ()

    def open(self, *states: EvictedState) -> tuple[Evicted, ...]:
        return tuple(entry for entry in self.entries if entry.state in (states or OPEN))


class Balance(Struct, frozen=True, kw_only=True):
    """What over-eviction has cost: ``node_s`` counts healthy nodes from their eviction to their return."""

    evicted: int
    confirmed: int
    innocent: int
    untested: int
    node_s: float
    median_return_s: float | None
    reason: str


def evict(ledger: Ledger, verdict: EvictionVerdict, now: Nanos) -> Ledger:
    """Enter the nodes of a verdict that evicts; nodes that are out already keep their entry (a quiet success)."""
    assert verdict.action in ("evict", "evict_and_examine"), f"a verdict to {verdict.action} evicts nobody"
    gone = {entry.node for entry in ledger.open()}
    each = verdict.probability / len(verdict.nodes) if verdict.nodes else 0.0
    fresh = tuple(
        Evicted(node=node, state="EVICTED", evicted_at=now, at=now, suspicion=each, why=verdict.reason)
        for node in verdict.nodes
        if node not in gone
    )
    return Ledger(entries=ledger.entries + fresh)


def examination(ledger: Ledger, good: Sequence[NodeId]) -> tuple[tuple[NodeId, ...], dict[NodeId, float]]:
    """Machines and suspicions for ``replay_search.open_search``: everybody who is untested, and fillers.

    Args:
        good: nodes known to be healthy (standbys that passed their check); they fill groups and are never guilty.
    """
    waiting = {entry.node: entry.suspicion for entry in ledger.open("EVICTED")}
    fillers = [node for node in good if node not in waiting]
    return (*waiting, *fillers), {**waiting, **dict.fromkeys(fillers, 0.0)}


def begin(ledger: Ledger, nodes: Collection[NodeId], now: Nanos) -> Ledger:
    """These nodes are being examined."""
    return _move(ledger, nodes, "EXAMINING", now)


def settle(
    ledger: Ledger,
    now: Nanos,
    *,
    faulty: Collection[NodeId] = (),
    healthy: Collection[NodeId] = (),
    undecided: Collection[NodeId] = (),
) -> Ledger:
    """What an examination, or a person, said: repair, return, or out as before."""
    both = set(faulty) & set(healthy) | set(faulty) & set(undecided) | set(healthy) & set(undecided)
    if both:
        raise IllegalMove(f"{', '.join(sorted(both))} cannot have two outcomes of one examination")
    ledger = _move(ledger, faulty, "CONFIRMED", now)
    ledger = _move(ledger, healthy, "RETURNED", now)
    return _move(ledger, undecided, "EVICTED", now)


def overdue(ledger: Ledger, now: Nanos, within_s: float) -> tuple[NodeId, ...]:
    """Nodes that are out for longer than ``within_s`` without an answer: somebody has to hear of them."""
    return tuple(entry.node for entry in ledger.open() if (now - entry.evicted_at) / 1e9 > within_s)


def balance(ledger: Ledger) -> Balance:
    """How many were innocent, and what they missed."""
    returned = [entry for entry in ledger.entries if entry.state == "RETURNED"]
    away = [(entry.at - entry.evicted_at) / 1e9 for entry in returned]
    confirmed = sum(entry.state == "CONFIRMED" for entry in ledger.entries)
    untested = len(ledger.open())
    middle = statistics.median(away) if away else None
    words = f"{len(ledger.entries)} evicted: {confirmed} faulty, {len(returned)} healthy, {untested} not yet known"
    return Balance(
        evicted=len(ledger.entries),
        confirmed=confirmed,
        innocent=len(returned),
        untested=untested,
        node_s=sum(away),
        median_return_s=middle,
        reason=words if middle is None else f"{words}; the healthy ones were out for {middle:.0f} s in the middle",
    )


def _move(ledger: Ledger, nodes: Collection[NodeId], to: EvictedState, now: Nanos) -> Ledger:
    wanted = set(nodes)
    entries: list[Evicted] = []
    for entry in ledger.entries:
        if entry.node in wanted and entry.state in OPEN:
            wanted.discard(entry.node)
            if entry.state != to:
                if to not in TRANSITIONS[entry.state]:
                    raise IllegalMove(f"{entry.node} cannot go from {entry.state} to {to}")
                entry = msgspec.structs.replace(entry, state=to, at=now)
        entries.append(entry)
    if wanted:
        raise IllegalMove(f"{', '.join(sorted(wanted))} cannot be {to}: not out")
    return Ledger(entries=tuple(entries))
