"""Places: one endless line of samples, pass after pass, and how far all ranks together have come along it.

The order of a whole pass is a keyed permutation that can be asked for any single place: nothing is shuffled in
memory, and rolling back costs nothing. A step takes the next places for all ranks at once, so the position means the
same to any number of ranks and to any batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from keepstep.trainer.exceptions import StateMismatch

KIND = "places"
FORMAT = 2
"""Of the saved position. 1, without a number, counted the batches of one rank and left out the tail of each pass."""
_ROUNDS = 4


class Dealt:
    """What one rank is dealt of the line, and the state that says where all ranks are.

    Args:
        samples: length of the data set.
        batch_size: samples per rank and step.
        passes: how often the data set is used before the end; without end where ``None``.
        pad: what is left before the end and does not fill a step on all ranks is filled up with the first samples of
            one more pass; else it is left out. Either way all ranks end at the same step.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        passes: int | None,
        pad: bool,
    ) -> None:
        check_place(batch_size, rank=rank, world_size=world_size, passes=passes)
        if samples < 1:
            raise ValueError("the data set is empty; there is nothing to train on")
        self._samples, self._batch = samples, batch_size
        self._seed, self._rank, self._world, self._shuffle = seed, rank, world_size, shuffle
        self._end = None if passes is None else passes * samples
        self._pad = pad
        self._order: tuple[int, Permutation] | None = None
        self.position = 0
        """Samples that all ranks together have used so far, over all passes."""

    @property
    def passes_done(self) -> int:
        """Whole passes so far."""
        return self.position // self._samples

    @property
    def steps_left(self) -> int | None:
        """Steps until the end, the same on all ranks; ``None`` where there is no end."""
        if self._end is None:
            return None
        return steps_within(self._end - self.position, self._batch * self._world, pad=self._pad)

    @property
    def stride(self) -> int:
        """Places that one step takes, over all ranks."""
        return self._batch * self._world

    def ended(self, position: int) -> bool:
        """Whether no step begins at ``position``."""
        if self._end is None:
            return False
        return position >= self._end if self._pad else position + self.stride > self._end

    def places(self, position: int) -> range:
        """This rank's places in the step that begins at ``position``."""
        first = position + self._rank * self._batch
        return range(first, first + self._batch)

    def indices(self, position: int) -> list[int]:
        """Which samples of the data set this rank uses in the step that begins at ``position``."""
        return [self.index(place) for place in self.places(position)]

    def index(self, place: int) -> int:
        """Which sample of the data set is at ``place``."""
        turn, within = divmod(place, self._samples)
        if not self._shuffle:
            return within
        if self._order is None or self._order[0] != turn:
            self._order = turn, Permutation(self._samples, f"{self._seed}/{turn}")
        return self._order[1][within]

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "format": FORMAT,
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self._samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, whatever the number of ranks and the batch size were when it was saved."""
        check_format(state, KIND, FORMAT)
        mine = self.state_dict()
        for key in ("seed", "samples", "shuffle"):
            if key in state and state[key] != mine[key]:
                raise StateMismatch(
                    f"data: the saved position counts with {key} {state[key]}, this run has {mine[key]}; the same "
                    f"position would mean other samples. Use the saved {key}, or start the data anew by leaving it "
                    f"out of register()"
                )
        self.position = _converted(state) if "format" not in state else state["position"]

    def reshard_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The one position that all ranks have saved."""
        return agreed(states, ("position", "seed", "samples", "shuffle"))


def _converted(state: dict[str, Any]) -> int:
    """The position behind format 1: the batches that one rank has had, with whole batches only in each pass."""
    per_pass = state["samples"] // (state["batch_size"] * state["world_size"])
    turn, batch = divmod(state["position"], per_pass)
    return int(turn * state["samples"] + batch * state["batch_size"] * state["world_size"])


def check_place(batch_size: int, *, rank: int, world_size: int, passes: int | None) -> None:
    """Raises ``ValueError`` naming what cannot be."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank ({rank}) must lie between 0 and world_size ({world_size}) - 1")
    if batch_size < 1:
        raise ValueError(f"batch_size ({batch_size}) must be at least 1")
    if passes is not None and passes < 1:
        raise ValueError(f"passes ({passes}) must be at least 1, or None for no end")


def steps_within(samples: int, stride: int, *, pad: bool) -> int:
    """How many steps of ``stride`` samples there are in ``samples``."""
    return max(0, -(-samples // stride) if pad else samples // stride)


def check_format(state: dict[str, Any], kind: str, known: int) -> None:
    """Raises ``StateMismatch`` where ``state`` was saved by other data, or by a newer version."""
    if (found := state.get("kind", KIND)) != kind:
        raise StateMismatch(
            f"data: the position was saved by another kind of data ({found}) than this run uses ({kind}); use the same "
            f"kind, or start the data anew by leaving it out of register()"
        )
    found = state.get("format", known)
    if found > known:
        raise StateMismatch(
            f"data: the position was saved in format {found}, this version of keepstep knows up to {known}; "
            f"go on with the version that saved it, or a newer one"
        )


def agreed(states: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """The state that ranks share. Raises ``StateMismatch`` naming the first rank that says otherwise."""
    if not states:
        raise StateMismatch("data: no rank has saved a position; leave the data out of register() to start it anew")
    for old, state in enumerate(states):
        for key in keys:
            if state.get(key) != states[0].get(key):
                raise StateMismatch(
                    f"data: rank 0 has saved {key} {states[0].get(key)} and rank {old} {state.get(key)} for one step; "
                    f"all ranks must take as many batches in each step"
                )
    return dict(states[0])


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
