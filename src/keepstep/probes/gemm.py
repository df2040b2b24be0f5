"""Matrix products whose exact result is known: whole numbers so small that no order of adding them rounds. Pure.

A product of random floats has no golden value: another kernel, thread count or processor adds in another order, and
the last bits differ. Whole numbers do not have that trouble. As long as every partial sum fits the mantissa of the
kind that adds up, all machines of all makes come to the very same bits. What those are is worked out another way: for
any weights ``w``, ``(A B) w = A (B w)``, where the right side takes two products with a vector in 64-bit integers, none
of the units that are under test (Freivalds, 1977). Rows and columns that do not match cross in the wrong element.
"""

from __future__ import annotations

from typing import NamedTuple

MANTISSA = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Bits of whole numbers that a kind holds exactly (2**n and below); of its results, too, which it is rounded to."""
_STEP = 0x9E37_79B9_7F4A_7C15
_MIX = 0xBF58_476D_1CE4_E5B9
MASK = (1 << 64) - 1


class Case(NamedTuple):
    """One product: ``rows x inner`` times ``inner x cols``, entries from ``-most`` to ``most``.

    Attributes:
        kind: of the entries and of the result.
        shared: part of the digest; every machine is able to do it.
    """

    kind: str
    rows: int
    inner: int
    cols: int
    most: int
    shared: bool = True

    @property
    def exact(self) -> bool:
        """Whether no partial sum and no entry can be rounded."""
        return self.most * self.most * self.inner <= 1 << MANTISSA[self.kind]

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.inner * self.cols


CASES = (
    Case("float32", 256, 256, 256, 8),
    Case("float32", 256, 4, 256, 2047),
    Case("float64", 192, 192, 192, 32767),
    Case("bfloat16", 128, 16, 128, 4),
    Case("float16", 128, 32, 128, 8, shared=False),
)
"""Long sums of small numbers, short sums of numbers that fill the mantissa, and the kinds that training uses."""


def entry(seed: int, place: int, most: int) -> int:
    """The number at a place of a matrix, from -``most`` to ``most``; ``gemm_torch`` makes the same by the block."""
    x = (place + 1) * _STEP + seed * _MIX & MASK
    x ^= x >> 31
    x = x * _MIX & MASK
    return (x >> 33) % (2 * most + 1) - most


class Wrong(NamedTuple):
    """A product that is not what it must be. ``row`` and ``col`` are -1 where no single element explains it."""

    case: Case
    row: int
    col: int
    rows: int
    cols: int
    off: int

    def words(self, where: str) -> str:
        """``gemm float32 256x256x256 on core 3: row 17, column 4 is off by 1024``"""
        c = self.case
        what = f"gemm {c.kind} {c.rows}x{c.inner}x{c.cols} on {where}"
        if self.row >= 0:
            return f"{what}: row {self.row}, column {self.col} is off by {self.off}"
        if not self.rows and not self.cols:
            return f"{what}: not whole numbers"
        return f"{what}: {self.rows} rows and {self.cols} columns are wrong"


def locate(case: Case, rows: dict[int, int], cols: dict[int, int]) -> Wrong | None:
    """What is wrong with a product, by the rows and columns whose sums are off, and by how much.

    Args:
        rows, cols: number of the row or column, and its sum less what it must be; those that match are left out.
    """
    if not rows and not cols:
        return None
    if len(rows) == 1 and len(cols) == 1:
        ((row, off),), ((col, _),) = rows.items(), cols.items()
        return Wrong(case, row, col, 1, 1, off)
    return Wrong(case, -1, -1, len(rows), len(cols), 0)
