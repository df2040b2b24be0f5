"""Reshard: which bytes of which parts make up the tensors that a rank wants, whatever the layout was. Pure.

A *piece* is a box of a tensor: a corner and a shape. What is wanted and what is held are pieces of the same whole, cut
differently; their intersections are copied as *blocks* of evenly spaced runs of bytes. Every wanted byte comes from
exactly one place: a hole, or two pieces that overlap without being the same box, is an error that names the region.
Equal boxes are equal copies; one of them is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from msgspec import Struct

from keepstep.checkpoint.exceptions import LayoutMismatch

READ = 8 * 1024 * 1024
"""Bytes of payload that are read, checked and handed out together."""
GAP = 1024 * 1024
"""Unwanted bytes between two wanted ones that are rather read along than asked for separately."""


SMALL = 16 * 1024
"""Runs shorter than this are copied by NumPy: a loop would cost more than the bytes."""


class Piece(Struct, frozen=True, array_like=True):
    """A box of a tensor, and where its bytes begin.

    Attributes:
        whole: shape of the tensor.
        rank: the part that holds it; of no meaning for what is wanted.
        offset: of the box's first byte, in the part's payload or in the memory to be filled.
        item: bytes per element.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    corner: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    item: int
    rank: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item


class Block(Struct, frozen=True, array_like=True):
    """Runs of ``run`` bytes, evenly spaced in ``counts`` dimensions, from one part's payload into memory."""

    rank: int
    source: int
    target: int
    run: int
    counts: tuple[int, ...] = ()
    source_steps: tuple[int, ...] = ()
    target_steps: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Behind the last byte that is read."""
        return self.source + self.run + sum((n - 1) * s for n, s in zip(self.counts, self.source_steps, strict=True))

    @property
    def nbytes(self) -> int:
        return self.run * prod(self.counts)


class Read(Struct, frozen=True):
    """A stretch of one part's payload, and what is taken from it."""

    rank: int
    start: int
    end: int
    blocks: tuple[Block, ...]


def plan(wanted: Iterable[Piece], held: Mapping[str, Sequence[Piece]], *, near: int = 0) -> list[Block]:
    """How to fill the wanted pieces.

    Args:
        held: by name.
        near: the part that is preferred where several hold the same box.

    Raises:
        LayoutMismatch: a tensor is not held, or other than it is wanted, or not wholly, or pieces of it overlap.
    """
    blocks: list[Block] = []
    for piece in wanted:
        if prod(piece.shape):
            blocks += _fill(piece, held.get(piece.name, ()), near)
    return blocks


def _fill(wanted: Piece, held: Sequence[Piece], near: int) -> Iterator[Block]:
    if not held:
        raise LayoutMismatch(f"tensor {wanted.name} is not in the checkpoint; was the model changed?")
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = {}
    for piece in held:
        if (piece.dtype, piece.whole) != (wanted.dtype, wanted.whole):
            raise LayoutMismatch(
                f"tensor {wanted.name}: the checkpoint's rank {piece.rank} holds {piece.dtype} {list(piece.whole)}, "
                f"this process has {wanted.dtype} {list(wanted.whole)}; was the model changed?"
            )
        cut = _meet(wanted.corner, wanted.shape, piece.corner, piece.shape)
        if cut is None:
            continue
        box = piece.corner, piece.shape
        before = found.get(box)
        if before is None or _distance(piece.rank, near) < _distance(before.rank, near):
            found[box] = piece
    cuts = [(piece, *_must_meet(wanted, piece)) for piece in found.values()]
    _refuse_overlap(wanted.name, cuts)
    if sum(prod(shape) for _, _, shape in cuts) != prod(wanted.shape):
        corner, shape = _hole((wanted.corner, wanted.shape), [(corner, shape) for _, corner, shape in cuts])
        raise LayoutMismatch(
            f"tensor {wanted.name}: nobody holds {_region(corner, shape)} of {list(wanted.whole)}; is a part missing?"
        )
    for piece, corner, shape in cuts:
        yield _block(wanted, piece, corner, shape)


def _distance(rank: int, near: int) -> tuple[int, int]:
    return abs(rank - near), rank


def _meet(
    corner: tuple[int, ...], shape: tuple[int, ...], other: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The box that two boxes share."""
    low = tuple(map(max, corner, other))
    sides = tuple(min(a + n, b + m) - c for a, n, b, m, c in zip(corner, shape, other, other_shape, low, strict=True))
    return (low, sides) if all(side > 0 for side in sides) else None


def _must_meet(wanted: Piece, piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...]]:
    cut = _meet(wanted.corner, wanted.shape, piece.corner, piece.shape)
    assert cut is not None
    return cut


def _refuse_overlap(name: str, cuts: Sequence[tuple[Piece, tuple[int, ...], tuple[int, ...]]]) -> None:
    """Sweep along the dimension in which the pieces differ most, so that neighbours only are compared."""
    dims = len(cuts[0][1]) if cuts else 0
    if dims == 0:
        return
    along = max(range(dims), key=lambda d: len({corner[d] for _, corner, _ in cuts}))
    active: list[tuple[Piece, tuple[int, ...], tuple[int, ...]]] = []
    for cut in sorted(cuts, key=lambda cut: cut[1][along]):
        active = [one for one in active if one[1][along] + one[2][along] > cut[1][along]]
        for one in active:
            both = _meet(one[1], one[2], cut[1], cut[2])
            if both is not None:
                raise LayoutMismatch(
                    f"tensor {name}: ranks {one[0].rank} and {cut[0].rank} of the checkpoint both hold "
                    f"{_region(*both)}, cut differently; which of the two is right cannot be known"
                )
        active.append(cut)


def _hole(
    box: tuple[tuple[int, ...], tuple[int, ...]], cuts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One box of what is left of ``box`` when ``cuts`` are taken out of it; there is one."""
    left = [box]
    for cut in cuts:
        left = [rest for one in left for rest in _without(one, cut)]
    return left[0]


def _without(
    box: tuple[tuple[int, ...], tuple[int, ...]], cut: tuple[tuple[int, ...], tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    both = _meet(*box, *cut)
    if both is None:
        yield box
        return
    corner, shape = list(box[0]), list(box[1])
    for dim, (low, side) in enumerate(zip(*both, strict=True)):
        before, behind = low - corner[dim], corner[dim] + shape[dim] - low - side
        if before > 0:
            yield tuple(corner), (*shape[:dim], before, *shape[dim + 1 :])
        if behind > 0:
            yield (*corner[:dim], low + side, *corner[dim + 1 :]), (*shape[:dim], behind, *shape[dim + 1 :])
        corner[dim], shape[dim] = low, side


def _region(corner: Sequence[int], shape: Sequence[int]) -> str:
    return "[" + ", ".join(f"{low}:{low + side}" for low, side in zip(corner, shape, strict=True)) + "]"


def _steps(shape: Sequence[int], item: int) -> list[int]:
    """Bytes from one element to the next, per dimension."""
    steps = [item] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return steps


def _block(wanted: Piece, piece: Piece, corner: tuple[int, ...], shape: tuple[int, ...]) -> Block:
    from_steps, to_steps = _steps(piece.shape, piece.item), _steps(wanted.shape, wanted.item)
    source = piece.offset + sum((a - b) * s for a, b, s in zip(corner, piece.corner, from_steps, strict=True))
    target = wanted.offset + sum((a - b) * s for a, b, s in zip(corner, wanted.corner, to_steps, strict=True))
    run, dim = wanted.item, len(shape) - 1
    while dim >= 0 and from_steps[dim] == run == to_steps[dim]:
        run *= shape[dim]
        dim -= 1
    outer = [d for d in range(dim + 1) if shape[d] > 1]
    return Block(
        piece.rank,
        source,
        target,
        run,
        tuple(shape[d] for d in outer),
        tuple(from_steps[d] for d in outer),
        tuple(to_steps[d] for d in outer),
    )


# -------------------------------------------------------------------- from blocks to reads


def split(block: Block, limit: int = READ) -> Iterator[Block]:
    """The same copy in blocks that each span at most ``limit`` bytes of the source, as far as its runs allow.

    A run is cut where the payload's multiples of ``limit`` lie, so that no checksummed chunk is read for two of them.
    """
    if block.counts and block.end - block.source <= limit:
        yield block
    elif block.counts:
        first, step, onto = block.counts[0], block.source_steps[0], block.target_steps[0]
        inner = Block(
            block.rank, block.source, block.target, block.run, block.counts[1:], block.source_steps[1:],
            block.target_steps[1:],
        )  # fmt: skip
        at_once = max(1, (limit - (inner.end - inner.source)) // step + 1) if step else first
        for begin in range(0, first, at_once):
            count = min(at_once, first - begin)
            source, target = block.source + begin * step, block.target + begin * onto
            if count == 1:
                yield from split(
                    Block(block.rank, source, target, block.run, inner.counts, inner.source_steps, inner.target_steps),
                    limit,
                )
            else:
                yield Block(
                    block.rank, source, target, block.run, (count, *inner.counts), block.source_steps,
                    block.target_steps,
                )  # fmt: skip
    else:
        at = block.source
        while at < block.end:
            until = min(block.end, (at // limit + 1) * limit)
            yield Block(block.rank, at, block.target + at - block.source, until - at)
            at = until


def reads(blocks: Iterable[Block], *, limit: int = READ, gap: int = GAP) -> list[Read]:
    """Few stretches that cover all blocks: neighbours are read together, between two multiples of ``limit``."""
    found: list[Read] = []
    pending: list[Block] = []
    end = 0
    pieces = sorted((s for block in blocks for s in split(block, limit)), key=lambda b: (b.rank, b.source, b.target))
    for block in pieces:
        if pending:
            first = pending[0]
            apart = (
                block.rank != first.rank or block.source > end + gap or block.source // limit != first.source // limit
            )
            if apart or max(end, block.end) - first.source > limit:
                found.append(Read(first.rank, first.source, end, tuple(pending)))
                pending = []
        end = max(end, block.end) if pending else block.end
        pending.append(block)
    if pending:
        found.append(Read(pending[0].rank, pending[0].source, end, tuple(pending)))
    return found


def copy(block: Block, stretch: memoryview, start: int, target: memoryview) -> None:
    """Carry one block out.

    Args:
        stretch: bytes of the payload from ``start`` on.
    """
    at, to = block.source - start, block.target
    if not block.counts:
        target[to : to + block.run] = stretch[at : at + block.run]
    elif block.run < SMALL and _copy_spaced(block, stretch[at:], target[to:]):
        return
    else:
        for place in product(*(range(count) for count in block.counts)):
            a = at + sum(i * step for i, step in zip(place, block.source_steps, strict=True))
            b = to + sum(i * step for i, step in zip(place, block.target_steps, strict=True))
            target[b : b + block.run] = stretch[a : a + block.run]


def _copy_spaced(block: Block, source: memoryview, target: memoryview) -> bool:
    """Many short runs at once; false where NumPy is not installed."""
    try:
        import numpy
        from numpy.lib.stride_tricks import as_strided
    except ImportError:
        return False
    shape = (*block.counts, block.run)
    view = as_strided(numpy.frombuffer(source, numpy.uint8), shape, (*block.source_steps, 1))
    as_strided(numpy.frombuffer(target, numpy.uint8), shape, (*block.target_steps, 1))[...] = view
    return True
