"""Clocks of machines that disagree: by how much, from lines that must have been written at the same moment.

Every machine ends the same step, times out of the same collective and loses the same peer at nearly the same moment.
Where two machines tell such a moment, the difference of their times is the difference of their clocks (or of their time
zones); the median over all moments is taken. Machines that share no moment are joined over others that share one with
both.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, deque

from keepstep.core.diagnose.prefix import Line

MOMENTS_KEPT = 2_000
NODES_KEPT = 2_000
"""Machines that are remembered for one moment."""
TOLD_S = 120.0
"""Seconds by which clocks are taken to differ where nothing tells."""
SHARED_S = 20.0
"""Seconds by which a moment that is shared is not shared exactly."""
LONGEST_S = 36 * 3600.0
"""A larger difference is none of clocks or zones: dates are missing."""
_STEP = re.compile(r"\b(?:step|iteration|iter)\b\W{0,6}(\d{1,12})\b", re.IGNORECASE)
_SEQ = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_LOST = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|remote process exited|NCCL communicator was aborted",
    re.IGNORECASE,
)


class Clocks:
    """Learns shared moments, and corrects times."""

    def __init__(self) -> None:
        self._moments: dict[str, dict[str, float]] = {}
        self._offsets: dict[str, float] | None = None

    def learn(self, line: Line) -> None:
        if line.time is None or not line.node:
            return
        text = line.text
        if found := _SEQ.search(text):
            self._moment(f"collective {found[1]} {found[2]}", line.node, line.time)
        elif _LOST.search(text):
            self._moment("a peer was lost", line.node, line.time)
        elif found := _STEP.search(text):
            self._moment(f"step {found[1]}", line.node, line.time)

    def _moment(self, key: str, node: str, time: float) -> None:
        nodes = self._moments.get(key)
        if nodes is None:
            if len(self._moments) >= MOMENTS_KEPT:
                return
            nodes = self._moments[key] = {}
        if len(nodes) < NODES_KEPT:
            nodes.setdefault(node, time)
        self._offsets = None

    def offset(self, node: str) -> float | None:
        """Seconds by which the clock of this machine is ahead of the reference; ``None`` where nothing tells."""
        if self._offsets is None:
            self._offsets = self._estimate()
        return self._offsets.get(node)

    def corrected(self, node: str, time: float) -> float:
        return time - (self.offset(node) or 0.0)

    def tolerance(self, one: str, other: str) -> float:
        """Seconds of a lead of one machine's line over the other's that prove nothing."""
        if one == other:
            return 0.0
        known = self.offset(one) is not None and self.offset(other) is not None
        return SHARED_S if known else TOLD_S

    def _estimate(self) -> dict[str, float]:
        shared = [nodes for nodes in self._moments.values() if len(nodes) > 1]
        if not shared:
            return {}
        often = Counter(node for nodes in shared for node in nodes)
        offsets: dict[str, float] = {}
        # The machine that shares most is the reference of all that can be joined to it.
        start = min(often, key=lambda node: (-often[node], node))
        offsets[start] = 0.0
        open_ends = deque([start])
        while open_ends:
            here = open_ends.popleft()
            apart: dict[str, list[float]] = {}
            for nodes in shared:
                if here in nodes:
                    for node, time in nodes.items():
                        if node not in offsets:
                            apart.setdefault(node, []).append(time - nodes[here])
            for node in sorted(apart):
                middle = statistics.median(apart[node])
                if abs(middle) <= LONGEST_S:
                    offsets[node] = offsets[here] + middle
                    open_ends.append(node)
        return offsets
