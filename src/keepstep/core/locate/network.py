"""Network: connections that get no answer, put together to the node or the pair of nodes that they have in common.

A node whose own link is down is one end of all of them. Two nodes that reach everybody but each other have the fault
between them, and neither can be told from the other. Anything wider is the fabric, which no eviction mends. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from keepstep.model.facts import StacksTaken
from keepstep.model.ids import NodeId, Rank
from keepstep.model.position import Link
from keepstep.model.topology import Roster

ONE_NODE, PAIR = 0.9, 0.5
"""That the node at the end of all silent connections is at fault; that either one of two is."""
SHOWN = 4


class Cut(Struct, frozen=True, kw_only=True):
    """Attributes:
    nodes: one, two, or none where the silence is everywhere.
    ranks: whose connections they are, on these nodes.
    probability: for each of the nodes.
    """

    nodes: tuple[NodeId, ...]
    ranks: tuple[Rank, ...]
    probability: float
    reason: str
    evidence: tuple[str, ...]


def find_cut(taken: Iterable[StacksTaken], roster: Roster) -> Cut | None:
    """``None`` where every connection gets its answers, or where addresses do not tell the nodes apart."""
    facts = list(taken)
    homes = _homes(facts)
    home = {member.rank: member.node for member in roster.members}
    silent: dict[frozenset[NodeId], list[Link]] = {}
    for fact in facts:
        for link in fact.links:
            here, there = home.get(link.rank), homes.get(_address(link.peer))
            if here is not None and there is not None and here != there:
                silent.setdefault(frozenset((here, there)), []).append(link)
    if not silent:
        return None
    links = [link for found in silent.values() for link in found]
    evidence = tuple(_line(link, home, homes) for link in sorted(links, key=lambda one: -one.timeouts)[:SHOWN])
    common = frozenset.intersection(*silent)
    pairs = [tuple(sorted(pair)) for pair in silent]
    if len(common) == 1 and len(silent) > 1:
        (node,) = common
        reason = f"node {node} and {len(silent)} other nodes do not reach each other: the fault is on its side"
        return _cut((node,), links, home, ONE_NODE, reason, evidence)
    if len(silent) == 1:
        one, other = pairs[0]
        reason = f"nodes {one} and {other} do not reach each other: their connections get no answer"
        return _cut((one, other), links, home, PAIR, reason, evidence)
    reason = f"connections between {len(pairs)} pairs of nodes get no answer: the fabric is at fault, no single node"
    return _cut((), links, home, 0.0, reason, evidence)


def _cut(
    nodes: tuple[NodeId, ...],
    links: Sequence[Link],
    home: dict[Rank, NodeId],
    probability: float,
    reason: str,
    evidence: tuple[str, ...],
) -> Cut:
    ranks = tuple(sorted(rank for rank, node in home.items() if node in nodes))
    return Cut(nodes=nodes, ranks=ranks, probability=probability, reason=reason, evidence=evidence)


def _homes(facts: Sequence[StacksTaken]) -> dict[str, NodeId]:
    """The node of each address; addresses of several nodes (loopback, pretended nodes on one host) tell nothing."""
    found: dict[str, set[NodeId]] = {}
    for fact in facts:
        for address in fact.addresses:
            found.setdefault(address, set()).add(fact.node)
    return {address: next(iter(nodes)) for address, nodes in found.items() if len(nodes) == 1}


def _address(end: str) -> str:
    return end.rpartition(":")[0]


def _line(link: Link, home: dict[Rank, NodeId], homes: dict[str, NodeId]) -> str:
    return (
        f"rank {link.rank} on {home[link.rank]}: {link.unacked:,} bytes to {link.peer} "
        f"({homes.get(_address(link.peer), '?')}) were sent {link.timeouts} times again without an answer"
    )
