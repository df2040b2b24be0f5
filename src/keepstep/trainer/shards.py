"""StepShards: samples in files (shards) that are read in order, each by the rank that it is dealt to.

Ranks read at their own speed through shards of their own, so each rank's state says what it has still to read. When
the number of ranks changes, what all of them have left is put together and dealt again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from keepstep.trainer.deal import Dealer, Piece, count
from keepstep.trainer.exceptions import StateMismatch
from keepstep.trainer.places import agreed, check_format, check_place, steps_within
from keepstep.trainer.reader import Reader
from keepstep.trainer.spent import SPENT

S = TypeVar("S")

KIND = "shards"
FORMAT = 1
EMPTY_PASSES = 100
"""A rank that has been dealt so many passes, and one more per rank, without one sample says so and stops looking."""


class StepShards(Generic[S]):
    """Batches of this rank from its share of the shards; register it and call ``next`` in each step.

    Args:
        shards: names of files, URLs, ranges: anything, in the same order on all ranks and in all runs.
        read: gives the samples of one shard, in the same order whenever it is asked. Where what it returns has
            ``state_dict`` and ``load_state_dict``, a restore goes straight to its place; else it reads up to there.
        batch_size: samples per rank and step.
        lengths: samples of each shard. With them shards are cut so that all ranks have as much to do, one may be
            dealt to many ranks, and the end is known beforehand.
        shuffle: deal the shards in a new order in each pass, the same whenever it is run.
        collate: turns a list of samples into what ``next`` returns; the list itself where left out.
        passes: ends after so many passes, on all ranks at the same step, which takes ``lengths``; never where ``None``.
        pad: at that end, fill the last step up with samples of one more pass instead of leaving its samples out.
    """

    def __init__(
        self,
        shards: Sequence[S],
        read: Callable[[S], Iterable[Any]],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        lengths: Sequence[int] | None = None,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        passes: int | None = None,
        pad: bool = False,
    ) -> None:
        check_place(batch_size, rank=rank, world_size=world_size, passes=passes)
        _check_shards(shards, lengths, world_size=world_size, passes=passes)
        self._shards, self._read_shard, self._batch, self._collate = shards, read, batch_size, collate
        self._rank, self._world, self._passes, self._pad = rank, world_size, passes, pad
        self._deal = Dealer(len(shards), seed=seed, shuffle=shuffle, lengths=lengths)
        self._fixed = {"seed": seed, "shuffle": shuffle, "shards": len(shards), "samples": self._deal.samples}
        self._todo: list[Piece] = []
        self._turn, self._dry = 0, 0
        self._left = self._deal.least_and_most(0, passes, world_size) if passes is not None else None
        self._reader: Reader | None = None

    @property
    def steps_left(self) -> int | None:
        """Steps until the end, the same on all ranks; ``None`` where there is no end."""
        if self._left is None:
            return None
        return steps_within(self._left[1] if self._pad else self._left[0], self._batch, pad=self._pad)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.steps_left == 0:
            raise StopIteration
        turn, todo = self._turn, self._unread(again=True)
        try:
            batch = SPENT.fetch(self._take)
        except BaseException:
            self._reader = None  # as if this step had not begun: it may be tried again
            self._turn, self._todo = turn, todo
            raise
        if self._left is not None:
            self._left = self._left[0] - self._batch, self._left[1] - self._batch
        return batch

    # ------------------------------------------------------------ reading

    def _take(self) -> Any:
        samples = [self._next_sample() for _ in range(self._batch)]
        return samples if self._collate is None else self._collate(samples)

    def _next_sample(self) -> Any:
        while True:
            reader = self._reader or self._open()
            piece = self._todo[0]
            if piece.stop is None or reader.number < piece.stop:
                try:
                    sample = next(reader)
                    self._dry = 0
                    return sample
                except StopIteration:
                    if piece.stop is not None:
                        raise self._wrong_length(piece, f"ended after {reader.number} samples") from None
            elif piece.stop == self._deal.length_at(piece.place):
                for _ in reader:
                    raise self._wrong_length(piece, "goes on")
            self._todo.pop(0)
            self._reader = None

    def _open(self) -> Reader:
        while not self._todo:
            if self._dry == EMPTY_PASSES + self._world:
                raise ValueError(
                    f"data: rank {self._rank} was dealt {self._dry} passes without a sample; are there any?"
                )
            self._todo = self._deal.deal(self._turn, self._rank, self._world)
            self._turn, self._dry = self._turn + 1, self._dry + 1
        piece = self._todo[0]
        shard = self._shard(piece)
        self._reader = Reader(
            self._read_shard(shard), start=piece.start, mark=piece.mark, name=f"shard {str(shard)[:200]}"
        )
        return self._reader

    def _shard(self, piece: Piece) -> S:
        return self._shards[self._deal.shard_at(piece.place)]

    def _wrong_length(self, piece: Piece, what: str) -> StateMismatch:
        name, length = str(self._shard(piece))[:200], self._deal.length_at(piece.place)
        return StateMismatch(
            f"data: shard {name} {what} where lengths says {length}; correct lengths, or restore the shard"
        )

    def _unread(self, *, again: bool) -> list[Piece]:
        """What is left of what has been dealt; ``again``: for this process, whose reader has its own first mark."""
        if (reader := self._reader) is None:
            return [*self._todo]
        mark = reader.opened if again else reader.mark()
        return [self._todo[0]._replace(start=reader.number, mark=mark), *self._todo[1:]]

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "format": FORMAT,
            **self._fixed,
            "rank": self._rank,
            "world_size": self._world,
            "pass": self._turn,
            "todo": [_lowered(piece) for piece in self._unread(again=False)],
            "passes": self._passes,
            "left": None if self._left is None else list(self._left),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that this rank has saved, among as many ranks; see ``reshard_state`` for another number."""
        self._check(state)
        if (state["rank"], state["world_size"]) != (self._rank, self._world):
            raise StateMismatch(
                f"data: this is what rank {state['rank']} of {state['world_size']} has left to read, this process is "
                f"rank {self._rank} of {self._world}; deal anew with reshard_state(states of all ranks, ...)"
            )
        self._reader = None
        self._turn = state["pass"]
        self._todo = [_raised(piece) for piece in state["todo"]]
        self._left = self._still(state)

    def _still(self, state: dict[str, Any]) -> tuple[int, int] | None:
        """What the ranks have left until the end that this run is given, which may be another than the saved run's."""
        if self._passes is None:
            return None
        if state["passes"] is None:
            raise StateMismatch(
                f"data: passes ({self._passes}) is given now and was not when the position was saved; ranks would not "
                f"know when all have come to the end. Leave passes out"
            )
        least, most = self._deal.least_and_most(0, abs(more := self._passes - state["passes"]), self._world)
        if more < 0:
            least, most = -most, -least
        return state["left"][0] + least, state["left"][1] + most

    def reshard_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """What this object's rank of its ``world_size`` reads when all that the old ranks have left is dealt again.

        Old ranks that used the same samples (tensor-parallel peers, say) may each bring their equal state.
        """
        agreed(states, ("kind", "world_size", *self._fixed))
        for state in states:
            self._check(state)
        old: dict[int, dict[str, Any]] = {}
        for state in states:
            if _progress(old.setdefault(state["rank"], state)) != _progress(state):
                raise StateMismatch(
                    f"data: two processes were rank {state['rank']} of the data and stand at different samples; all "
                    f"that use the same samples must take as many batches in each step"
                )
        if missing := sorted(set(range(states[0]["world_size"])) - old.keys()):
            raise StateMismatch(
                f"data: what ranks {missing[:8]} of {states[0]['world_size']} have left to read is not known, and only "
                f"all together say what is still unread"
            )
        turn = max(state["pass"] for state in states)
        pieces = [_raised(piece) for state in old.values() for piece in state["todo"]]
        for number, state in old.items():
            for late in range(state["pass"], turn):
                pieces += self._deal.deal(late, number, len(old))
        due, ahead, left = pieces, list[Piece](), None
        if self._passes is not None:
            end = self._passes * self._deal.shards
            due = [piece for piece in pieces if piece.place < end]
            ahead = [piece for piece in pieces if piece.place >= end]  # begun by ranks that were padded
            left = list(self._deal.least_and_most(count(due), max(0, self._passes - turn), self._world))
        todo = [piece for part in (due, ahead) for piece in self._deal.deal_again(part, self._rank, self._world)]
        return {
            **states[0],
            "rank": self._rank,
            "world_size": self._world,
            "pass": turn,
            "todo": [_lowered(piece) for piece in todo],
            "passes": self._passes,
            "left": left,
        }

    def _check(self, state: dict[str, Any]) -> None:
        check_format(state, KIND, FORMAT)
        for key, mine in self._fixed.items():
            if state[key] != mine:
                raise StateMismatch(
                    f"data: the saved position counts with {key} {state[key]}, this run has {mine}; the same position "
                    f"would mean other samples. Use the saved {key}, or start the data anew by leaving it out of "
                    f"register()"
                )


def _check_shards(shards: Sequence[Any], lengths: Sequence[int] | None, *, world_size: int, passes: int | None) -> None:
    if lengths is not None:
        if len(lengths) != len(shards):
            raise ValueError(f"lengths has {len(lengths)} numbers for {len(shards)} shards")
        if sum(lengths) < 1 or min(lengths) < 0:
            raise ValueError("lengths must not be negative, nor all be 0")
        return
    if passes is not None:
        raise ValueError(
            f"passes ({passes}) needs lengths: without them no rank knows when the others come to their end, and all "
            f"must end at the same step. Give lengths, or leave passes out and choose the number of steps"
        )
    if len(shards) < world_size:
        raise ValueError(
            f"{len(shards)} shards cannot be dealt to {world_size} ranks; make more shards, or give lengths, which "
            f"lets them be cut"
        )


def _progress(state: dict[str, Any]) -> tuple[int, list[Any]]:
    """Without marks, which may hold anything."""
    return state["pass"], [list(piece[:3]) for piece in state["todo"]]


def _lowered(piece: Piece) -> list[Any]:
    return [piece.place, piece.start, piece.stop, None if piece.mark is None else list(piece.mark)]


def _raised(saved: Sequence[Any]) -> Piece:
    place, start, stop, mark = saved
    return Piece(place, start, stop, None if mark is None else (mark[0], mark[1]))
