"""Placement: on which other node each node keeps the copies of its ranks' state. Pure, and the same on every node.

A copy is of use only while it is not lost together with the original. What is lost together is a *domain*: a node, a
rack, and each tensor-, data- or pipeline-parallel group, since recovery may give up all nodes of a group at once
(over-eviction; ByteRobust, SOSP '25, section 6.2). So a node's copies go to a node with which it shares none of them:
first by shifting the parallel coordinates, half way round where that makes pairs; where no shift will do, by
matching. Where there is one group only, nodes form pairs, the last three a ring (group placement; Gemini, SOSP '23).

What cannot be honoured is given up in this order: rack, pipeline group, data group, tensor group. Never the node
itself, and never the balance: each node holds the copies of exactly one other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

from msgspec import Struct

from keepstep.model.ids import NodeId
from keepstep.model.matching import NOBODY, Matching, bits
from keepstep.model.topology import Layout

Kind = Literal["tp", "dp", "pp", "rack"]
UNKNOWN = Layout()
KINDS: tuple[Kind, ...] = ("tp", "dp", "pp", "rack")
"""Domains beyond the node, the last one to be given up first."""
NAMES: dict[str, str] = {
    "node": "node",
    "tp": "tensor-parallel group",
    "dp": "data-parallel group",
    "pp": "pipeline-parallel group",
    "rack": "rack",
}


class Host(Struct, frozen=True):
    """A node as the placement sees it."""

    node: NodeId
    ranks: tuple[int, ...]
    rack: str = ""


class Domain(Struct, frozen=True):
    """Nodes that may be lost together. ``name`` is the rack's, or says which ranks form the group."""

    kind: Literal["node", "tp", "dp", "pp", "rack"]
    name: str
    nodes: tuple[NodeId, ...]


class Shortfall(Struct, frozen=True):
    """Nodes whose copies share a domain of this kind with the originals, and why it could not be avoided."""

    kind: Kind
    nodes: tuple[NodeId, ...]
    why: str


class Placement(Struct, frozen=True, kw_only=True):
    """Where each node's copies go.

    Attributes:
        buddy: per node; ``None`` when there is no other node.
        pattern: how it was found, for people.
        shortfalls: what could not be honoured; empty when the loss of any one domain loses no state.
    """

    buddy: dict[NodeId, NodeId | None]
    pattern: str
    shortfalls: tuple[Shortfall, ...] = ()

    def lost_with(self, gone: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Nodes whose state has neither its original nor its copy left when ``gone`` are lost at once."""
        away = set(gone)
        return tuple(node for node, home in self.buddy.items() if node in away and (home is None or home in away))


def fit(layout: Layout, world_size: int) -> Layout:
    """The layout as it is for this many ranks; the number of data-parallel replicas may differ from what was said.

    A world that does not divide into the tensor and pipeline groups has another layout than we know: unknown.
    """
    model = layout.tp * layout.pp
    if not layout.known or world_size % model:
        return UNKNOWN
    return Layout(tp=layout.tp, pp=layout.pp, dp=world_size // model)


def domains(hosts: Sequence[Host], layout: Layout) -> tuple[Domain, ...]:
    """Everything that may be lost at once: nodes, racks, and groups that span nodes (once per set of nodes)."""
    found = [Domain("node", host.node, (host.node,)) for host in hosts]
    for kind in KINDS:
        groups = _racks(hosts) if kind == "rack" else _groups(hosts, layout, kind)
        spans = {nodes: name for name, nodes in reversed(groups.items()) if nodes & (nodes - 1) or kind == "rack"}
        found += [
            Domain(kind, name, tuple(hosts[i].node for i in bits(nodes))) for nodes, name in reversed(spans.items())
        ]
    return tuple(found)


def judge(hosts: Sequence[Host], layout: Layout, homes: Mapping[NodeId, NodeId | None]) -> tuple[Shortfall, ...]:
    """What a placement that is there shares with the originals; nodes without a home are left out."""
    number = {host.node: index for index, host in enumerate(hosts)}
    there = [number.get(homes.get(host.node) or NodeId(""), NOBODY) for host in hosts]
    layout = fit(layout, sum(len(host.ranks) for host in hosts))
    return _shortfalls(hosts, there, [_shared(hosts, layout, kind) for kind in KINDS])


def place(
    hosts: Sequence[Host], layout: Layout = UNKNOWN, previous: Mapping[NodeId, NodeId | None] | None = None
) -> Placement:
    """Give each node the home of its copies.

    Args:
        hosts: in the order of their lowest ranks.
        layout: taken as ``fit`` makes it; see ``Layout`` for the order of ranks.
        previous: where copies are now. They stay where nothing better can be had: a copy that moves has to be made
            again, and until then there is none.
    """
    count = len(hosts)
    if count < 2:
        return Placement(buddy=dict.fromkeys([host.node for host in hosts]), pattern="no other node")
    layout = fit(layout, sum(len(host.ranks) for host in hosts))
    shared = [_shared(hosts, layout, kind) for kind in KINDS]
    rows = [_classes((1 << count) - 1 ^ 1 << i, [masks[i] for masks in shared]) for i in range(count)]
    kept = _indices(hosts, previous or {})
    pattern, wanted = ("kept", kept) if kept else _best(_shapes(hosts, layout), rows)
    ranks = [_class_of(rows[i], home) for i, home in enumerate(wanted)] if wanted else []
    matching = Matching(rows)
    for classes in range(1, len(rows[0]) + 1):
        for i, class_ in enumerate(ranks):
            if class_ == classes - 1:
                matching.take(i, wanted[i])
        if not matching.complete:
            matching.grow(classes)
    assert NOBODY not in matching.right_of, "with two nodes or more everybody has another one"
    if matching.right_of != wanted:
        pattern = f"{pattern}, changed where needed" if wanted else "matching"
    return Placement(
        buddy={host.node: hosts[home].node for host, home in zip(hosts, matching.right_of, strict=True)},
        pattern=pattern,
        shortfalls=_shortfalls(hosts, matching.right_of, shared),
    )


# ---------------------------------------------------------------- domains as sets of bits


def _groups(hosts: Sequence[Host], layout: Layout, kind: str) -> dict[str, int]:
    """The nodes of each parallel group of one kind; none where the group would be a single rank."""
    tp, dp = layout.tp, layout.dp
    if getattr(layout, kind) == 1:
        return {}
    found: dict[int, int] = {}
    for index, host in enumerate(hosts):
        for rank in host.ranks:
            if kind == "tp":
                key = rank - rank % tp
            elif kind == "dp":
                key = rank - rank // tp % dp * tp
            else:
                key = rank % (tp * dp)
            found[key] = found.get(key, 0) | 1 << index
    return {f"that of rank {first}": nodes for first, nodes in sorted(found.items())}


def _racks(hosts: Sequence[Host]) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, host in enumerate(hosts):
        if host.rack:
            found[host.rack] = found.get(host.rack, 0) | 1 << index
    return found


def _shared(hosts: Sequence[Host], layout: Layout, kind: Kind) -> list[int]:
    """For each node, those with which it shares a domain of this kind."""
    shared = [0] * len(hosts)
    groups = _racks(hosts) if kind == "rack" else _groups(hosts, layout, kind)
    for nodes in set(groups.values()):
        for index in bits(nodes):
            shared[index] |= nodes
    return shared


def _classes(others: int, shared: Sequence[int]) -> list[int]:
    """Other nodes by what would have to be given up: nothing first, all kinds of domains last."""
    classes = [others]
    for mask in shared:
        classes = [part for nodes in classes for part in (nodes & ~mask, nodes & mask)]
    return classes


def _class_of(row: Sequence[int], home: int) -> int:
    return next((number for number, nodes in enumerate(row) if home >= 0 and nodes >> home & 1), len(row))


def _indices(hosts: Sequence[Host], previous: Mapping[NodeId, NodeId | None]) -> list[int]:
    """The previous homes by number; empty when none of them is left. New nodes take over from those that are gone."""
    number = {host.node: index for index, host in enumerate(hosts)}
    names = dict.fromkeys([*previous, *(home for home in previous.values() if home is not None)])
    gone = [node for node in names if node not in number]
    taken_over = dict(zip(gone, [host.node for host in hosts if host.node not in names], strict=False))
    homes = [NOBODY] * len(hosts)
    for node, home in previous.items():
        at, there = number.get(taken_over.get(node, node)), home and number.get(taken_over.get(home, home))
        if at is not None and isinstance(there, int):
            homes[at] = there
    return homes if any(home != NOBODY for home in homes) else []


# ---------------------------------------------------------------- regular shapes


def _best(shapes: Iterator[tuple[str, list[int]]], rows: Sequence[Sequence[int]]) -> tuple[str, list[int]]:
    """The shape that gives up least; the first one of equals."""
    best: tuple[int, int] | None = None
    chosen: tuple[str, list[int]] = ("matching", [])
    for name, homes in shapes:
        given_up = [_class_of(rows[i], home) for i, home in enumerate(homes)]
        score = (max(given_up), sum(given_up))
        if best is None or score < best:
            best, chosen = score, (name, homes)
        if best == (0, 0):
            break
    return chosen


def _shapes(hosts: Sequence[Host], layout: Layout) -> Iterator[tuple[str, list[int]]]:
    """Regular placements; those that make pairs come first, since fewer losses of two nodes hurt pairs."""
    shifts = list(_shifts(hosts, layout))
    yield from ((name, homes) for name, homes in shifts if all(homes[home] == i for i, home in enumerate(homes)))
    yield _pairs(hosts)
    yield from shifts


def _shifts(hosts: Sequence[Host], layout: Layout) -> Iterator[tuple[str, list[int]]]:
    """Everybody's coordinates moved by the same amount: half way round an axis, or by one node, or not at all."""
    tp, dp, pp = layout.tp, layout.dp, layout.pp
    per_node = len(hosts[0].ranks)
    if per_node == 0 or not layout.known:
        return
    units = (min(per_node, tp), max(1, per_node // tp), max(1, per_node // (tp * dp)))
    axes = [
        list(dict.fromkeys([length // unit // 2 * unit, unit % length, 0]))
        for length, unit in zip((tp, dp, pp), units, strict=True)
    ]
    at = {rank: index for index, host in enumerate(hosts) for rank in host.ranks}
    for by_pp, by_dp, by_tp in product(axes[2], axes[1], axes[0]):
        homes = []
        for host in hosts:
            first = min(host.ranks, default=0)
            t, d, p = (first + by_tp) % tp, (first // tp + by_dp) % dp, (first // (tp * dp) + by_pp) % pp
            homes.append(at.get((p * dp + d) * tp + t, NOBODY))
        if len(set(homes)) == len(hosts) and all(home not in (NOBODY, i) for i, home in enumerate(homes)):
            moved = [f"{name} +{by}" for name, by in (("pp", by_pp), ("dp", by_dp), ("tp", by_tp)) if by]
            yield f"shift {', '.join(moved)}", homes


def _pairs(hosts: Sequence[Host]) -> tuple[str, list[int]]:
    """Pairs across racks, the last three in a ring: half of the list away when the list is sorted by rack."""
    racks: dict[str, list[int]] = {}
    for index, host in enumerate(hosts):
        racks.setdefault(host.rack or f"\0{index}", []).append(index)
    homes = [NOBODY] * len(hosts)
    left = sorted(racks.values(), key=lambda rack: (-len(rack), -rack[-1]))
    ring: list[int] = []
    if len(hosts) % 2:
        ring = [rack[-1] for rack in left][:3]
        ring = sorted(ring + [index for rack in left for index in rack if index not in ring][: 3 - len(ring)])
        for i, index in enumerate(ring):
            homes[index] = ring[(i + 1) % 3]
    order = [index for rack in left for index in rack if index not in ring]
    if len(left) == len(hosts):
        order.sort()
    half = len(order) // 2
    for one, other in zip(order[:half], order[half:], strict=True):
        homes[one], homes[other] = other, one
    return ("pairs and a ring of three" if ring else "pairs"), homes


# ---------------------------------------------------------------- what could not be had


def _shortfalls(hosts: Sequence[Host], homes: Sequence[int], shared: Sequence[Sequence[int]]) -> tuple[Shortfall, ...]:
    found: dict[tuple[Kind, str], list[NodeId]] = {}
    for kind, masks in zip(KINDS, shared, strict=True):
        for index, home in enumerate(homes):
            if home != NOBODY and masks[index] >> home & 1:
                why = _why(kind, hosts[index], masks[index].bit_count(), len(hosts))
                found.setdefault((kind, why), []).append(hosts[index].node)
    return tuple(Shortfall(kind, tuple(nodes), why) for (kind, why), nodes in found.items())


def _why(kind: Kind, host: Host, sharing: int, count: int) -> str:
    if sharing == count:
        return f"every node shares a {NAMES[kind]} with it"
    if kind == "rack" and 2 * sharing > count:
        return f"rack {host.rack} has {sharing} of {count} nodes, too many for all their copies to lie outside"
    return f"no placement honours everything here, and a {NAMES[kind]} is given up before what comes above it"
