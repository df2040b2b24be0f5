"""Many ranks' output as one text: equal lines of several ranks become one, prefixed by the ranks that wrote it.

Per-rank files carry no times, so the order between ranks is worked out from the lines themselves: a line that others
still have ahead of them waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from keepstep.model.topology import fold_ranks

WINDOW = 64
"""Lines of each rank that are looked at ahead. A rank further behind than this gets a line of its own."""


class Merged(Struct, frozen=True):
    """A line and the ranks that wrote it."""

    ranks: tuple[int, ...]
    line: str


def merge(outputs: Mapping[int, Iterable[str]], window: int = WINDOW) -> Iterator[Merged]:
    """Fold equal lines of different ranks; each rank's own lines keep their order and none is lost."""
    sources = {rank: iter(lines) for rank, lines in outputs.items()}
    ahead: dict[int, deque[str]] = {rank: deque() for rank in sorted(outputs)}
    while True:
        for rank, lines in ahead.items():
            while len(lines) < window and rank in sources:
                try:
                    lines.append(next(sources[rank]))
                except StopIteration:
                    del sources[rank]
        heads = {rank: lines[0] for rank, lines in ahead.items() if lines}
        if not heads:
            return
        chosen = _next_line(heads, ahead)
        ranks = tuple(rank for rank, line in heads.items() if line == chosen)
        for rank in ranks:
            ahead[rank].popleft()
        yield Merged(ranks, chosen)


def _next_line(heads: Mapping[int, str], ahead: Mapping[int, deque[str]]) -> str:
    """The head that fewest other ranks still have ahead of them; then the one of most ranks."""
    best, best_cost = "", (1 << 30, 0)
    for line in dict.fromkeys(heads.values()):
        now = [rank for rank, head in heads.items() if head == line]
        later = sum(1 for rank, lines in ahead.items() if rank not in now and line in lines)
        cost = (later, -len(now))
        if cost < best_cost:
            best, best_cost = line, cost
    return best


def prefix(ranks: tuple[int, ...], nodes: Mapping[int, str]) -> str:
    """``node-017:r136`` for one rank, ``[r0-3]`` for several."""
    if len(ranks) == 1:
        node = nodes.get(ranks[0])
        return f"{node}:r{ranks[0]}" if node else f"r{ranks[0]}"
    return f"[r{fold_ranks(ranks)}]"
