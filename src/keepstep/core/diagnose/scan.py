"""Finding the few lines that may matter among millions, at the speed of a few byte operations per block.

A training log says the same things over and over with other numbers. So each line is reduced to its *shape* (small
letters, no digits, no number punctuation), and only a shape that was never met is searched for words that some rule
asks for. Equal bytes give equal answers however they are cut into pieces: lines end at newlines, a long line loses its
middle by its own length, and what is remembered between blocks saves work but decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator

from msgspec import Struct

BLOCK_BYTES = 256 << 10
"""Looked at together; small enough for the processor's cache."""
LONGEST_LINE = 16 << 10
"""Bytes; of a longer line the first and the last half of this are kept."""
SHAPES_REMEMBERED = 200_000
"""Shapes without any interesting word; beyond this the memory starts anew, which costs time only."""
HIT_SHAPES = 8_000
"""Interesting shapes; of further ones only those with a strong word are looked at, as many again."""
STRONG = (b"xid", b"nvrm", b"traceback", b"out of memory", b"kernel panic", b"slurmstepd", b"uncorrectable", b"preempt")
SHORT_WORD = 3
"""Letters; a word so short must stand alone in the line."""
LINES_PER_SHAPE = 6_000
"""Lines of one interesting shape that are read; further ones are counted."""
LINES_READ = 30_000
"""Interesting lines read altogether; further ones are counted."""
DULL_LINES = 3_000
"""Lines without any such word that are read too, two of each shape: they may tell how far a fault reaches."""
FEW_KINDS = 12
"""Up to so many kinds of lines are searched one by one in a block."""
LINES_AFTER_FRAME = 3
"""Lines read after a line of a Python stack: the source line and what follows it, be it as strange as it may."""
TAIL_LINES = 40
"""The last lines are always read: the end of a log nobody knows is its best part."""

GARBLED_SHARE = 0.04
"""Control characters among those of a line, from which on it is no text unless its bytes are valid UTF-8."""
WRONG_SHARE = 0.15
"""Bytes of no valid UTF-8; a line with more of them is no text unless there is a long word in it."""
_WORD = re.compile(rb"[a-z]{6}")

_CONTROL = bytes(code for code in [*range(1, 8), 11, 12, *range(14, 27), *range(28, 32), 127])
_UPPER = bytes(range(ord("A"), ord("Z") + 1))
_SMALL = bytes.maketrans(_UPPER, _UPPER.lower())
_DIGITS = b"0123456789.,:-+\r\t"
_FRAME = b'file "'
_GAP = b" ... "


class Raw(Struct, frozen=True):
    """A line to be read: its number from 1, its bytes."""

    number: int
    data: bytes


def shape(line: bytes) -> bytes:
    """The line without what changes from one repetition to the next."""
    return line.translate(_SMALL, _DIGITS)


def garbled(kind: bytes) -> bool:
    """Whether a shape is that of binary data, in which any short word may turn up by chance."""
    try:
        kind.decode()
        return False
    except UnicodeDecodeError:
        odd = len(kind) - len(kind.translate(None, _CONTROL))
        wrong = kind.decode("utf-8", "replace").count("\ufffd")
        return odd > GARBLED_SHARE * len(kind) or (wrong > WRONG_SHARE * len(kind) and not _WORD.search(kind))


def cut(line: bytes) -> bytes:
    """At most ``LONGEST_LINE`` bytes and a mark, the middle left out."""
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else line[:half] + _GAP + line[-half:]


def _tree(words: list[bytes]) -> bytes:
    """A pattern for any of the words that looks at each letter once: common beginnings are written once."""
    whole = b"" in words
    heads: dict[int, list[bytes]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], []).append(word[1:])
    if whole:
        return b""  # A longer word with this beginning tells nothing more.
    branches = [re.escape(bytes([head])) + _tree(rest) for head, rest in sorted(heads.items())]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[bytes]:
    reduced = sorted({shape(word.encode()) for word in words if shape(word.encode()).strip()})
    short, long = (
        [word for word in reduced if (len(word.strip()) <= SHORT_WORD) is wanted] for wanted in (True, False)
    )
    alone = b"(?<![a-z])" + _tree([word.strip() for word in short]) + b"(?![a-z])" if short else b"(?!)"
    return re.compile((_tree(long) if long else b"(?!)") + b"|" + alone)


class Scanner:
    """Feeds on bytes, gives the lines that hold one of the words.

    Attributes:
        lines: how many the log has had so far.
        bytes: how many bytes were fed.
        unread: interesting lines that were only counted.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = _pattern(tuple(words))
        self._strong = re.compile(b"|".join(STRONG))
        self._dull: set[bytes] = set()
        self._garbled: set[bytes] = set()
        self._hits: dict[bytes, int] = {}
        self._parts: list[bytes] = []
        self._held = 0
        self._goal = BLOCK_BYTES
        self._owed = 0
        self._tail: deque[Raw] = deque(maxlen=TAIL_LINES)
        self._read = 0
        self._dull_read: dict[bytes, int] = {}
        self._last_given = 0
        self.lines = 0
        self.bytes = 0
        self.unread = 0

    def feed(self, data: bytes) -> Iterator[Raw]:
        self.bytes += len(data)
        at = 0
        while at < len(data):
            piece = data[at : at + max(1, self._goal - self._held)]
            at += len(piece)
            self._parts.append(piece)
            self._held += len(piece)
            if self._held >= self._goal:
                yield from self._block()

    def pass_over(self, kind: bytes) -> None:
        """Lines of this shape were read in vain; look at no more of them."""
        if self._hits.pop(kind, None) is not None:
            self._dull.add(kind)

    def finish(self) -> Iterator[Raw]:
        """The rest, and those of the last lines that were not given before."""
        if self._held:
            self._parts.append(b"\n")
            yield from self._block()
        for raw in self._tail:
            kind = shape(raw.data)
            if raw.number > self._last_given and (not garbled(kind) or self._strong.search(kind)):
                yield raw
        self._tail.clear()

    def _block(self) -> Iterator[Raw]:
        data = b"".join(self._parts)
        if b"\0" in data:
            data = data.replace(b"\0", b"")  # Also makes plain text of UTF-16.
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > 2 * LONGEST_LINE:  # A line that does not end: its head and what may become its tail.
            rest = rest[:LONGEST_LINE] + rest[-LONGEST_LINE:]
        self._parts, self._held = [rest], len(rest)
        self._goal = len(rest) + BLOCK_BYTES
        if end:
            yield from self._lines(data[: end - 1])

    def _lines(self, data: bytes) -> Iterator[Raw]:
        shapes = data.translate(_SMALL, _DIGITS).split(b"\n")
        raw: list[bytes] = []
        if max(map(len, shapes)) > LONGEST_LINE // 2:
            raw = [cut(line) for line in data.split(b"\n")]
            shapes = [shape(line) for line in raw]
        kinds = set(shapes)
        self._learn(kinds - self._dull)
        # The order of what follows is the order of the log, whatever the blocks are.
        base, self.lines = self.lines + 1, self.lines + len(shapes)
        raw = raw or data.split(b"\n")
        self._tail.extend(Raw(base + i, cut(raw[i])) for i in range(max(0, len(raw) - TAIL_LINES), len(raw)))
        for i in self._positions(shapes, kinds):
            kind = shapes[i]
            met = self._hits.get(kind)
            if met is None and not self._owed:
                if kind in self._garbled or len(self._dull_read) >= DULL_LINES or self._dull_read.get(kind, 0) > 1:
                    continue
                self._dull_read[kind] = self._dull_read.get(kind, 0) + 1
            if met is not None:
                self._hits[kind] = met + 1
            self._owed -= self._owed > 0
            if (met or 0) < LINES_PER_SHAPE and self._read < LINES_READ:
                self._read += 1
                self._last_given = base + i
                yield Raw(base + i, raw[i])
            else:
                self.unread += 1
            if _FRAME in kind:
                self._owed = LINES_AFTER_FRAME

    def _positions(self, shapes: list[bytes], kinds: set[bytes]) -> Iterable[int]:
        """Where in the block a line may have to be read, in order."""
        wanted = self._hits.keys() & kinds
        if len(self._dull_read) < DULL_LINES:
            wanted |= {kind for kind in kinds - self._garbled if self._dull_read.get(kind, 0) < 2}
        if not wanted:
            return range(min(self._owed, len(shapes)))
        if self._owed or any(_FRAME in kind for kind in wanted):
            return range(len(shapes))
        if len(wanted) > FEW_KINDS:
            return [i for i, kind in enumerate(shapes) if kind in wanted]
        found: list[int] = []
        for kind in wanted:
            i = -1
            with contextlib.suppress(ValueError):
                while True:
                    i = shapes.index(kind, i + 1)
                    found.append(i)
        return sorted(found)

    def _learn(self, fresh: set[bytes]) -> None:
        fresh -= self._hits.keys()
        if not fresh:
            return
        if len(self._dull) > SHAPES_REMEMBERED:
            self._dull.clear()
            self._garbled.clear()
        for kind in sorted(fresh):
            if garbled(kind) and not self._strong.search(kind):
                self._garbled.add(kind)
                self._dull.add(kind)
                continue
            room = len(self._hits) < HIT_SHAPES
            if (room and self._words.search(kind)) or (
                not room and len(self._hits) < 2 * HIT_SHAPES and self._strong.search(kind)
            ):
                self._hits[kind] = 0
            else:
                self._dull.add(kind)
