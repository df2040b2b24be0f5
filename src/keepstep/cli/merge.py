"""Many ranks' output as one text, in the order of time; equal lines of several ranks become one.

Where lines carry a time, that decides; a line without one belongs to the line before it. Of what carries no times at
all the order between ranks is worked out from the lines themselves: one that others still have ahead of them waits
for them. Such outputs come behind those with times: when they were written nobody knows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from keepstep.cli.stamps import stamp
from keepstep.model.topology import fold_ranks

WINDOW = 64
"""Lines of each rank that are looked at ahead. A rank further behind than this gets a line of its own."""


class Merged(Struct, frozen=True):
    """A line and the ranks that wrote it."""

    ranks: tuple[int, ...]
    line: str


class _Output:
    """One stream of one rank: its next lines, and the time of the first of them."""

    def __init__(self, stream: int, rank: int, lines: Iterable[str], *, window: int, year: int) -> None:
        self.stream, self.rank = stream, rank
        self.ahead: deque[str] = deque()
        self._times: deque[float | None] = deque()
        self._lines = iter(lines)
        self._window, self._year = window, year
        self._known: float | None = None
        self._fill()

    @property
    def key(self) -> tuple[float, int]:
        """When the next line was written, and on which stream."""
        return math.inf if self._known is None else self._known, self.stream

    def take(self) -> str:
        """The next line."""
        line = self.ahead.popleft()
        self._times.popleft()
        self._fill()
        return line

    def _fill(self) -> None:
        while len(self.ahead) < self._window and (line := next(self._lines, None)) is not None:
            self.ahead.append(line)
            self._times.append(stamp(line, self._year))
        if self._times and self._times[0] is not None:
            self._known = self._times[0]
        elif self._known is None:  # a banner comes right before the first line with a time
            self._known = next((at for at in self._times if at is not None), None)


def merge(*streams: Mapping[int, Iterable[str]], window: int = WINDOW, year: int | None = None) -> Iterator[Merged]:
    """Fold equal lines of different ranks; each rank's own lines keep their order on each stream, and none is lost.

    Args:
        streams: each rank's lines, stdout before stderr. Lines of different streams are never folded.
        year: of times that leave it out; this one.
    """
    year = time.localtime().tm_year if year is None else year
    outputs = [
        _Output(number, rank, stream[rank], window=window, year=year)
        for number, stream in enumerate(streams)
        for rank in sorted(stream)
    ]
    while outputs := [output for output in outputs if output.ahead]:
        first = min(output.key for output in outputs)
        due = [output for output in outputs if output.key == first]
        beside = [output for output in outputs if output.stream == first[1]]
        chosen = _next_line({o.rank: o.ahead[0] for o in due}, {o.rank: o.ahead for o in beside})
        said = [output for output in beside if output.ahead[0] == chosen]
        for output in said:
            output.take()
        yield Merged(tuple(output.rank for output in said), chosen)


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
