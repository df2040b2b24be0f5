"""Fingerprints: every single change of bits is seen, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepstep.checkpoint.sums import digest
from keepstep.trainer import fingerprint_torch as fingerprint
from keepstep.trainer.fingerprint_torch import Hasher, compare, differing_bits, holds, together, words
from keepstep.trainer.pieces_torch import Live

HASHER = Hasher()
KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def both(tensor: Tensor) -> tuple[int, int]:
    """As host memory and as an accelerator make it."""
    return fingerprint.checksum(tensor), int(HASHER.sum(tensor))


def some(kind: torch.dtype, size: int) -> Tensor:
    source = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return source > 0 if kind == torch.bool else (source * 50).abs().to(kind)


@settings(deadline=None)
@given(st.sampled_from([kind for kind in KINDS if kind != torch.bool]), st.integers(1, 300), st.data())
def test_one_flipped_bit_is_always_seen(kind: torch.dtype, size: int, data: st.DataObject) -> None:
    """Any bit of any element of any kind, the last, incomplete word included."""
    tensor = some(kind, size)
    before = both(tensor)
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = both(tensor)
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_two_flipped_signs_do_not_cancel_each_other() -> None:
    """The highest bit of a word has no place to carry into: two of them would vanish from a plain sum."""
    for one, other in ((1, 3), (1, 65_537 * 2 + 1), (131_073, 7)):
        tensor = some(torch.float32, 300_000)
        before = both(tensor)
        tensor[one], tensor[other] = -tensor[one], -tensor[other]
        assert all(a != b for a, b in zip(before, both(tensor), strict=True))


def test_places_count() -> None:
    """Two elements that have changed places are a change, within a row of factors and across."""
    for one, other in ((0, 2), (5, 131_072 + 5), (4, 140_001)):
        tensor = some(torch.float32, 300_000)
        before = both(tensor)
        tensor[[one, other]] = tensor[[other, one]]
        assert all(a != b for a, b in zip(before, both(tensor), strict=True))


@pytest.mark.parametrize("size", [0, 1, 7, 65_536 * 2, 65_536 * 2 + 1, 65_536 * 2 * 65 + 11])
def test_the_sum_is_what_it_says(size: int) -> None:
    """The same number as whole-number arithmetic without any device gives: rows, blocks and rests are put together
    rightly. (For the largest only its last words are compared by hand.)"""
    tensor = some(torch.float32, size)
    data = [value & fingerprint._MASK for value in words(tensor)[-70_000:].tolist()]
    first = max(0, len(words(tensor)) - 70_000)
    head = tensor.clone()
    head[2 * first :] = 0
    total = 0
    for place, value in enumerate(data, first):
        row, within = divmod(place, fingerprint.ROW)
        factor = ((within + 1) * fingerprint._STEP) | 1
        total += (value ^ value >> 32) * factor * (2 * row + 1)
    assert (int(HASHER.sum(tensor)) - int(HASHER.sum(head)) - total) % 2**64 == 0


def test_the_same_values_give_the_same_number_wherever_they_lie() -> None:
    """A piece of a flat buffer at an odd place, a transposed matrix, a copy: what counts is the logical order."""
    flat = some(torch.float32, 1001)
    matrix = some(torch.float32, 60).view(6, 10)
    for one, other in ((flat[1:], flat[1:].clone()), (matrix.t(), matrix.t().contiguous())):
        assert both(one) == both(other)
    assert both(some(torch.bool, 13)) == both(some(torch.bool, 13).clone())
    assert fingerprint.checksum(flat) == fingerprint._signed(digest(flat.numpy().tobytes()))


def test_a_list_of_numbers_keeps_its_order() -> None:
    """Two tensors that have changed places are a change."""
    assert len({together([1, 2]), together([2, 1]), together([1]), together([3, 0]), together([1, 2, 0])}) >= 4


def test_what_a_rank_holds_tells_pieces_apart_and_not_values() -> None:
    """Equal for the same pieces with other values; another place in the whole, or another shape, is another piece."""
    one = Live("p/a", torch.zeros(4), "param", (8,), (0,))
    assert holds([one]) == holds([one._replace(tensor=torch.ones(4))])
    others = [one._replace(corner=(4,)), one._replace(tensor=torch.zeros(5)), one._replace(name="p/b")]
    assert len({holds([one]), *(holds([other]) for other in others)}) == 4


def test_bits_are_told_by_element_and_place() -> None:
    """Which element, which bit of it, and how many in all."""
    one = torch.zeros(6, dtype=torch.int32)
    other = one.clone()
    other[4] ^= 1 << 20 | 1
    other[5] ^= 1 << 3
    count, bits = differing_bits(one.numpy().tobytes(), other.numpy().tobytes(), 4)
    assert (count, bits) == (3, [[4, 0], [4, 20], [5, 3]])


def test_alone_there_is_nothing_to_compare() -> None:
    """One process is nobody's replica, and that is no disagreement."""
    found = compare([Live("p/a", torch.ones(3), "param")], HASHER)
    assert found.vote.agreed
    assert found.vote.compared == 0


def test_ranks_that_hold_nothing_to_compare_are_not_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that each rank has for itself is left out; having nothing left is nothing in common."""
    monkeypatch.setattr(fingerprint, "gather", lambda value: [value] * 4)
    assert compare([], HASHER).vote.compared == 0
    assert compare([Live("p/a", torch.ones(3), "param")], HASHER).vote.compared == 4
