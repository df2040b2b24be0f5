"""Slow, and why: from windows of step times to findings, each with a cause that is told before anybody is blamed.

The order of the questions is the order of innocence. Is it the data, the interpreter, a snapshot, a neighbour that
takes the processor, or simply more work (input, pipeline stage)? Only what none of these explains is a machine's: heat,
the node, one device of it. Where nobody takes longer for himself and all wait, it is asked which link holds them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Literal

from keepstep.core.detect.pace_stats import Slow, slow_ranks, slowdown, typical
from keepstep.core.detect.slow_evidence import held_back, parts_words
from keepstep.model.ids import NodeId, Rank
from keepstep.model.pace import NodePace, RankPace
from keepstep.model.topology import Layout

Cause = Literal["data", "gc", "save", "starved", "input", "work", "pipeline", "thermal", "link", "node", "device"]
OF_MACHINES: frozenset[Cause] = frozenset({"thermal", "link", "node", "device"})
"""Causes that another machine would cure."""
EXPLAINED = 0.5
"""A part (data, collection, snapshots...) explains an excess when it makes up so much of it."""
DATA_SHARE = 0.25
"""All ranks waiting for data for so much of each step is told, too: it is nobody's machine."""
CROWD = 3
"""More slow nodes than one in so many, and more than one, are no stragglers: the cluster is made of two kinds."""


@dataclass(frozen=True)
class Window:
    """One window of the whole job.

    Attributes:
        machines: what each node said of its own clocks.
        step_s: of the job: the median over ranks.
    """

    number: int
    seconds: float
    ranks: Mapping[Rank, RankPace]
    machines: Mapping[NodeId, NodePace]
    step_s: float

    @cached_property
    def by_own(self) -> list[Rank]:
        """Ranks by their own time, the longest first."""
        return sorted(self.ranks, key=lambda rank: -self.ranks[rank].own_s)

    @cached_property
    def by_work(self) -> list[Rank]:
        """The same by their work."""
        return sorted(self.ranks, key=lambda rank: -self.ranks[rank].work_s)


@dataclass(frozen=True, slots=True)
class Where:
    """Who sits where, and how the ranks are arranged."""

    nodes: Mapping[Rank, NodeId]
    hosts: Mapping[str, NodeId]
    """Nodes by address, as far as an address is one node's alone."""
    layout: Layout

    def stage(self, rank: Rank) -> int:
        """Pipeline stage; ranks of different stages have different work."""
        fits = self.layout.known and self.layout.tp * self.layout.pp * self.layout.dp == len(self.nodes)
        return rank // (self.layout.tp * self.layout.dp) if fits else 0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something is slow. ``times``: own time over that of peers; ``slowdown``: of the whole job."""

    cause: Cause
    ranks: tuple[Rank, ...]
    nodes: tuple[NodeId, ...]
    times: float
    slowdown: float
    probability: float
    because: str
    evidence: tuple[str, ...] = ()
    peer: NodeId | None = None


def judge(windows: Sequence[Window], where: Where, share: float) -> list[Finding]:
    """What all of these windows show, the dearest first.

    Args:
        share: of a step that an excess must reach.
    """
    ranks = set.intersection(*(set(window.ranks) for window in windows)) if windows else set()
    if not ranks:
        return []
    groups = _groups(ranks, where)
    found = _starved(windows, where, [one for group in groups for one in _slow(windows, group, share, _own_s)])
    hungry = {rank for one in found for rank in one.ranks}
    slow = {
        one.rank: one for group in groups for one in _slow(windows, group, share, _work_s) if one.rank not in hungry
    }
    found += [*_work(windows, where, slow), *_machines(windows, where, slow)]
    found += _stages(windows, where, ranks, share)
    if not found:
        found += _all_wait_for_data(windows, ranks)
    return sorted(found, key=lambda one: -one.slowdown)


def mean(windows: Sequence[Window], rank: Rank, part: Callable[[RankPace], float]) -> float:
    """Over the windows, per step."""
    return sum(part(window.ranks[rank]) for window in windows) / len(windows)


def certainty(margin: float) -> float:
    """How sure: just beyond the limits in the worst window is a fair guess, far beyond them is as good as certain."""
    return round(min(0.98, 0.7 + 0.1 * (margin - 1.0)), 2)


# ---------------------------------------------------------------- who is slow


def _groups(ranks: set[Rank], where: Where) -> list[list[Rank]]:
    stages: dict[int, list[Rank]] = {}
    for rank in sorted(ranks):
        stages.setdefault(where.stage(rank), []).append(rank)
    return list(stages.values())


Part = Callable[[RankPace], float]
_own_s: Part = lambda pace: pace.own_s  # noqa: E731
_work_s: Part = lambda pace: pace.work_s  # noqa: E731


def _slow(windows: Sequence[Window], group: Sequence[Rank], share: float, part: Part) -> list[Slow]:
    times = [{rank: part(window.ranks[rank]) for rank in group} for window in windows]
    return slow_ranks(times, [window.step_s for window in windows], share)


def _cost(windows: Sequence[Window], ranks: Sequence[Rank], part: Part = _work_s) -> float:
    culprits = set(ranks)
    lost = []
    for window in windows:
        order = window.by_own if part is _own_s else window.by_work
        theirs = [part(window.ranks[rank]) for rank in ranks]
        others = next((part(window.ranks[rank]) for rank in order if rank not in culprits), max(theirs))
        lost.append(max(theirs) - others)
    return round(slowdown(lost, [window.step_s for window in windows]), 4)


# ---------------------------------------------------------------- more work, or held up by it

_PARTS: tuple[tuple[Cause, Callable[[RankPace], float], str], ...] = (
    ("data", lambda pace: pace.data_s, "waits for data"),
    ("gc", lambda pace: pace.gc_s, "collects garbage"),
    ("save", lambda pace: pace.save_s, "is held up by snapshots"),
)


def _starved(windows: Sequence[Window], where: Where, slow: Sequence[Slow]) -> list[Finding]:
    """Ranks that are slow because something else takes the processor."""
    ranks = [one.rank for one in slow]
    because = _beyond(windows, where, ranks, lambda pace: pace.starved_s) if ranks else {}
    mine = [one for one in slow if because[one.rank] >= EXPLAINED * one.excess_s]
    if not mine:
        return []
    worst = max(because[one.rank] for one in mine)
    words = f"is ready to run and has no processor, {worst * 1e3:.0f} ms longer per step than its peers"
    return [_finding(windows, where, "starved", mine, words, part=_own_s)]


def _work(windows: Sequence[Window], where: Where, slow: dict[Rank, Slow]) -> list[Finding]:
    """Take those out of ``slow`` whose excess is no machine's doing."""
    found: list[Finding] = []
    for cause, part, verb in _PARTS if slow else ():
        because = _beyond(windows, where, slow, part)
        mine = [rank for rank, one in slow.items() if because[rank] >= EXPLAINED * one.excess_s]
        if mine:
            worst = max(mine, key=lambda rank: because[rank])
            words = f"{verb} {because[worst] * 1e3:.0f} ms longer per step than its peers"
            found.append(_finding(windows, where, cause, [slow.pop(rank) for rank in mine], words))
    larger = _larger(windows, where, slow)
    mine = [rank for rank, one in slow.items() if larger[rank] >= EXPLAINED * (one.times - 1.0) > 0]
    if mine:
        worst = max(mine, key=lambda rank: larger[rank])
        words = f"is given {larger[worst] * 100:.0f} % more input than its peers"
        found.append(_finding(windows, where, "input", [slow.pop(rank) for rank in mine], words))
    return found


def _typical(windows: Sequence[Window], where: Where, part: Callable[[RankPace], float]) -> dict[int, float]:
    """Per stage, what ranks there have of this part."""
    found: dict[int, list[float]] = {}
    for rank in windows[0].ranks:
        if all(rank in window.ranks for window in windows):
            found.setdefault(where.stage(rank), []).append(mean(windows, rank, part))
    return {stage: median_low(values) for stage, values in found.items()}


def _beyond(
    windows: Sequence[Window], where: Where, slow: Iterable[Rank], part: Callable[[RankPace], float]
) -> dict[Rank, float]:
    """What each of these has of it beyond its peers, seconds per step."""
    usual = _typical(windows, where, part)
    return {rank: mean(windows, rank, part) - usual[where.stage(rank)] for rank in slow}


def _larger(windows: Sequence[Window], where: Where, slow: Mapping[Rank, Slow]) -> dict[Rank, float]:
    """By how much their input is larger; 0 where the sizes are not known."""
    if not slow:
        return {}
    usual = _typical(windows, where, lambda pace: pace.size)
    return {
        rank: mean(windows, rank, lambda pace: pace.size) / usual[stage] - 1.0 if usual[stage] > 0 else 0.0
        for rank in slow
        for stage in (where.stage(rank),)
    }


def _finding(
    windows: Sequence[Window], where: Where, cause: Cause, slow: Sequence[Slow], because: str, *, part: Part = _work_s
) -> Finding:
    ranks = tuple(sorted(one.rank for one in slow))
    return Finding(
        cause=cause,
        ranks=ranks,
        nodes=tuple(dict.fromkeys(where.nodes[rank] for rank in ranks)),
        times=round(max(one.times for one in slow), 3),
        slowdown=_cost(windows, ranks, part),
        probability=certainty(min(one.margin for one in slow)),
        because=because,
        evidence=tuple(parts_words(rank, where.nodes[rank], [w.ranks[rank] for w in windows]) for rank in ranks[:8]),
    )


# ---------------------------------------------------------------- machines


def _machines(windows: Sequence[Window], where: Where, slow: Mapping[Rank, Slow]) -> list[Finding]:
    by_node: dict[NodeId, list[Slow]] = {}
    for rank, one in slow.items():
        by_node.setdefault(where.nodes[rank], []).append(one)
    sizes = Counter(where.nodes.values())
    if len(by_node) > max(1, len(sizes) // CROWD):
        return []
    found = []
    for node, ones in by_node.items():
        heat = held_back(node, [window.machines for window in windows])
        whole = len(ones) == sizes[node]
        if heat:
            found.append(_finding(windows, where, "thermal", ones, heat))
        elif whole:
            many = f"all {len(ones)} ranks of it are slow" if len(ones) > 1 else "the only rank of its node"
            found.append(_finding(windows, where, "node", ones, many))
        else:
            words = "other ranks of its node are not"
            found += [_finding(windows, where, "device", [one], words) for one in ones]
    return found


# ---------------------------------------------------------------- everybody's trouble


def _stages(windows: Sequence[Window], where: Where, ranks: set[Rank], share: float) -> list[Finding]:
    """A pipeline stage that is slow as a whole has more layers, not worse machines."""
    groups = _groups(ranks, where)
    if len(groups) < 2:
        return []
    own = [
        {Rank(stage): typical([w.ranks[rank].work_s for rank in group]) for stage, group in enumerate(groups)}
        for w in windows
    ]
    found = []
    for one in slow_ranks(own, [window.step_s for window in windows], share):
        group = groups[one.rank]
        found.append(
            Finding(
                cause="pipeline",
                ranks=tuple(group),
                nodes=(),
                times=round(one.times, 3),
                slowdown=_cost(windows, group),
                probability=0.6,
                because=f"stage {one.rank} of {len(groups)} has more work than the others: cut it elsewhere",
            )
        )
    return found


def _all_wait_for_data(windows: Sequence[Window], ranks: set[Rank]) -> list[Finding]:
    # Where processors are short, loading in this process is slow as everything else is.
    shares = [
        typical([max(0.0, p.data_s - p.starved_s) for p in (w.ranks[rank] for rank in ranks)]) / max(w.step_s, 1e-9)
        for w in windows
    ]
    if min(shares) < DATA_SHARE:
        return []
    share = sum(shares) / len(shares)
    return [
        Finding(
            cause="data",
            ranks=tuple(sorted(ranks)),
            nodes=(),
            times=1.0,
            slowdown=round(1.0 / max(0.05, 1.0 - share), 4),
            probability=0.9,
            because=f"every rank waits for data for {share * 100:.0f} % of its step: storage or loading, no machine",
        )
    ]
