"""Histories: steps, recoveries to any earlier step, other numbers of ranks, other batch sizes; every sample counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from keepstep.trainer.data import Reshardable, StepData
from keepstep.trainer.deal import Dealer
from keepstep.trainer.loader_torch import StepLoader
from keepstep.trainer.shards import StepShards
from keepstep.trainer.stream import StepStream
from tests.trainer.data.sources import SOURCES, through_a_file

MAX_WORLD = 4
MAX_BATCH = 5
BACK = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 12])
"""Steps that a recovery goes back: mostly few, so that histories grow long."""


class History(RuleBasedStateMachine):
    """A job whose ranks are objects in this process."""

    make: Callable[[int, int, int], Any]
    """(rank, world size, batch size) to what that rank trains on."""

    def begin(self, world: int, batch: int) -> None:
        self.world, self.batch = world, batch
        self.ranks = self.build()
        self.committed: list[list[Any]] = []
        """Samples of each committed step, rank after rank."""
        self.saved = [self.save()]
        self.ended = False

    def build(self) -> list[Any]:
        made = [self.make(rank, self.world, self.batch) for rank in range(self.world)]
        assert all(isinstance(one, Reshardable) for one in made)
        return made

    def save(self) -> list[dict[str, Any]]:
        return [through_a_file(one.state_dict()) for one in self.ranks]

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        """All ranks take a batch and commit; at the end all say so in the same step."""
        for _ in range(times):
            batches = [next(one, None) for one in self.ranks]
            if None in batches:
                assert batches == [None] * self.world, "some ranks have ended and some go on"
                assert self.expected_end() in (True, None)
                self.recover(back=0, alive=True, torn=0)
                self.ended = True
                return
            assert self.expected_end() in (False, None)
            self.committed.append([sample for batch in batches for sample in batch])
            self.saved.append(self.save())
            self.ended = False

    def expected_end(self) -> bool | None:
        """Whether this step should have been the end, where that is known beforehand."""
        return None

    @rule(back=BACK, alive=st.booleans(), torn=st.integers(0, MAX_WORLD))
    def recover(self, back: int, alive: bool, torn: int) -> None:
        """Some ranks are in the middle of a step; all go back to a committed one, in place or as new processes."""
        for one in self.ranks[:torn]:
            next(one, None)
        self.ended = False
        keep = max(0, len(self.committed) - back)
        del self.committed[keep:], self.saved[keep + 1 :]
        if not alive:
            self.ranks = self.build()
        self.put_back()

    def put_back(self) -> None:
        states = self.saved[-1]
        if len(states) == self.world:
            for one, state in zip(self.ranks, states, strict=True):
                one.load_state_dict(state)
            return
        for rank, one in enumerate(self.ranks):
            one.load_state_dict(through_a_file(one.reshard_state(states, rank, self.world)))
        self.saved[-1] = self.save()

    @rule(world=st.integers(1, MAX_WORLD), batch=st.integers(1, MAX_BATCH), back=BACK)
    def resize(self, world: int, batch: int, back: int) -> None:
        """The job goes on with another number of ranks, from the newest or an earlier step."""
        self.world, self.batch = world, batch
        self.recover(back, alive=False, torn=0)

    def used(self) -> list[Any]:
        return [sample for step in self.committed for sample in step]


class Lined(History):
    """Data with one line of samples: any stretch of one pass's length, from a pass's start on, holds each once."""

    everything: list[Any]

    @invariant()
    def every_pass_holds_every_sample_once(self) -> None:
        used, size = self.used(), len(self.everything)
        for first in range(0, len(used), size):
            stretch = used[first : first + size]
            assert len(set(stretch)) == len(stretch)
            if len(stretch) == size:
                assert set(stretch) == set(self.everything)


class MapStyleHistory(Lined):
    @initialize(
        samples=st.integers(1, 60),
        world=st.integers(1, MAX_WORLD),
        batch=st.integers(1, MAX_BATCH),
        shuffle=st.booleans(),
        kind=st.sampled_from([StepData, StepLoader]),
    )
    def start(self, samples: int, world: int, batch: int, shuffle: bool, kind: Any) -> None:
        self.everything = list(range(samples))
        options: dict[str, Any] = {"seed": 5, "shuffle": shuffle, "collate": list}
        self.make = lambda rank, world, batch: kind(range(samples), batch, rank=rank, world_size=world, **options)
        self.begin(world, batch)


class StreamHistory(Lined):
    @initialize(
        samples=st.integers(1, 40),
        world=st.integers(1, MAX_WORLD),
        batch=st.integers(1, MAX_BATCH),
        source=st.sampled_from([*SOURCES, "function"]),
    )
    def start(self, samples: int, world: int, batch: int, source: str) -> None:
        self.everything = [(0, number) for number in range(samples)]

        def make(rank: int, world: int, batch: int) -> StepStream:
            if source == "function":
                return StepStream(lambda turn: iter(self.everything), batch, rank=rank, world_size=world)
            return StepStream(SOURCES[source](samples), batch, rank=rank, world_size=world)

        self.make = make
        self.begin(world, batch)


class ShardHistory(History):
    """What was used and what all ranks have left are together whole passes."""

    @initialize(
        lengths=st.lists(st.integers(0, 9), min_size=MAX_WORLD, max_size=9).filter(sum),
        world=st.integers(1, MAX_WORLD),
        batch=st.integers(1, MAX_BATCH),
        source=st.sampled_from(sorted(SOURCES)),
        known=st.booleans(),
        passes=st.none() | st.integers(1, 4),
        pad=st.booleans(),
    )
    def start(
        self, lengths: list[int], world: int, batch: int, source: str, known: bool, passes: int | None, pad: bool
    ) -> None:
        self.lengths, self.passes, self.pad = lengths, passes if known else None, pad
        told = lengths if known else None
        self.dealer = Dealer(len(lengths), seed=2, shuffle=True, lengths=told)

        def make(rank: int, world: int, batch: int) -> StepShards[int]:
            return StepShards(
                range(len(lengths)), lambda shard: SOURCES[source](lengths[shard], shard), batch,
                seed=2, rank=rank, world_size=world, lengths=told, passes=self.passes, pad=pad,
            )  # fmt: skip

        self.make = make
        if not known and min(lengths) == 0:
            lengths[:] = [max(1, length) for length in lengths]  # a rank must not be dealt nothing for ever
        self.begin(world, batch)

    def expected_end(self) -> bool | None:
        if self.passes is None:
            return False
        return None

    @invariant()
    def used_and_left_are_whole_passes(self) -> None:
        states = self.saved[-1]
        turn = max(state["pass"] for state in states)
        if self.passes is not None:
            turn = max(turn, self.passes)
        found = Counter(self.used())
        for state in states:
            pieces = list(state["todo"])
            for late in range(state["pass"], turn):
                pieces += self.dealer.deal(late, state["rank"], state["world_size"])
            for place, start, stop, _ in pieces:
                shard = self.dealer.shard_at(place)
                for number in range(start, self.lengths[shard] if stop is None else stop):
                    found[shard, number] += 1
        assert found == {(s, n): turn for s, length in enumerate(self.lengths) for n in range(length) if turn}

    @invariant()
    def little_is_left_at_the_end(self) -> None:
        if not self.ended or self.passes is None:
            return
        total, used = self.passes * sum(self.lengths), len(self.used())
        if self.pad:
            assert used >= total
        else:
            assert total - used < self.world * (self.batch + 2)


@pytest.mark.parametrize("history", [MapStyleHistory, StreamHistory, ShardHistory], ids=lambda kind: kind.__name__)
def test_every_sample_is_used_exactly_once_per_pass(history: type[History]) -> None:
    """Whatever the order of steps, recoveries and changes of size: committed steps use each sample once in a pass."""
    run_state_machine_as_test(
        history, settings=settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True)
    )
