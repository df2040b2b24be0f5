"""Flight memory: which collectives a rank has launched, in words that the trainer stores and the agent reads.

One file per slot under ``<node_dir>/flight/<slot>``, beside the heartbeat page and for the same reason: whoever asks
does not need the trainer's help, which may be stopped, stuck in native code, or gone.

    head     16 words
    rows     ``ROWS`` times: ``ROW_WORDS`` words about one stream of operations, then a ring of its newest ``RING``
    text     names and members of groups

A group has one row for its collectives and, once it sends or receives, another one for messages. Words are
native-endian signed 64-bit integers. An entry is complete before ``LAUNCHED`` counts it, and the table of rows only
changes while ``VERSION`` is odd, so a reader can tell what it must not trust.
"""

from __future__ import annotations

from enum import IntEnum

WORD = 8
HEAD_WORDS = 16
ROWS = 128
"""Streams of operations per process; more groups than that are not told."""
ROW_WORDS = 8
RING = 16
ENTRY_WORDS = 5
STRIDE = ROW_WORDS + RING * ENTRY_WORDS
"""Words from one row to the next."""
TEXT_AT = (HEAD_WORDS + ROWS * STRIDE) * WORD
TEXT_SIZE = 64 * 1024
SIZE = TEXT_AT + TEXT_SIZE

LAYOUT = 0x4B53_4601


class Head(IntEnum):
    """Index of each word of the head."""

    LAYOUT = 0
    """``LAYOUT`` once the trainer has made the file."""
    PID = 1
    VERSION = 2
    """Odd while the table of rows changes."""
    ROWS = 3
    """Rows in use, free ones among them included."""
    DROPPED = 4
    """Groups for which there was no row or no room for their names."""


class Row(IntEnum):
    """Index of each word of a row."""

    LAUNCHED = 0
    FINISHED = 1
    TEXT = 2
    """Where the group's name and members are, in bytes from ``TEXT_AT``."""
    LENGTH = 3
    """Of that text; 0: the row is free."""
    MESSAGES = 4
    """1: point-to-point operations of the group, 0: its collectives."""


class Entry(IntEnum):
    """Index of each word of one operation in the ring; operation ``n`` is at ``n % RING``."""

    SEQUENCE = 0
    CODE = 1
    """``op | dtype << 8 | (peer + 1) << 16``"""
    ELEMENTS = 2
    LAUNCHED_NS = 3
    """CLOCK_MONOTONIC."""
    OVER = 4


OPS = (
    "",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""Names of operations by number, as torch's functions are called."""

DTYPES = (
    "",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "other",
)
"""Element types by number."""


def code(op: int, dtype: int, peer: int = -1) -> int:
    """One word of an operation's kind; ``peer`` -1: none."""
    return op | dtype << 8 | (peer + 1) << 16


def read_code(word: int) -> tuple[str, str, int | None]:
    """Operation, element type and peer; what this version does not know is ``other`` or empty."""
    op, dtype, peer = word & 0xFF, word >> 8 & 0xFF, word >> 16
    return (
        OPS[op] if op < len(OPS) else "other",
        DTYPES[dtype] if dtype < len(DTYPES) else "other",
        peer - 1 if peer > 0 else None,
    )
