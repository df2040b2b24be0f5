"""Matching: give each of n things exactly one of n others, the best ones first. Pure, small, quick for thousands.

Rows of allowed partners are integers used as sets of bits, so that "everybody whom nobody has been given and who is
allowed here" is one operation of the machine's words. Kuhn's algorithm with breadth-first search, and with the
observation of Hopcroft and Karp that what a failed search has seen can be left alone until more is allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

NOBODY = -1


class Matching:
    """A partial assignment that only ever grows; who has a partner may get another one, but never none.

    Args:
        rows: for each left number, the right numbers that are allowed, in classes: the best class first.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = rows
        self.right_of = [NOBODY] * len(rows)
        self.left_of = [NOBODY] * len(rows)
        self._free = (1 << len(rows)) - 1

    @property
    def complete(self) -> bool:
        return not self._free

    def take(self, left: int, right: int) -> None:
        """Give ``right`` to ``left`` where both are free; quiet where one is not."""
        if self.right_of[left] == NOBODY and self.left_of[right] == NOBODY:
            self._join(left, right)

    def grow(self, classes: int) -> None:
        """Match as many as can be matched within the first ``classes`` classes of every row."""
        useful = (1 << len(self._rows)) - 1
        for left, right in enumerate(self.right_of):
            if right == NOBODY:
                useful &= ~self._search(left, classes, useful)

    def _search(self, start: int, classes: int, useful: int) -> int:
        """Find the shortest chain of changes that gives ``start`` a partner; return what a vain search has seen."""
        came_from: dict[int, int] = {}
        seen, queue = 0, deque([start])
        while queue:
            left = queue.popleft()
            for allowed in self._rows[left][:classes]:
                new = allowed & useful & ~seen
                if new & self._free:
                    self._shift(left, next(bits(new & self._free)), came_from)
                    return 0
                seen |= new
                for right in bits(new):
                    came_from[right] = left
                    queue.append(self.left_of[right])
        return seen

    def _shift(self, left: int, right: int, came_from: dict[int, int]) -> None:
        """Walk the chain back: each on it takes what the next one has left."""
        self._free &= ~(1 << right)
        while True:
            before = self.right_of[left]
            self._join(left, right)
            if before == NOBODY:
                return
            left, right = came_from[before], before

    def _join(self, left: int, right: int) -> None:
        self.right_of[left], self.left_of[right] = right, left
        self._free &= ~(1 << right)


def bits(number: int) -> Iterator[int]:
    """Positions of the ones, from below."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
