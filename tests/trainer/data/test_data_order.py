"""StepData: the order of samples, the end, and what a saved position may be given to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep
from keepstep.trainer.data import Permutation, StepData
from keepstep.trainer.exceptions import StateMismatch
from keepstep.trainer.stream import StepStream


def ranks(samples: int, batch: int, world: int, **options: Any) -> list[StepData[int]]:
    return [StepData(range(samples), batch, rank=rank, world_size=world, **options) for rank in range(world)]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_a_pass_gives_each_sample_exactly_once(samples: int, world: int, batch: int, seed: int) -> None:
    """All ranks together walk a permutation, over the seam between passes too: nothing is left out, nothing twice."""
    data = ranks(samples, batch, world, seed=seed)
    steps = -(-3 * samples // (world * batch))
    used = [sample for _ in range(steps) for one in data for sample in next(one)]
    for turn in range(3):
        assert sorted(used[turn * samples : (turn + 1) * samples]) == list(range(samples))
    assert {one.position for one in data} == {steps * world * batch}


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(1, 2000), st.text(max_size=8))
def test_a_permutation_is_one(size: int, key: str) -> None:
    """Every number exactly once, whatever the size and the key."""
    order = Permutation(size, key)
    assert sorted(order[place] for place in range(size)) == list(range(size))


def test_passes_differ_and_seeds_differ() -> None:
    """Shuffled: another order in each pass and for each seed; not shuffled: the data set's own."""
    one = StepData(range(100), 100, seed=1)
    first, second = next(one), next(one)
    assert first != second
    assert next(StepData(range(100), 100, seed=1)) == first
    assert next(StepData(range(100), 100, seed=2)) != first
    plain = StepData(range(5), 3, shuffle=False)
    assert [next(plain) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert plain.passes_done == 2


@pytest.mark.parametrize(("pad", "steps"), [(False, 3), (True, 4)])
def test_the_end_is_the_same_for_all(pad: bool, steps: int) -> None:
    """20 samples, 6 a step: without padding two are left out, with it four of one more pass are added."""
    data = ranks(10, 3, 2, passes=2, pad=pad)
    used = []
    for left in range(steps, 0, -1):
        assert {one.steps_left for one in data} == {left}
        used += [sample for one in data for sample in next(one)]
    assert {one.steps_left for one in data} == {0}
    for one in data:
        with pytest.raises(StopIteration):
            next(one)
    assert len(used) == 6 * steps
    assert all(used.count(sample) >= (2 if pad else 1) for sample in range(10))


def test_a_position_is_all_there_is_to_remember() -> None:
    """A fresh object at the same position gives the same batches, across passes, to any number of ranks."""
    data = StepData(range(20), 3, seed=4, rank=1, world_size=2)
    for _ in range(2):
        next(data)
    saved = data.state_dict()
    want = [next(data) for _ in range(5)]
    other = StepData(range(20), 3, seed=4, rank=1, world_size=2)
    other.load_state_dict(saved)
    assert [next(other) for _ in range(5)] == want
    wide = ranks(20, 1, 3, seed=4)
    for one in wide:
        one.load_state_dict(one.reshard_state([saved, saved], one._rank, 3))
    line = StepData(range(20), 3, seed=4)
    line.load_state_dict(saved)
    assert [sample for one in wide for sample in next(one)] == next(line)


def test_a_failing_sample_does_not_move_the_position() -> None:
    """An error in the data set leaves the batch to be taken again."""

    class Fragile(list[int]):
        broken = True

        def __getitem__(self, index: Any) -> Any:
            if index == 4 and self.broken:
                raise OSError("disk")
            return super().__getitem__(index)

    dataset = Fragile(range(10))
    data = StepData(dataset, 3, shuffle=False)
    next(data)
    with pytest.raises(OSError, match="disk"):
        next(data)
    dataset.broken = False
    assert next(data) == [3, 4, 5]


def test_other_data_is_refused_in_words() -> None:
    """Another seed, length or order would make the position mean other samples; each is named with both values."""
    saved = StepData(range(20), 3, seed=4).state_dict()
    with pytest.raises(StateMismatch, match="seed 4, this run has 5"):
        StepData(range(20), 3, seed=5).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="samples 20, this run has 21"):
        StepData(range(21), 3, seed=4).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="shuffle True, this run has False"):
        StepData(range(20), 3, seed=4, shuffle=False).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="format 9, this version of keepstep knows up to 2"):
        StepData(range(20), 3, seed=4).load_state_dict(saved | {"format": 9})
    with pytest.raises(StateMismatch, match=r"another kind of data \(places\) than this run uses \(stream\)"):
        StepStream([1, 2], 1).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="rank 0 has saved position 0 and rank 2 6"):
        StepData(range(20), 3).reshard_state([saved, saved, saved | {"position": 6}], 0, 1)
    with pytest.raises(StateMismatch, match="no rank has saved"):
        StepData(range(20), 3).reshard_state([], 0, 1)


def test_impossible_places_are_refused() -> None:
    """Said when the object is made, with the value."""
    for options, words in [
        ({"rank": 2, "world_size": 2}, r"rank \(2\) must lie between 0 and world_size \(2\)"),
        ({"batch_size": 0}, r"batch_size \(0\)"),
        ({"passes": 0}, r"passes \(0\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            StepData(range(9), **{"batch_size": 1, **options})
    with pytest.raises(ValueError, match="empty"):
        StepData([], 1)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(0, 60))
def test_a_position_of_the_first_format_still_loads(samples: int, world: int, batch: int, given_out: int) -> None:
    """It counted a rank's batches and left out the tail of each pass: the next samples are the ones that came then."""
    per_pass = samples // (batch * world)
    if per_pass == 0:
        return
    old = {"position": given_out, "seed": 7, "batch_size": batch, "world_size": world, "samples": samples}
    turn, number = divmod(given_out, per_pass)
    order = Permutation(samples, f"7/{turn}")
    first = number * batch * world
    then = [order[place] for place in range(first, first + batch * world)]
    data = ranks(samples, batch, world, seed=7)
    for one in data:
        one.load_state_dict(old)
    assert [sample for one in data for sample in next(one)] == then


def test_the_public_names_are_there() -> None:
    """All four kinds of data are reached from the package."""
    for name in ("StepData", "StepLoader", "StepStream", "StepShards"):
        assert getattr(keepstep, name).__name__ == name
