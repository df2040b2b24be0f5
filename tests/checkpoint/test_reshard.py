"""Resharding against an oracle that moves single elements: any cut into any other, byte for byte."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import reshard
from keepstep.checkpoint.exceptions import LayoutMismatch
from keepstep.checkpoint.reshard import Piece

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def wholes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))


def divide(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut a box in two again and again: any such division, not only grids."""
    corner, shape = box
    dims = [d for d, side in enumerate(shape) if side > 1]
    if depth == 0 or not dims or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, shape[dim] - 1))
    low = corner, (*shape[:dim], at, *shape[dim + 1 :])
    high = (*corner[:dim], corner[dim] + at, *corner[dim + 1 :]), (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    return divide(draw, low, depth - 1) + divide(draw, high, depth - 1)


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(c, c + n) for c, n in zip(*box, strict=True))


class Laid:
    """A tensor, cut and written into the payloads of several ranks."""

    def __init__(self, whole: np.ndarray, boxes: list[Box], ranks: list[int], name: str = "t") -> None:
        self.payloads: dict[int, bytearray] = {}
        self.pieces: list[Piece] = []
        for box, rank in zip(boxes, ranks, strict=True):
            payload = self.payloads.setdefault(rank, bytearray(b"\xee" * (rank % 3)))
            self.pieces.append(
                Piece(name, str(whole.dtype), whole.shape, *box, len(payload), whole.dtype.itemsize, rank)
            )
            payload += np.ascontiguousarray(whole[inside(box)]).tobytes()


def carry_out(laid: Laid, wanted: Piece, limit: int, gap: int) -> bytearray:
    blocks = reshard.plan([wanted], {"t": laid.pieces})
    target = bytearray(b"\xaa" * (wanted.offset + wanted.nbytes + 3))
    for read in reshard.reads(blocks, limit=limit, gap=gap):
        stretch = memoryview(laid.payloads[read.rank])[read.start : read.end]
        assert len(stretch) == read.end - read.start
        for block in read.blocks:
            assert read.start <= block.source
            assert block.end <= read.end
            reshard.copy(block, stretch, read.start, memoryview(target))
    return target


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_cut_becomes_any_other(data: st.DataObject) -> None:
    """Whatever the boxes, the limit of a read and the gap: the wanted box has the oracle's bytes, and nothing around
    it is touched."""
    shape = data.draw(wholes())
    dtype = data.draw(st.sampled_from(["uint8", "float16", "float32", "complex128"]))
    whole = np.frombuffer(np.random.default_rng(1).bytes(prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)
    boxes = divide(data.draw, ((0,) * len(shape), shape), 5)
    ranks = [data.draw(st.integers(0, 4)) for _ in boxes]
    laid = Laid(whole, boxes, ranks)
    corner = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sides = tuple(data.draw(st.integers(1, n - c)) for c, n in zip(corner, shape, strict=True))
    wanted = Piece("t", dtype, shape, corner, sides, data.draw(st.integers(0, 5)), whole.dtype.itemsize)
    limit, gap = data.draw(st.sampled_from([1, 7, 64, 1 << 20])), data.draw(st.sampled_from([0, 5, 1 << 20]))
    target = carry_out(laid, wanted, limit, gap)
    right = np.ascontiguousarray(whole[inside((corner, sides))]).tobytes()
    assert bytes(target) == b"\xaa" * wanted.offset + right + b"\xaa" * 3


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_a_missing_piece_is_named(data: st.DataObject) -> None:
    """Without one of its pieces a tensor is refused, and the region that is named lies in that piece."""
    shape = data.draw(wholes())
    boxes = divide(data.draw, ((0,) * len(shape), shape), 5)
    assume(len(boxes) > 1)
    lost = data.draw(st.integers(0, len(boxes) - 1))
    laid = Laid(np.zeros(shape, "uint8"), boxes, list(range(len(boxes))))
    pieces = [piece for number, piece in enumerate(laid.pieces) if number != lost]
    wanted = Piece("t", "uint8", shape, (0,) * len(shape), shape, 0, 1)
    with pytest.raises(LayoutMismatch, match="tensor t: nobody holds") as caught:
        reshard.plan([wanted], {"t": pieces})
    region = str(caught.value).split("nobody holds [")[1].split("]")[0]
    named = [tuple(map(int, one.split(":"))) for one in region.split(", ")]
    for (low, high), corner, side in zip(named, *boxes[lost], strict=True):
        assert corner <= low < high <= corner + side


def test_overlapping_pieces_are_refused() -> None:
    """Two pieces that are not the same box and share elements: nobody can tell which one is right."""
    wanted = Piece("t", "uint8", (4, 4), (0, 0), (4, 4), 0, 1)
    pieces = [
        Piece("t", "uint8", (4, 4), (0, 0), (3, 4), 0, 1, 0),
        Piece("t", "uint8", (4, 4), (2, 0), (2, 4), 0, 1, 1),
    ]
    with pytest.raises(LayoutMismatch, match=r"ranks 0 and 1 of the checkpoint both hold \[2:3, 0:4\]"):
        reshard.plan([wanted], {"t": pieces})


def test_equal_boxes_are_copies_and_the_nearest_is_used() -> None:
    wanted = Piece("t", "uint8", (4,), (0,), (4,), 0, 1)
    pieces = [Piece("t", "uint8", (4,), (0,), (4,), 0, 1, rank) for rank in (0, 3, 5)]
    assert [block.rank for block in reshard.plan([wanted], {"t": pieces}, near=4)] == [3]
    assert [block.rank for block in reshard.plan([wanted], {"t": pieces}, near=9)] == [5]


@pytest.mark.parametrize(("dtype", "whole"), [("float32", (4,)), ("uint8", (5,))])
def test_another_dtype_or_shape_is_refused(dtype: str, whole: tuple[int, ...]) -> None:
    wanted = Piece("t", "uint8", (4,), (0,), (4,), 0, 1)
    with pytest.raises(LayoutMismatch, match=r"the checkpoint's rank 2 holds"):
        reshard.plan([wanted], {"t": [Piece("t", dtype, whole, (0,), whole, 0, 1, 2)]})


def test_a_tensor_that_nobody_holds_is_named() -> None:
    with pytest.raises(LayoutMismatch, match="tensor t is not in the checkpoint"):
        reshard.plan([Piece("t", "uint8", (1,), (0,), (1,), 0, 1)], {})


def test_an_empty_piece_wants_nothing() -> None:
    assert reshard.plan([Piece("t", "uint8", (4,), (4,), (0,), 0, 1)], {}) == []


def test_reads_are_few_and_bounded() -> None:
    """Small neighbours are read together, a large run in stretches of the limit, cut at its multiples."""
    small = [Piece(f"s{i}", "uint8", (100,), (0,), (100,), i * 100, 1, 0) for i in range(50)]
    blocks = reshard.plan(small, {piece.name: [piece] for piece in small})
    assert [(read.start, read.end) for read in reshard.reads(blocks)] == [(0, 5000)]
    large = Piece("l", "uint8", (1000,), (0,), (1000,), 30, 1, 0)
    cut = reshard.reads(reshard.plan([large], {"l": [large]}), limit=256)
    assert [(read.start, read.end) for read in cut] == [(30, 256), (256, 512), (512, 768), (768, 1024), (1024, 1030)]
