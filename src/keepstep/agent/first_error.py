"""First error: of all that a process has said, the first lines that look like trouble, each kind once.

Causes come early and echoes late, so the last lines alone mislead. Nothing is read while the process lives: its output
is in files, and a look at the newest piece of them when it has ended costs a few milliseconds. That also holds for a
process that an earlier agent had started, since where its part of a file begins is kept with its slot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

LOOKED_BYTES = 512 << 10
"""Of each stream, from its end. What lies further back did not end the process."""
LINES = 32
CHARS = 400
"""Of one line; the middle of a longer one is left out."""
TOTAL_CHARS = 6_000
FRAMES_KEPT = 8
"""Lines of a Python stack before its exception: the innermost four calls with their source lines."""
STACK_LINES = 400
"""A stack that is longer is no stack."""

_UPPER = bytes(range(ord("A"), ord("Z") + 1))
_SMALL = bytes.maketrans(_UPPER, _UPPER.lower())
_DIGITS = b"0123456789\r\t"
_WORDS = (
    "error|exception|traceback|fail|fatal|panic|xid|nvrm|warn|uncorrect|out of memory|kill|abort|segmentation"
    "|core dump|assert|corrupt|truncat|no space|read-only|stale|quota|timed? ?out|lost|unreachable|refused|denied|reset"
    "|fallen off|not found|no such|cannot|can't|unable|illegal|invalid|mismatch|unexpected|terminat|preempt|evict"
    "|unhandled|broken|closed by|uncaught|exhaust|throttl|slowdown|thermal|overheat|link down|is down"
)
_TROUBLE = re.compile(_WORDS.encode())
_STACK = re.compile(rb"Traceback \(most recent call last\)")
_LABEL = re.compile(rb"(?:\[(?:rank|default)\d+\]:? ?|\d+: )?")
_WITHIN = re.compile(rb"(?:\s+\S|Traceback |During handling|The above exception|\s*$)")


def first_error(err: str, out: str, err_from: int = 0, out_from: int = 0) -> tuple[str, ...]:
    """Lines of stderr, then of stdout, in their order; empty when nothing looks like an error.

    Args:
        err_from, out_from: bytes at which this process' part of the file begins.
    """
    found: list[str] = []
    met: set[bytes] = set()
    room = TOTAL_CHARS
    for path, start in ((err, err_from), (out, out_from)):
        for line in _telling(_newest(path, start), met):
            text = _cut(line.decode("utf-8", "replace").rstrip())
            if len(found) >= LINES or room < len(text):
                return tuple(found)
            found.append(text)
            room -= len(text)
    return tuple(found)


def size(path: str) -> int:
    """Bytes that a file has now; 0 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _newest(path: str, start: int) -> bytes:
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            at = file.seek(max(start, end - LOOKED_BYTES))
            data = file.read(LOOKED_BYTES)
    except OSError:
        return b""
    if at > start:
        data = data[data.find(b"\n") + 1 :]  # half a line
    return data.replace(b"\0", b"")


def _telling(data: bytes, met: set[bytes]) -> Iterator[bytes]:
    """Lines that look like trouble; of each shape (digits aside) the first one. ``met`` is filled with shapes."""
    raw = data.split(b"\n")
    shapes = data.translate(_SMALL, _DIGITS).split(b"\n")
    position = 0
    while position < len(raw):
        kind, line = shapes[position], raw[position]
        position += 1
        if kind in met:
            continue
        if _STACK.search(line):
            end = _stack_end(raw, position - 1)
            yield from _folded(raw[position - 1 : end + 1])
            position = end + 1
            continue
        met.add(kind)
        if _TROUBLE.search(kind):
            yield _last_draw(line)


def _stack_end(raw: list[bytes], start: int) -> int:
    """Where the exception stands that ends the stack (or chain of stacks) that begins at ``start``."""
    for position in range(start + 1, min(len(raw), start + STACK_LINES)):
        line = raw[position]
        inner = line[_LABEL.match(line).end() :]  # type: ignore[union-attr]
        if not _WITHIN.match(inner):
            return position
    return start


def _folded(stack: list[bytes]) -> list[bytes]:
    """A stack without its outer calls."""
    if len(stack) <= FRAMES_KEPT + 2:
        return stack
    return [stack[0], *stack[-FRAMES_KEPT - 1 :]]


def _last_draw(line: bytes) -> bytes:
    """A progress bar draws over itself; what counts is how the line looked at the end."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def _cut(text: str) -> str:
    half = CHARS // 2
    return text if len(text) <= CHARS else f"{text[:half]} ... {text[-half:]}"
