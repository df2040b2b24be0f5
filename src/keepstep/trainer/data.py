"""StepData: batches as a pure function of (seed, position, rank), so that the position is all there is to remember.

The order of a whole pass over the data set is a keyed permutation that can be asked for any single place: nothing is
shuffled in memory, and rolling back by a step costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from keepstep.trainer.exceptions import StateMismatch

T_co = TypeVar("T_co", covariant=True)
_ROUNDS = 4


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


class StepData(Generic[T_co]):
    """Endless batches of this rank; pass it to ``ks.register(data=...)``.

    Args:
        dataset: map-style.
        batch_size: samples per rank and batch.
        shuffle: a new order in each pass, the same whenever it is run; else the order of the data set.
        collate: turns a list of samples into what ``next`` returns, e.g. ``torch.stack`` or torch's
            ``default_collate``; the list itself where left out.
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
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank ({rank}) must lie between 0 and world_size ({world_size}) - 1")
        self._per_pass = len(dataset) // (batch_size * world_size) if batch_size > 0 else 0
        if self._per_pass == 0:
            raise ValueError(
                f"{len(dataset)} samples do not make one batch of {batch_size} on each of {world_size} ranks"
            )
        self._dataset, self._batch, self._collate = dataset, batch_size, collate
        self._seed, self._rank, self._world, self._shuffle = seed, rank, world_size, shuffle
        self.position = 0
        """Batches given out so far."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        samples = [self._dataset[index] for index in self.indices(self.position)]
        self.position += 1
        return samples if self._collate is None else self._collate(samples)

    def indices(self, position: int) -> Sequence[int]:
        """Which samples this rank's batch at ``position`` is made of."""
        turn, batch = divmod(position, self._per_pass)
        first = (batch * self._world + self._rank) * self._batch
        places = range(first, first + self._batch)
        if not self._shuffle:
            return places
        order = Permutation(len(self._dataset), f"{self._seed}/{turn}")
        return [order[place] for place in places]

    def state_dict(self) -> dict[str, int]:
        return {
            "position": self.position,
            "seed": self._seed,
            "batch_size": self._batch,
            "world_size": self._world,
            "samples": len(self._dataset),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        mine = self.state_dict()
        for key in ("seed", "batch_size", "world_size", "samples"):
            if state[key] != mine[key]:
                raise StateMismatch(
                    f"data: the saved position counts with {key} {state[key]}, this run has {mine[key]}; "
                    f"the same position would mean other samples"
                )
        self.position = state["position"]


class Permutation:
    """A pseudo-random order of ``range(size)``: a Feistel network, walked until it falls inside the range.

    Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} is not in range({self._size})")
        while True:
            place = self._mix(place)
            if place < self._size:
                return place

    def _mix(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            word = ((right + 1) * 0x9E37_79B9_7F4A_7C15 ^ key) & 0xFFFF_FFFF_FFFF_FFFF
            word = ((word ^ word >> 32) * 0xD6E8_FEB8_6659_FD93) & 0xFFFF_FFFF_FFFF_FFFF
            left, right = right, left ^ (word ^ word >> 32) & self._mask
        return left << self._half | right
