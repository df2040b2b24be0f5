"""Forecast: what checkpoints cost on a cluster and what each kind of loss would, worked out before there is one. Pure.

Only arithmetic on what was said: bytes over bandwidth gives the interval that each tier can keep, the placement says
which losses leave a copy, and both together say how many steps would be done again and how long it takes to go on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import Struct

from keepstep.checkpoint.room import copies
from keepstep.model.ids import NodeId
from keepstep.model.placement import Domain, Host, Placement
from keepstep.model.topology import Layout

Tier = Literal["memory", "peer", "local", "remote"]
Source = Literal["memory", "live", "peer", "local", "remote"]
"""Where state comes back from; ``live`` is a data-parallel replica that goes on training."""
DELTA_SHARES = {"fp32": 0.75, "bf16": 0.75, "pure-bf16": 0.5}
"""Size of a generation that holds only what changed, as a share of a full one: Adam, a few dozen steps apart."""
ENCODE_RATE = 10**9
"""Bytes of state per second and node that are compared and packed for it, by four threads."""
DECODE_RATE = 2 * 10**9
"""The same on the way back."""
BYTES_PER_PARAM = {
    ("adam", "fp32"): 12,
    ("adam", "bf16"): 14,
    ("adam", "pure-bf16"): 6,
    ("momentum", "fp32"): 8,
    ("momentum", "bf16"): 10,
    ("momentum", "pure-bf16"): 4,
    ("sgd", "fp32"): 4,
    ("sgd", "bf16"): 6,
    ("sgd", "pure-bf16"): 2,
}
"""Bytes of state per parameter. ``bf16`` keeps an fp32 master copy and fp32 moments beside the weights; ``pure-bf16``
keeps everything in bf16. ``momentum`` stands for every optimizer with one moment (SGD with momentum, Lion, Muon)."""


class Cluster(Struct, frozen=True, kw_only=True):
    """What was said or assumed.

    Attributes:
        rank_bytes: state of one rank.
        copies: ranks that hold the same state (plain data parallelism); 1 where it is sharded.
        rates: bytes per second and node; of ``memory`` per rank, from the device to the host. A tier without a rate
            does not exist.
        overhead: share of a step that a snapshot into memory may take.
        delta_share: size of a difference as a share of a full generation.
        every: steps between durable generations; 0 takes as few as the bandwidth allows.
        mtbf_s: between two faults of the whole job; 0 where nobody knows.
    """

    nodes: int
    ranks_per_node: int
    rank_bytes: int
    step_s: float
    rates: dict[Tier, float]
    copies: int = 1
    overhead: float = 0.01
    every: int = 0
    full_every: int = 1
    delta_share: float = DELTA_SHARES["fp32"]
    mtbf_s: float = 0.0

    @property
    def node_bytes(self) -> int:
        return self.rank_bytes * self.ranks_per_node

    @property
    def durable(self) -> bool:
        return "local" in self.rates or "remote" in self.rates


class TierForecast(Struct, frozen=True, kw_only=True):
    """One tier.

    Attributes:
        bytes: per node and generation, on average where only what changed is kept.
        save_s: from the commit until the generation is complete there.
        least_every: the shortest interval that the bandwidth allows.
        every: steps between generations.
        stall_s: what training waits for at each of them.
        rpo_steps: most steps that are done again when this tier is the newest that is left.
        restore_s: until every rank that lost its state has it again.
        keeps_up: whether ``every`` is not below ``least_every``.
        deltas: whether differences are written; where packing them takes longer than writing in full, they are not.
        young_daly_every: the interval with the least total loss, for a known time between faults.
    """

    tier: Tier
    bytes: int
    save_s: float
    least_every: int
    every: int
    stall_s: float
    rpo_steps: int
    restore_s: float
    keeps_up: bool = True
    deltas: bool = False
    mode: str = ""
    young_daly_every: int | None = None


class Memory(Struct, frozen=True, kw_only=True):
    """Host memory of one node, line by line."""

    lines: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.lines)


class Loss(Struct, frozen=True, kw_only=True):
    """What is lost at once, in the worst of all such cases, and how it comes back.

    Attributes:
        nodes: most nodes that one such loss takes.
        without_copy: most nodes whose copies are lost together with the originals.
        source: the tier that the lost state comes back from; ``None``: training starts anew.
        steps: most steps that are done again; ``None`` where training starts anew.
        seconds: those steps and the way back of the state, without the detection and the new process.
    """

    kind: str
    nodes: int
    without_copy: int
    source: Source | None
    steps: int | None
    seconds: float | None


def memory(cluster: Cluster) -> Memory:
    """What a run with these settings asks for before it starts (``room``), for all ranks of a node."""
    parts = copies(
        has_buddy="peer" in cluster.rates and cluster.nodes > 1,
        durable=cluster.durable,
        full_every=cluster.full_every,
    )
    lines = [(f"{count} {what}" if count > 1 else what, count * cluster.node_bytes) for what, count in parts.items()]
    return Memory(lines=tuple(lines))


def tiers(cluster: Cluster) -> tuple[TierForecast, ...]:
    """Every tier that there is, the fastest first."""
    found = [_memory_tier(cluster)]
    if "peer" in cluster.rates and cluster.nodes > 1:
        save_s = cluster.node_bytes / cluster.rates["peer"]
        every = max(found[0].every, _steps(save_s, cluster.step_s))
        found.append(
            TierForecast(
                tier="peer",
                bytes=cluster.node_bytes,
                save_s=save_s,
                least_every=_steps(save_s, cluster.step_s),
                every=every,
                stall_s=0.0,
                rpo_steps=every,
                restore_s=save_s,
            )
        )
    found += [_durable_tier(cluster, tier, found[0].every) for tier in ("local", "remote") if tier in cluster.rates]
    return tuple(found)


def _memory_tier(cluster: Cluster) -> TierForecast:
    """Blocking where that fits the budget; else beside the next step, as often as the copy is done in time."""
    copy_s = cluster.rank_bytes / cluster.rates["memory"]
    blocking = copy_s <= cluster.overhead * cluster.step_s
    every = 1 if blocking else _steps(copy_s, cluster.step_s)
    return TierForecast(
        tier="memory",
        bytes=cluster.node_bytes,
        save_s=copy_s,
        least_every=every,
        every=every,
        stall_s=copy_s if blocking else 0.0,
        rpo_steps=0 if blocking else every,
        restore_s=copy_s,
        mode="blocking" if blocking else "beside the next step",
        young_daly_every=_young_daly(copy_s if blocking else 0.0, cluster),
    )


def _durable_tier(cluster: Cluster, tier: Literal["local", "remote"], memory_every: int) -> TierForecast:
    whole = cluster.node_bytes // cluster.copies
    rate, share = cluster.rates[tier], cluster.delta_share
    full_s, delta_s = whole / rate, max(whole * share / rate, whole / ENCODE_RATE)
    deltas = cluster.full_every > 1 and (delta_s <= full_s or cluster.every * cluster.step_s >= delta_s)
    rest = cluster.full_every - 1 if deltas else 0  # as many rest on each one that is full
    save_s = (full_s + rest * delta_s) / (1 + rest)
    least = max(_steps(save_s, cluster.step_s), memory_every)
    every = cluster.every or least
    back_s = cluster.node_bytes / rate
    return TierForecast(
        tier=tier,
        bytes=int(whole * (1 + rest * share) / (1 + rest)),
        save_s=save_s,
        least_every=least,
        every=every,
        stall_s=0.0,
        rpo_steps=max(every, least) + _steps(max(full_s, delta_s if deltas else 0.0), cluster.step_s),
        restore_s=back_s + rest * max(back_s * share, cluster.node_bytes / DECODE_RATE),
        keeps_up=every >= least,
        deltas=deltas,
        young_daly_every=_young_daly(full_s, cluster),
    )


def losses(
    cluster: Cluster,
    hosts: Sequence[Host],
    layout: Layout,
    placement: Placement,
    domains: Sequence[Domain],
    found: Sequence[TierForecast],
) -> tuple[Loss, ...]:
    """Every kind of loss, from one process to everything at once."""
    by_tier = {tier.tier: tier for tier in found}
    rows = [_loss(cluster, "process", 0, 0, by_tier["memory"])]
    cases = [(kind, [domain.nodes for domain in domains if domain.kind == kind]) for kind in _kinds(domains)]
    if cluster.nodes > 1:
        cases.append(("two buddies", [(node, home) for node, home in placement.buddy.items() if home is not None]))
    for kind, members in cases:
        most = max(len(nodes) for nodes in members)
        without = max(len(placement.lost_with(nodes)) for nodes in members)
        if cluster.copies > 1 and not any(_last_replica(cluster, hosts, layout, nodes) for nodes in members):
            rows.append(_from_replica(cluster, kind, most, without))
        else:
            rows.append(_loss(cluster, kind, most, without, _holder(by_tier, without)))
    return (*rows, _loss(cluster, "all memory", cluster.nodes, cluster.nodes, _after_power_loss(by_tier)))


def _kinds(domains: Sequence[Domain]) -> list[str]:
    return list(dict.fromkeys(domain.kind for domain in domains))


def _last_replica(cluster: Cluster, hosts: Sequence[Host], layout: Layout, gone: Collection[NodeId]) -> bool:
    """Whether some data-parallel group has no rank outside of these nodes."""
    away = set(gone)
    left: dict[int, int] = {}
    for host in hosts:
        if host.node in away:
            for rank in host.ranks:
                group = (rank - rank // layout.tp % layout.dp * layout.tp) if layout.known else 0
                left[group] = left.get(group, cluster.copies) - 1
    return not all(left.values())


def _holder(by_tier: dict[Tier, TierForecast], without_copy: int) -> TierForecast | None:
    """The newest tier that still has what was lost. A node's own disk is lost with the node."""
    return by_tier.get("remote") if without_copy or "peer" not in by_tier else by_tier["peer"]


def _after_power_loss(by_tier: dict[Tier, TierForecast]) -> TierForecast | None:
    """All memory is gone, the disks are not: the more recent of the durable tiers."""
    left = [tier for tier in by_tier.values() if tier.tier in ("local", "remote")]
    return min(left, key=lambda tier: tier.rpo_steps, default=None)


def _from_replica(cluster: Cluster, kind: str, nodes: int, without_copy: int) -> Loss:
    rate = cluster.rates.get("peer", cluster.rates["memory"])
    return Loss(
        kind=kind,
        nodes=nodes,
        without_copy=without_copy,
        source="live",
        steps=0,
        seconds=cluster.node_bytes / rate,
    )


def _loss(cluster: Cluster, kind: str, nodes: int, without_copy: int, source: TierForecast | None) -> Loss:
    if source is None:
        return Loss(kind=kind, nodes=nodes, without_copy=without_copy, source=None, steps=None, seconds=None)
    return Loss(
        kind=kind,
        nodes=nodes,
        without_copy=without_copy,
        source=source.tier,
        steps=source.rpo_steps,
        seconds=source.rpo_steps * cluster.step_s + source.restore_s,
    )


def _steps(seconds: float, step_s: float) -> int:
    """Whole steps that ``seconds`` take, at least one."""
    return max(1, math.ceil(seconds / step_s - 1e-9))


def _young_daly(cost_s: float, cluster: Cluster) -> int | None:
    """Steps between checkpoints that cost ``cost_s`` each, so that checkpoints and lost work together cost least.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37.
    """
    if not cluster.mtbf_s:
        return None
    if cost_s >= 2 * cluster.mtbf_s:
        return _steps(cluster.mtbf_s, cluster.step_s)
    ratio = cost_s / (2 * cluster.mtbf_s)
    best = math.sqrt(2 * cost_s * cluster.mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
    return _steps(best, cluster.step_s)
