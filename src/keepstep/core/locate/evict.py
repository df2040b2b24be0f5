"""Which single smallest thing explains the outliers: a device, a node, a link, a parallel group, a rack, or nobody.

When a job hangs or slows down, most ranks look alike and a few do not. They are rarely outliers by chance: they share a
node, or the group in which one of them holds up the others. ByteRobust (SOSP '25) evicts the smallest
parallel group that the outliers share; here each domain is a hypothesis with a prior, and what it explains is weighed
against what it leaves over: members that look healthy, outliers outside. Two more hypotheses keep the innocent safe:
something that all ranks use (storage, the fabric, the code), and outliers that have nothing in common.

If most ranks are outliers, the outliers are not the odd ones, and nobody's node is guilty. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from keepstep.core.locate.domains import NAMES, DomainKind, FaultDomain
from keepstep.model.ids import NodeId
from keepstep.model.topology import fold_ranks

Action = Literal["evict", "evict_and_examine", "examine", "ask", "leave"]

PRIORS: Mapping[DomainKind, float] = MappingProxyType(
    {
        "device": 0.35,
        "node": 0.25,
        "link": 0.05,
        "tp": 0.03,
        "pp": 0.07,
        "dp": 0.03,
        "rack": 0.04,
        "storage": 0.05,
        "job": 0.10,
    }
)
"""How often each kind is the cause, all domains of the kind together: our judgement, no published table has them. They
decide only where the outliers fit two domains about equally well. The rest is ``SCATTERED``."""
SCATTERED = 0.03
"""Prior of outliers that have nothing in common."""
SHOWS = (9.0, 1.0)
"""How many ranks of the faulty domain are outliers: a Beta distribution, nine of ten on average."""
STRAY = (1.0, 99.0)
"""How many ranks outside of it are outliers, too: one of a hundred on average, often none at all.

Distributions and not fixed rates: with a fixed one of a hundred, ten thousand ranks without a stray outlier would be
evidence against every domain."""
ANY = (1.0, 1.0)
"""Outliers that have nothing in common: every number of them is as likely as any other."""
MAJORITY = 0.5
"""Share of the ranks from which on outliers are no longer the odd ones out."""
SHOWN = 3
"""Rejected domains that a verdict names."""
SHARED: tuple[DomainKind, ...] = ("storage", "job")
"""Kinds that no eviction mends."""


class Limit(Struct, frozen=True, kw_only=True):
    """Blast radius: what may be out at the same time without a person's consent, the smaller of both.

    Attributes:
        nodes: about as many as there are standby nodes.
        share: of all nodes of the job; one node is always within it, unless it is the only one.
        confidence: probability below which a domain is examined first and not evicted.
    """

    nodes: int = 8
    share: float = 0.1
    confidence: float = 0.8

    def allowed(self, fleet: int) -> int:
        return min(self.nodes, max(1, int(self.share * fleet)), fleet - 1)


class EvictionVerdict(Struct, frozen=True, kw_only=True):
    """What explains the outliers, and what to do about it.

    Attributes:
        domain: ``None`` where nothing in common was found.
        nodes: to evict or examine; empty when nobody's node is guilty.
        probability: that the fault is in these nodes; of the statement where there are none.
        innocent: nodes among them that are expected to be healthy.
        unexplained: outliers outside of the domain.
    """

    action: Action
    domain: FaultDomain | None
    nodes: tuple[NodeId, ...]
    probability: float
    innocent: float
    unexplained: tuple[int, ...]
    reason: str
    evidence: tuple[str, ...]
    rejected: tuple[str, ...]
    cost_if_wrong: str


def smallest_domain(
    outliers: Collection[int],
    domains: Sequence[FaultDomain],
    *,
    limit: Limit | None = None,
    out: Collection[NodeId] = (),
    examine_s: float = 600.0,
) -> EvictionVerdict:
    """The most probable single explanation of these outliers, and what may be done about it.

    Args:
        outliers: ranks that look unlike the majority.
        domains: all hypotheses; their union is the job.
        out: nodes that are already out, which count against the limit.
        examine_s: what it takes to examine evicted nodes, for the cost.
    """
    limit = limit or Limit()
    ranks = frozenset().union(*(domain.ranks for domain in domains))
    fleet = tuple(dict.fromkeys(node for domain in domains for node in domain.nodes))
    odd = frozenset(outliers) & ranks
    evidence = (f"{len(odd)} of {len(ranks)} ranks are outliers: {fold_ranks(tuple(odd))}",)
    if not odd:
        return _leave("no rank is an outlier", 1.0, None, (), evidence, ())
    if len(odd) > MAJORITY * len(ranks):
        why = "most ranks are outliers, so they are not the odd ones: what all of them use is at fault, and no node is"
        return _leave(why, 1.0, None, (), evidence, ())
    weighed = _weigh(odd, ranks, domains)
    (best, share), others = weighed[0], weighed[1:]
    rejected = tuple(_against(domain, chance, odd) for domain, chance in others[:SHOWN])
    if best is None:
        return _leave("the outliers have nothing in common", share, None, tuple(odd), evidence, rejected)
    left = tuple(sorted(odd - best.ranks))
    covered = len(odd & best.ranks)
    reason = f"{best.words} explains {covered} of {len(odd)} outliers, {covered} of its {len(best.ranks)} ranks are"
    if best.kind in SHARED:
        return _leave(f"{reason}: evicting nodes mends nothing", share, best, left, evidence, rejected)
    # A device of the node, or one node of the group: evicting these nodes mends that, too.
    probability = _held(weighed, best.nodes)
    nodes = tuple(node for node in best.nodes if node not in out)
    if not nodes:
        return _leave(f"{reason}, and its nodes are out already", probability, best, left, evidence, rejected)
    room = limit.allowed(len(fleet)) - len(set(out) & set(fleet))
    if probability < limit.confidence:
        action: Action = "examine"
        reason += f"; {probability:.2f} is below {limit.confidence:g}, so it is examined first"
        nodes, probability = _contenders(weighed, limit, len(fleet))
    elif len(nodes) > room:
        action = "ask"
        reason += f"; its {len(nodes)} nodes are more than the {max(0, room)} that may go without consent"
    else:
        action = "evict" if len(nodes) == 1 else "evict_and_examine"
    innocent = max(0.0, len(nodes) - probability) if len(nodes) > 1 else 1 - probability
    return EvictionVerdict(
        action=action,
        domain=best,
        nodes=nodes,
        probability=probability,
        innocent=innocent,
        unexplained=left,
        reason=reason,
        evidence=evidence,
        rejected=rejected,
        cost_if_wrong=(
            f"{len(nodes)} healthy {'node is' if len(nodes) == 1 else 'nodes are'} out for {examine_s / 60:.0f} min, "
            "as many standbys are used, and the fault stays"
        ),
    )


def most_voted(verdicts: Sequence[EvictionVerdict]) -> EvictionVerdict | None:
    """What more than half of the looks agree upon, for faults that only slow a job down; the surest of them.

    ByteRobust looks five times, ten seconds apart, and takes the group with the most votes. A plain majority of all
    looks is asked for here: slow ranks that wander point at the load and not at a node.
    """
    votes: dict[frozenset[int] | None, list[EvictionVerdict]] = {}
    for verdict in verdicts:
        votes.setdefault(verdict.domain.ranks if verdict.domain else None, []).append(verdict)
    agreed = max(votes.values(), key=len, default=[])
    if 2 * len(agreed) <= len(verdicts):
        return None
    return max(agreed, key=lambda verdict: verdict.probability)


def _weigh(
    odd: frozenset[int], ranks: frozenset[int], domains: Sequence[FaultDomain]
) -> list[tuple[FaultDomain | None, float]]:
    """All explanations with their posterior probability, the best first; ``None`` is: nothing in common."""
    counts: dict[DomainKind, int] = {}
    for domain in domains:
        counts[domain.kind] = counts.get(domain.kind, 0) + 1
    order = list(NAMES)
    named: dict[frozenset[int], FaultDomain] = {}
    prior: dict[frozenset[int], float] = {}
    everything = FaultDomain(kind="job", name="", ranks=ranks, nodes=())
    for domain in sorted([*domains, everything], key=lambda d: order.index(d.kind)):
        named.setdefault(domain.ranks, domain)
        prior[domain.ranks] = prior.get(domain.ranks, 0.0) + PRIORS[domain.kind] / counts.get(domain.kind, 1)
    logs: list[tuple[FaultDomain | None, float]] = [
        (domain, math.log(prior[domain.ranks]) + _fit(odd, ranks, domain.ranks)) for domain in named.values()
    ]
    logs.append((None, math.log(SCATTERED) + _beta(len(odd), len(ranks), ANY)))
    top = max(value for _, value in logs)
    total = sum(math.exp(value - top) for _, value in logs)
    shares = [(domain, math.exp(value - top) / total) for domain, value in logs]
    return sorted(shares, key=lambda pair: (-pair[1], len(pair[0].ranks) if pair[0] else 0))


def _contenders(
    weighed: Sequence[tuple[FaultDomain | None, float]], limit: Limit, fleet: int
) -> tuple[tuple[NodeId, ...], float]:
    """Nodes of the best explanations, as many as it takes to have the fault among them, and how probable that is."""
    nodes: dict[NodeId, None] = {}
    held = 0.0
    for domain, _ in weighed:
        if domain is None or domain.kind in SHARED:
            continue
        more = nodes | dict.fromkeys(domain.nodes)
        if len(more) > limit.allowed(fleet) and nodes:
            break
        nodes = more
        held = _held(weighed, nodes)
        if held >= limit.confidence:
            break
    return tuple(nodes), held


def _held(weighed: Sequence[tuple[FaultDomain | None, float]], nodes: Collection[NodeId]) -> float:
    """Probability that evicting these nodes mends it."""
    inside = set(nodes)
    return sum(chance for d, chance in weighed if d and d.kind not in SHARED and inside.issuperset(d.nodes))


def _fit(odd: frozenset[int], ranks: frozenset[int], inside: frozenset[int]) -> float:
    """Log-likelihood of these outliers if the domain with the ranks ``inside`` is faulty."""
    shown = len(odd & inside)
    stray = len(odd) - shown
    return _beta(shown, len(inside), SHOWS) + _beta(stray, len(ranks) - len(inside), STRAY)


def _beta(some: int, count: int, rate: tuple[float, float]) -> float:
    """Log-probability that exactly these ``some`` of ``count`` are outliers, their rate being Beta-distributed."""
    one, other = rate
    return _log_beta(one + some, other + count - some) - _log_beta(one, other)


def _log_beta(one: float, other: float) -> float:
    return math.lgamma(one) + math.lgamma(other) - math.lgamma(one + other)


def _against(domain: FaultDomain | None, chance: float, odd: frozenset[int]) -> str:
    if domain is None:
        return f"nothing in common: probability {chance:.2g}"
    healthy, stray = len(domain.ranks - odd), len(odd - domain.ranks)
    return (
        f"{domain.words}: probability {chance:.2g}; {healthy} of its ranks look healthy, {stray} outliers are not its"
    )


def _leave(
    reason: str,
    probability: float,
    domain: FaultDomain | None,
    left: tuple[int, ...],
    evidence: tuple[str, ...],
    rejected: tuple[str, ...],
) -> EvictionVerdict:
    return EvictionVerdict(
        action="leave",
        domain=domain,
        nodes=(),
        probability=probability,
        innocent=0.0,
        unexplained=tuple(sorted(left)),
        reason=reason,
        evidence=evidence,
        rejected=rejected,
        cost_if_wrong="a faulty node stays in the job, and its fault strikes again",
    )
