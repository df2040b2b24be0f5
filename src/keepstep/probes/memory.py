"""Memory patterns: write what is known, read it back. Sees what a module forgets or mixes up; not what ECC mends."""

from __future__ import annotations

import mmap
from collections.abc import Callable

BLOCK = 1024 * 1024
"""Bytes written and compared at a time."""
PATTERNS = (0x55, 0xAA, 0x00, 0xFF)


def examine(blocks: int, seed: int, *, pause: Callable[[], None] = lambda: None) -> list[str]:
    """Fill fresh memory with each pattern, then with numbers that tell each block apart, and read it back.

    Args:
        blocks: MiB to use; given back at the end.
        pause: called between two blocks, so that others have the processor and the memory, too.

    Returns:
        A sentence per block that read otherwise than it was written, the first few of a pattern.
    """
    wrong: list[str] = []
    with mmap.mmap(-1, blocks * BLOCK) as memory:
        for name, make in (*((f"{p:#04x}", _fill(p)) for p in PATTERNS), ("addresses", _address(seed))):
            for number in range(blocks):
                memory[number * BLOCK : (number + 1) * BLOCK] = make(number)
                pause()
            for number in range(blocks):
                read, must = memory[number * BLOCK : (number + 1) * BLOCK], make(number)
                if read != must:
                    at = next(i for i, (a, b) in enumerate(zip(read, must, strict=True)) if a != b)
                    place = f"memory pattern {name}: block {number}, byte {at}"
                    wrong.append(f"{place} is {read[at]:#04x}, not {must[at]:#04x}")
                pause()
    return wrong[:8]


def _fill(byte: int) -> Callable[[int], bytes]:
    block = bytes([byte]) * BLOCK
    return lambda number: block


def _address(seed: int) -> Callable[[int], bytes]:
    return lambda number: ((seed + number) & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") * (BLOCK // 8)
