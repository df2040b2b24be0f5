"""StepData: batches as a pure function of (seed, position, rank), so that the position is all there is to remember.

A pass does not end with a step: a step may take the last samples of one pass and the first of the next. So no sample
is left out and none comes twice within a pass, over any number of recoveries and with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from keepstep.trainer.places import Dealt
from keepstep.trainer.places import Permutation as Permutation
from keepstep.trainer.spent import SPENT

T_co = TypeVar("T_co", covariant=True)


class MapStyle(Protocol[T_co]):
    """A data set that knows its length and gives any sample by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@runtime_checkable
class Reshardable(Protocol):
    """A registered object whose per-rank states make sense to another number of ranks.

    Parameters are cut anew by their shapes; what any other object means by its state only the object knows. One
    that is registered and has ``reshard_state`` is asked when a job goes on with another world size; one that has not
    is refused there, by name.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...

    def reshard_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The state that ``rank`` of ``world_size`` new ranks loads; changes nothing by itself.

        Called on the object that this process has built for its place in the new world; the result goes to its
        ``load_state_dict``.

        Args:
            states: what ``state_dict`` gave on every old rank at the restored step, in the order of the ranks.
        """
        ...


class StepData(Dealt, Generic[T_co]):
    """Batches of this rank, made in this process; pass it to ``ks.register(data=...)`` and call ``next`` in each step.

    Args:
        dataset: map-style.
        batch_size: samples per rank and step.
        rank: this process's place among those that use different samples; the data-parallel rank where models are
            cut in other ways too.
        world_size: how many such places there are.
        shuffle: a new order in each pass, the same whenever it is run; else the order of the data set.
        collate: turns a list of samples into what ``next`` returns, e.g. ``torch.stack`` or torch's
            ``default_collate``; the list itself where left out.
        passes: ends after so many passes; never where ``None``.
        pad: at that end, fill the last step up with samples of one more pass instead of leaving its samples out.
    """

    def __init__(
        self,
        dataset: MapStyle[T_co],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        passes: int | None = None,
        pad: bool = False,
    ) -> None:
        super().__init__(
            len(dataset),
            batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            passes=passes,
            pad=pad,
        )
        self._dataset, self._collate = dataset, collate
        self.left_out: frozenset[int] = frozenset()
        """Samples that are not used any more: a step that would use one on any rank is passed over on all of them."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended(self.position):
            raise StopIteration
        batch = SPENT.fetch(self._take)
        self.position += self.stride
        self._pass_over()
        return batch

    @property
    def reads_as(self) -> int:
        """Whose samples are read: the data-parallel rank."""
        return self._rank

    @property
    def places_in_all(self) -> int:
        """How many ranks read different samples."""
        return self._world

    def read_as(self, rank: int) -> None:
        """Read the samples of another rank: to do its work once more and compare."""
        self._rank = rank

    def leave_out(self, samples: Iterable[int]) -> None:
        """Never use these samples again; call it alike on all ranks, else they part.

        Raises:
            ValueError: no step of a whole pass would be left.
        """
        self.left_out |= frozenset(samples)
        self._pass_over()

    def _pass_over(self) -> None:
        """Go on to the next step that no rank would use such a sample in."""
        tried = 0
        while self.left_out and not self.ended(self.position) and self._touches(self.position):
            if tried > self._samples:
                raise ValueError(f"no step of a whole pass is without one of the {len(self.left_out)} samples left out")
            self.position += self.stride
            tried += self.stride

    def _touches(self, position: int) -> bool:
        return any(self.index(place) in self.left_out for place in range(position, position + self.stride))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "left_out": sorted(self.left_out)} if self.left_out else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What is left out stays so: going back to before it was found would only find it again."""
        super().load_state_dict(state)
        self.left_out |= frozenset(state.get("left_out", ()))
        self._pass_over()

    def _take(self) -> Any:
        samples = [self._dataset[index] for index in self.indices(self.position)]
        return samples if self._collate is None else self._collate(samples)
