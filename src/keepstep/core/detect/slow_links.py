"""Slow links: nobody takes long for himself, all wait, and the traffic of one pair of nodes does not get through.

From the kernel's books of each rank's connections: time in which there was something to send and the network did not
take it, and segments that were lost and sent again. A pair is compared with the other pairs of the same job: a slow
network is no slow link. Where all bad pairs have one node in common, it is that node's port or cable.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from keepstep.core.detect.pace_stats import typical
from keepstep.core.detect.slow_causes import Finding, Where, Window, certainty
from keepstep.model.ids import NodeId
from keepstep.model.pace import LinkPace

Pair = frozenset[NodeId]
FACTOR = 3.0
"""A pair's blocked time must be so many times the others'."""
LOSS = 0.01
"""Share of segments sent again from which a pair counts as bad whatever the others do."""
SEGMENT_BYTES = 1448
"""Payload of one TCP segment on Ethernet."""
FEW_BYTES = 1_000_000
"""Traffic of one window below which a pair is not judged by its losses."""


def slow_links(windows: Sequence[Window], where: Where, share: float) -> list[Finding]:
    """Pairs that every window shows to be bad while all ranks wait; at most one finding.

    Args:
        share: of a step that must be waiting, and of a window that a pair must be blocked.
    """
    if not windows:
        return []
    waits = [typical([p.wait_s for p in w.ranks.values()]) / max(w.step_s, 1e-9) for w in windows]
    if min(waits) < share:
        return []
    bad = set.intersection(*(_bad(window, where, share) for window in windows))
    if not bad:
        return []
    books = _books(windows[-1], where)
    ends = set.intersection(*(set(pair) for pair in bad))
    worst = max(bad, key=lambda pair: books[pair].blocked_s)
    blocked = _blocked(windows, where, worst)
    loss = min(1.0 - 1e-9, blocked, sum(waits) / len(waits))
    culprit = next(iter(ends)) if len(bad) > 1 and len(ends) == 1 else None
    if len(bad) > 1 and culprit is None:
        return []  # bad here and there: it is the network, not a link
    first, second = sorted(worst)
    nodes = (culprit,) if culprit else (first,)
    return [
        Finding(
            cause="link",
            ranks=(),
            nodes=nodes,
            peer=None if culprit else second,
            times=1.0,
            slowdown=round(1.0 / max(0.05, 1.0 - loss), 4),
            probability=certainty(1.5) if culprit else 0.7,
            because=_words(worst, books[worst], blocked, culprit),
            evidence=tuple(_line(pair, books[pair]) for pair in sorted(bad, key=sorted)[:8]),
        )
    ]


def _books(window: Window, where: Where) -> dict[Pair, LinkPace]:
    """Both directions and all ranks of each pair of nodes, in one."""
    found: dict[Pair, LinkPace] = {}
    for rank, pace in window.ranks.items():
        for link in pace.links:
            other = where.hosts.get(link.host)
            if other is None or other == where.nodes[rank]:
                continue
            pair = frozenset({where.nodes[rank], other})
            known = found.get(pair, LinkPace(host=link.host))
            found[pair] = LinkPace(
                host=link.host,
                bytes=known.bytes + link.bytes,
                resent=known.resent + link.resent,
                rtt_ms=max(known.rtt_ms, link.rtt_ms),
                blocked_s=max(known.blocked_s, link.blocked_s),
            )
    return found


def _bad(window: Window, where: Where, share: float) -> set[Pair]:
    books = _books(window, where)
    bad = {pair for pair, link in books.items() if link.bytes >= FEW_BYTES and _loss(link) >= LOSS}
    for pair, link in books.items():
        others = [one.blocked_s for name, one in books.items() if name != pair]
        if others and link.blocked_s >= max(share * window.seconds, FACTOR * median_low(others)):
            bad.add(pair)
    return bad


def _blocked(windows: Sequence[Window], where: Where, pair: Pair) -> float:
    """Share of the time in which the pair was blocked beyond what its likes are."""
    shares = []
    for window in windows:
        books = _books(window, where)
        others = typical([one.blocked_s for name, one in books.items() if name != pair])
        shares.append(max(0.0, books[pair].blocked_s - others) / max(window.seconds, 1e-9))
    return sum(shares) / len(shares)


def _loss(link: LinkPace) -> float:
    return link.resent * SEGMENT_BYTES / max(link.bytes, 1)


def _words(pair: Pair, link: LinkPace, blocked: float, culprit: NodeId | None) -> str:
    lost = f", {_loss(link) * 100:.1f} % of segments sent again" if link.resent else ""
    some = "several of its links are" if culprit else f"the link of {' and '.join(sorted(pair))} is"
    return f"{some} blocked {blocked * 100:.0f} % of the time{lost}, while no rank takes longer for itself"


def _line(pair: Pair, link: LinkPace) -> str:
    return (
        f"{' - '.join(sorted(pair))}: {link.bytes / 1e6:.1f} MB, {link.resent} segments sent again, round trip "
        f"{link.rtt_ms:.2f} ms, blocked {link.blocked_s:.2f} s in the last window"
    )
