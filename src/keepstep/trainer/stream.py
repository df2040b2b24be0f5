"""StepStream: samples that can only be read in order. All ranks read the same stream, and each uses its share.

Every rank reads to the end of a step's samples, those of other ranks too, so that after a step all stand at the same
sample: one number says where, to any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from keepstep.trainer.places import agreed, check_format, check_place
from keepstep.trainer.reader import Mark, Reader, keeps_position
from keepstep.trainer.spent import SPENT

KIND = "stream"
FORMAT = 1


class StepStream:
    """Batches of this rank from a stream; register it and call ``next`` in each step.

    Args:
        source: an iterable that gives the same samples in the same order each time it is iterated (an
            ``IterableDataset``, say), or a function that takes the number of the pass, from 0, and returns one. Where
            it or its iterator has ``state_dict`` and ``load_state_dict``, a restore goes straight to its place; else
            it reads up to there.
        batch_size: samples per rank and step.
        collate: turns a list of samples into what ``next`` returns; the list itself where left out.
        passes: ends after so many passes; never where ``None``.
        pad: at that end, fill the last step up with samples of one more pass instead of leaving its samples out.
            Either way all ranks end at the same step, since all see where the stream ends.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[int], Iterable[Any]],
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        passes: int | None = None,
        pad: bool = False,
    ) -> None:
        check_place(batch_size, rank=rank, world_size=world_size, passes=passes)
        if isinstance(source, Iterator) and not keeps_position(source):
            raise TypeError(
                f"a {type(source).__name__} can be read only once; pass a function that makes it: "
                f"StepStream(lambda number_of_pass: ...)"
            )
        self._source, self._collate, self._passes, self._pad = source, collate, passes, pad
        self._mine = range(rank * batch_size, (rank + 1) * batch_size)
        self._stride = batch_size * world_size
        self.position = 0
        """Samples that all ranks together have used so far, over all passes."""
        self._reader: Reader | None = None
        self._turn, self._number = 0, 0
        self._mark: Mark | None = None
        self._ended = False

    @property
    def passes_done(self) -> int:
        """Whole passes so far, as far as the end of the present one has been seen."""
        return self._turn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        reader = self._reader or self._open()
        boundary = self._turn, reader.number, reader.opened
        try:
            batch = SPENT.fetch(self._take)
        except BaseException as error:
            self._go(*boundary)  # as if this step had not begun: it may be tried again
            self._ended = isinstance(error, StopIteration)
            raise
        self.position += self._stride
        return batch

    def _take(self) -> Any:
        samples = self._share()
        return samples if self._collate is None else self._collate(samples)

    def _share(self) -> list[Any]:
        """This rank's samples of the next step; those of other ranks are read and dropped."""
        mine = []
        for place in range(self._stride):
            sample = self._read(place)
            if place in self._mine:
                mine.append(sample)
        return mine

    def _read(self, place: int) -> Any:
        """The next sample of the stream; ``StopIteration`` at the end of the last pass."""
        while True:
            at_end = self._passes is not None and self._turn >= self._passes
            if at_end and not (self._pad and place > 0):
                raise StopIteration
            reader = self._reader or self._open()
            try:
                return next(reader)
            except StopIteration:
                if reader.number == 0:
                    raise ValueError(f"data: the stream gave no sample at all in pass {self._turn}") from None
                self._go(self._turn + 1, 0, None)

    def _open(self) -> Reader:
        source: Any = self._source
        if not isinstance(source, Iterable):
            source = source(self._turn)
        name = f"pass {self._turn} of the stream"
        self._reader = Reader(source, start=self._number, mark=self._mark, name=name)
        return self._reader

    def _go(self, turn: int, number: int, mark: Mark | None) -> None:
        self._reader = None
        self._turn, self._number, self._mark, self._ended = turn, number, mark, False

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        reader = self._reader
        if reader is None and self._number == 0 and self._mark is None:
            reader = self._open()  # a source that keeps its own position can then be put back to its very start
        number = reader.number if reader is not None else self._number
        mark = reader.mark() if reader is not None else self._mark
        return {
            "kind": KIND,
            "format": FORMAT,
            "position": self.position,
            "pass": self._turn,
            "number": number,
            "mark": None if mark is None else list(mark),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, whatever the number of ranks and the batch size were when it was saved."""
        check_format(state, KIND, FORMAT)
        mark = state["mark"]
        self.position = state["position"]
        self._go(state["pass"], state["number"], None if mark is None else (mark[0], mark[1]))

    def reshard_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The one position that all ranks have saved."""
        return agreed(states, ("kind", "position", "pass", "number"))
