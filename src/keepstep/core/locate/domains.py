"""What ranks of a job may fail together: their device, node, link, parallel group, rack, storage. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from keepstep.model.ids import NodeId
from keepstep.model.topology import Layout, Roster, fold_ranks

DomainKind = Literal["device", "node", "link", "tp", "pp", "dp", "rack", "storage", "job"]

NAMES: Mapping[DomainKind, str] = MappingProxyType(
    {
        "device": "the device of rank",
        "node": "node",
        "link": "link",
        "tp": "tensor-parallel group",
        "pp": "pipeline-parallel group",
        "dp": "data-parallel group",
        "rack": "rack",
        "storage": "storage of",
        "job": "all ranks",
    }
)
"""In this order a domain gets its name where several consist of the same ranks: the smallest repair first."""


class FaultDomain(Struct, frozen=True, kw_only=True):
    """Ranks that look ill together, and the nodes to give up for it."""

    kind: DomainKind
    name: str
    ranks: frozenset[int]
    nodes: tuple[NodeId, ...]

    @property
    def words(self) -> str:
        return f"{NAMES[self.kind]} {self.name}".rstrip()


def domains_of(
    roster: Roster,
    layout: Layout,
    *,
    links: Iterable[tuple[NodeId, NodeId]] = (),
    storage: Mapping[str, Collection[NodeId]] = MappingProxyType({}),
) -> tuple[FaultDomain, ...]:
    """Every domain of a job: devices, nodes, racks, the parallel groups where the layout is known, and what is given.

    Args:
        links: pairs of nodes between which a link is in doubt.
        storage: mounts or servers, and the nodes that use each.
    """
    home = {int(member.rank): member.node for member in roster.members}
    seats: dict[NodeId, list[int]] = {}
    for rank, node in home.items():
        seats.setdefault(node, []).append(rank)
    racks: dict[str, list[NodeId]] = {}
    for place in roster.places:
        if place.rack:
            racks.setdefault(place.rack, []).append(place.node)

    def made(kind: DomainKind, name: str, ranks: Iterable[int]) -> FaultDomain:
        inside = frozenset(ranks)
        return FaultDomain(
            kind=kind, name=name, ranks=inside, nodes=tuple(dict.fromkeys(home[rank] for rank in sorted(inside)))
        )

    def on(nodes: Collection[NodeId]) -> list[int]:
        return [rank for node in nodes for rank in seats.get(node, ())]

    found = [made("device", str(rank), [rank]) for rank in home]
    found += [made("node", node, on([node])) for node in seats]
    found += [made("link", f"{one}-{other}", on([one, other])) for one, other in links]
    found += [made("rack", name, on(nodes)) for name, nodes in racks.items()]
    found += [made("storage", name, on(nodes)) for name, nodes in storage.items()]
    if layout.known and layout.tp * layout.pp * layout.dp == len(home):
        for kind, ranks in _groups(layout):
            found.append(made(kind, fold_ranks(ranks), ranks))
    return tuple(domain for domain in found if domain.ranks)


def _groups(layout: Layout) -> Iterable[tuple[DomainKind, list[int]]]:
    """Rank = (pp_index * dp + dp_index) * tp + tp_index."""
    tp, dp, pp = range(layout.tp), range(layout.dp), range(layout.pp)
    for p in pp:
        for d in dp:
            yield "tp", [(p * layout.dp + d) * layout.tp + t for t in tp]
        for t in tp:
            yield "dp", [(p * layout.dp + d) * layout.tp + t for d in dp]
    for d in dp:
        for t in tp:
            yield "pp", [(p * layout.dp + d) * layout.tp + t for p in pp]
