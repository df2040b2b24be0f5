"""StepShards: dealing, cutting and dealing again; the end; lengths that are not true."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.trainer.deal import Dealer, Piece, count, cut, join
from keepstep.trainer.exceptions import StateMismatch
from keepstep.trainer.shards import StepShards
from tests.trainer.data.sources import Forgetful, Remembering, through_a_file

LENGTHS = [5, 9, 2, 7, 4]


def shards(world: int, batch: int, *, lengths: list[int] | None = LENGTHS, **options: Any) -> list[StepShards[int]]:
    def read(shard: int) -> Forgetful:
        return Forgetful(LENGTHS[shard], shard)

    return [
        StepShards(range(5), read, batch, rank=rank, world_size=world, lengths=lengths, **options)
        for rank in range(world)
    ]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(sum), st.integers(1, 9), st.integers(0, 20))
def test_a_pass_is_dealt_exactly_once(lengths: list[int], world: int, turn: int) -> None:
    """Cut by lengths or dealt whole: every sample of the pass to one rank; cut, no rank gets two more than another."""
    for told in (lengths, None):
        dealer = Dealer(len(lengths), seed=3, shuffle=True, lengths=told)
        dealt = [dealer.deal(turn, rank, world) for rank in range(world)]
        found = sorted(
            (dealer.shard_at(piece.place), number)
            for pieces in dealt
            for piece in pieces
            for number in range(
                piece.start, lengths[dealer.shard_at(piece.place)] if piece.stop is None else piece.stop
            )
        )
        assert found == [(shard, number) for shard, length in enumerate(lengths) for number in range(length)]
        if told:
            assert max(map(count, dealt)) - min(map(count, dealt)) <= 1


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 12))
def test_no_rank_falls_behind_over_many_passes(lengths: list[int], world: int, passes: int) -> None:
    """The larger share goes round: after any number of passes all have had as much, and as much as was foretold."""
    dealer = Dealer(len(lengths), seed=3, shuffle=False, lengths=lengths)
    had = [sum(count(dealer.deal(turn, rank, world)) for turn in range(passes)) for rank in range(world)]
    assert max(had) - min(had) <= 1
    assert dealer.least_and_most(0, passes, world) == (min(had), max(had))


def test_pieces_are_joined_and_cut() -> None:
    """Neighbours become one, the mark of the first stays; an overlap is an error, not a sample used twice."""
    pieces = [Piece(1, 4, 9), Piece(0, 0, 3), Piece(1, 0, 4, (0, {"at": 0}))]
    assert join(pieces) == [Piece(0, 0, 3), Piece(1, 0, 9, (0, {"at": 0}))]
    assert cut(join(pieces), 2, 5) == [Piece(0, 2, 3), Piece(1, 0, 2, (0, {"at": 0}))]
    with pytest.raises(ValueError, match="dealt twice"):
        join([Piece(0, 0, 3), Piece(0, 2, 5)])


@pytest.mark.parametrize(("pad", "steps"), [(False, 9), (True, 9)])
def test_the_number_of_steps_is_known_beforehand(pad: bool, steps: int) -> None:
    """27 samples twice, three ranks, batches of two: nine steps, all ranks end there."""
    ranks = shards(3, 2, passes=2, pad=pad)
    used = []
    for left in range(steps, 0, -1):
        assert {one.steps_left for one in ranks} == {left}
        used += [sample for one in ranks for sample in next(one)]
    assert [next(one, None) for one in ranks] == [None] * 3
    assert sorted(used) == sorted([(s, n) for s, length in enumerate(LENGTHS) for n in range(length)] * 2)


def test_training_longer_than_was_planned() -> None:
    """The saved place is given to a run with more passes, or fewer: the steps follow."""
    ranks = shards(3, 2, passes=2)
    for one in ranks:
        next(one)
    for passes, steps in ((3, 12), (2, 8), (1, 3)):
        other = shards(3, 2, passes=passes)
        for one, old in zip(other, ranks, strict=True):
            one.load_state_dict(through_a_file(old.state_dict()))
        assert {one.steps_left for one in other} == {steps}


def test_a_shard_is_reopened_at_its_place() -> None:
    """A reader that knows its place goes there by itself; the rest of the shard is read once."""
    opened: list[Remembering] = []

    def read(shard: int) -> Remembering:
        opened.append(Remembering(100, shard))
        return opened[-1]

    first = StepShards([0], read, 10)
    for _ in range(3):
        next(first)
    second = StepShards([0], read, 10)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert next(second) == [(0, number) for number in range(30, 40)]
    assert opened[-1].reads == 10


@pytest.mark.parametrize(
    ("wrong", "words"), [(10, "ended after 9 samples where lengths says 10"), (8, "goes on where")]
)
def test_lengths_that_are_not_true_are_found(wrong: int, words: str) -> None:
    """Said too long: the shard ends early. Said too short: it goes on. Neither passes for a sample used once."""
    (one,) = shards(1, 27, lengths=[5, wrong, 2, 7, 4], shuffle=False)
    with pytest.raises(StateMismatch, match=f"shard 1 {words}"):
        next(one)


def test_what_cannot_be_dealt_is_refused() -> None:
    """Each message says the way out."""
    with pytest.raises(ValueError, match="5 shards cannot be dealt to 6 ranks"):
        shards(6, 1, lengths=None)
    assert len(shards(6, 1)) == 6
    with pytest.raises(ValueError, match=r"passes \(2\) needs lengths"):
        shards(1, 1, lengths=None, passes=2)
    with pytest.raises(ValueError, match="4 numbers for 5 shards"):
        shards(1, 1, lengths=[1, 2, 3, 4])
    with pytest.raises(ValueError, match="nor all be 0"):
        shards(1, 1, lengths=[0] * 5)
    empty = StepShards([1, 2], lambda shard: [], 1)
    with pytest.raises(ValueError, match="101 passes without a sample"):
        next(empty)


def test_states_that_do_not_belong_together_are_refused() -> None:
    """Another world size only through all ranks' states; a missing rank, two that differ and other data are named."""
    ranks = shards(3, 2)
    states = [one.state_dict() for one in ranks]
    narrow = shards(2, 2)[1]
    with pytest.raises(StateMismatch, match="rank 0 of 3 has left to read, this process is rank 1 of 2"):
        narrow.load_state_dict(states[0])
    with pytest.raises(StateMismatch, match=r"ranks \[1\] of 3 have left to read is not known"):
        narrow.reshard_state([states[0], states[2]], 1, 2)
    next(ranks[1])
    with pytest.raises(StateMismatch, match="two processes were rank 1 of the data"):
        narrow.reshard_state([*states, ranks[1].state_dict()], 1, 2)
    with pytest.raises(StateMismatch, match="seed 0, this run has 1"):
        shards(3, 2, seed=1)[0].load_state_dict(states[0])
    with pytest.raises(StateMismatch, match=r"passes \(2\) is given now and was not"):
        shards(3, 2, passes=2)[0].load_state_dict(states[0])


def test_peers_that_use_the_same_samples_may_all_bring_their_state() -> None:
    """Tensor-parallel ranks hold equal data states; the deal counts each once."""
    ranks = shards(2, 3)
    used = [sample for one in ranks for sample in next(one)]
    states = [one.state_dict() for one in ranks for _ in range(2)]
    wide = shards(3, 1)
    for one in wide:
        one.load_state_dict(through_a_file(one.reshard_state(states, 0, 6)))
    used += [sample for _ in range(7) for one in wide for sample in next(one)]
    assert sorted(used) == [(s, n) for s, length in enumerate(LENGTHS) for n in range(length)]


@pytest.mark.parametrize("told", [True, False])
def test_ranks_in_different_passes_are_dealt_anew(told: bool) -> None:
    """One rank has begun the second pass, the other still reads the first: nothing of either is lost or doubled."""
    lengths = [3, 8]

    def ranks(world: int) -> list[StepShards[int]]:
        return [
            StepShards(
                range(2), lambda shard: Forgetful(lengths[shard], shard), 1, shuffle=False,
                lengths=lengths if told else None, rank=rank, world_size=world,
            )
            for rank in range(world)
        ]  # fmt: skip

    old = ranks(2)
    used = [sample for _ in range(6 if told else 5) for one in old for sample in next(one)]
    states = [one.state_dict() for one in old]
    assert sorted(state["pass"] for state in states) == [1, 2]
    (one,) = ranks(1)
    state = through_a_file(one.reshard_state(states, 0, 1))
    assert {piece[0] for piece in state["todo"]} == ({2, 3} if told else {1, 2, 3})
    one.load_state_dict(state)
    for passes in (2, 3):  # what was left comes first
        while len(used) < passes * 11:
            used += next(one)
        assert sorted(used) == sorted([(s, n) for s, length in enumerate(lengths) for n in range(length)] * passes)


@pytest.mark.parametrize("kind", [Forgetful, Remembering])
def test_a_step_that_failed_is_taken_again_from_its_first_sample(kind: Any) -> None:
    """Also where it had gone through the end of a shard, and of a pass."""
    failing = itertools.cycle([True, False])

    def collate(samples: list[Any]) -> list[Any]:
        if next(failing):
            raise OSError("out of memory")
        return samples

    def read(shard: int) -> Any:
        return kind(LENGTHS[shard], shard)

    one, twin = StepShards(range(5), read, 13, collate=collate), StepShards(range(5), read, 13)
    used: list[Any] = []
    for _ in range(18):
        try:
            used += next(one)
        except OSError:
            continue
    assert used == [sample for _ in range(9) for sample in next(twin)]
