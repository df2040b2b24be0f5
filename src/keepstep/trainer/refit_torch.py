"""Refit: what a saved generation is to this process, whose world may be another one.

Tensors are matched by the user's own names, optimizer state by the parameter it belongs to (by group and index where
that is not known). A distributed tensor, or one that all ranks hold alike, is cut anew; any other belongs to its rank
and goes to another world only where all ranks' are equal. Plain state goes to the same rank, or is dealt anew by the
object itself. What fits nowhere is refused by name, before anything has been changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch.distributed.tensor import DTensor

from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.reshard import Block, Piece, plan
from keepstep.checkpoint.slot import TensorEntry, lay_out
from keepstep.checkpoint.whole import is_own, key_of, owners_in, owners_of
from keepstep.checkpoint.whole import pieces as held_pieces
from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer.exceptions import StateMismatch
from keepstep.trainer.plain_torch import decode_plain, encode_plain
from keepstep.trainer.random_torch import derive_states
from keepstep.trainer.state_torch import Live, State

MAX_NAMED = 4
"""Tensors that an error names."""


class Fit(Struct, frozen=True, kw_only=True):
    """How to make this rank's version out of a generation.

    Attributes:
        entries: records of the version, with offsets in a slot file; ``end`` is where its data ends.
        blocks: the bytes that it is made of.
        same: bytes that have to be equal: (this rank's choice, another rank's), as pieces of two parts.
        plain: the version's plain state.
    """

    entries: tuple[TensorEntry, ...]
    end: int
    blocks: tuple[Block, ...]
    same: tuple[tuple[Piece, Piece], ...]
    plain: bytes


def fit(state: State, parts: Mapping[int, Part], rank: int, world_size: int) -> Fit:
    """Plan this rank's version.

    Args:
        parts: of all ranks of the saved world, by rank; this rank's own is enough where ``alone`` says so.

    Raises:
        StateMismatch: the saved state is not one of these objects, or cannot be had by this world.
        LayoutMismatch: the parts do not make up the tensors.
    """
    return _Refit(state, parts, rank, world_size).fit()


def alone(state: State, part: Part, rank: int, world_size: int) -> bool:
    """Whether this rank's own part is all it needs: nothing that it holds is written by another rank."""
    if part.world_size != world_size or part.rank != rank or (part.replicated and world_size > 1):
        return False
    return all(live.mates is None or live.mates[2] == 1 for live in state.shards())


class _Refit:
    def __init__(self, state: State, parts: Mapping[int, Part], rank: int, world_size: int) -> None:
        self._state, self._parts, self._rank, self._world = state, parts, rank, world_size
        any_part = next(iter(parts.values()))
        self._old_world, self._replicated = any_part.world_size, any_part.replicated
        self._moved = self._old_world != world_size
        self._near = min(rank, self._old_world - 1)
        if self._near not in parts:
            raise StateMismatch(f"the part of rank {self._near} is missing")
        self._plain: dict[str, Any] = decode_plain(parts[self._near].plain)
        self._called: dict[tuple[str, str], str] = {}
        self._devices: dict[str, str] = {}
        """Where optimizer state lay when it was saved; under the empty name, where parameters did."""

    def fit(self) -> Fit:
        held = self._held()
        wanted = [*self._parameters(held), *self._optimizers(held), *self._buffers(held)]
        offsets, end = lay_out([live.tensor.nbytes for live in wanted])
        entries, aims = [], []
        for live, offset in zip(wanted, offsets, strict=True):
            dtype = str(live.tensor.dtype).removeprefix("torch.")
            shape = tuple(live.tensor.shape)
            entries.append(
                TensorEntry(
                    live.name,
                    dtype,
                    shape,
                    offset,
                    live.tensor.nbytes,
                    live.like,
                    self._device(live),
                    live.global_shape,
                    live.corner,
                    live.primary,
                )
            )
            whole = live.global_shape or shape
            corner = live.corner or (0,) * len(whole)
            aims.append(Piece(self._key(live.name), dtype, whole, corner, shape, offset, live.tensor.element_size()))
        blocks = plan(aims, held, near=self._near)
        same = tuple(self._must_be_equal(aims, held)) if self._moved else ()
        return Fit(entries=tuple(entries), end=end, blocks=tuple(blocks), same=same, plain=self._new_plain())

    # ---------------------------------------------------------------- names

    def _key(self, name: str) -> str:
        return key_of(name, self._called)

    def _held(self) -> dict[str, list[Piece]]:
        """All parts' tensors, by the names of ``whole.key_of``."""
        found: dict[str, list[Piece]] = {}
        for part in self._parts.values():
            for entry, piece in held_pieces(part):
                if is_own(entry, part) and (not self._moved or entry.name[0] == "b") and part.rank != self._near:
                    continue
                if entry.name[0] != "b":
                    self._devices[piece.name if entry.name[0] == "o" else ""] = entry.device
                found.setdefault(piece.name, []).append(piece)
        known = any(owners_of(part) for part in self._parts.values())
        self._called = owners_in(self._state.owners()) if known else {}
        self._accept_other_kind(found)
        return found

    def _accept_other_kind(self, held: dict[str, list[Piece]]) -> None:
        """Foreign formats do not tell buffers from parameters; here the model does."""
        for live in (*self._state.shards(), *self._state.buffers()):
            other = {"p": "b", "b": "p"}.get(live.name[0], "") + live.name[1:]
            if live.name not in held and other in held:
                held[live.name] = [msgspec.structs.replace(piece, name=live.name) for piece in held.pop(other)]

    # ---------------------------------------------------------------- what is wanted

    def _parameters(self, held: Mapping[str, Sequence[Piece]]) -> list[Live]:
        lives = [live for live in self._state.shards() if live.name[0] == "p"]
        mine = {live.name for live in lives}
        there = {key for key in held if key[0] == "p"}
        differing = mine - there
        if all(
            {entry.name for entry in part.tensors if entry.name[0] == "p"} == there for part in self._parts.values()
        ):
            differing = mine ^ there  # no pipeline stages: everybody has everything
        elif len(self._parts) == self._old_world and self._world == 1:
            differing = mine ^ there
        if differing:
            some = ", ".join(sorted(name[2:] for name in differing)[:MAX_NAMED])
            raise StateMismatch(
                f"the checkpoint's parameters are not this model's: {len(differing)} differ ({some}); start with the "
                f"model that was saved, or with --no-resume"
            )
        return lives

    def _optimizers(self, held: Mapping[str, Sequence[Piece]]) -> Iterator[Live]:
        by_owner: dict[tuple[str, str], list[str]] = {}
        for key in held:
            if key[0] == "o":
                head, what = key.rsplit("/", 1)
                _, of, owner = head.split("/", 2)
                by_owner.setdefault((of, owner), []).append(what)
        for known in {of for of, _ in by_owner}:
            if known not in self._state.optimizers:
                raise StateMismatch(
                    f"the checkpoint holds an optimizer {known!r} that is not registered here; register it under "
                    f"that name"
                )
        for name, optimizer in self._state.optimizers.items():
            for group, index, parameter in pieces.places(optimizer):
                owner = self._called.get((name, f"{group}/{index}")) or f"#{group}/{index}"
                for what in by_owner.get((name, owner), ()):
                    first = held[f"o/{name}/{owner}/{what}"][0]
                    yield self._state_like(f"o/{name}/{group}/{index}/{what}", parameter, first)

    def _state_like(self, name: str, parameter: torch.Tensor, piece: Piece) -> Live:
        """A tensor of optimizer state as this process will hold it: laid out like its parameter, or plain."""
        dtype = _dtype(piece.dtype)
        if not isinstance(parameter, DTensor) or tuple(parameter.shape) != piece.whole or not piece.whole:
            return Live(name, torch.empty(piece.whole, dtype=dtype, device="meta"), "plain")
        like = pieces.live(name, parameter, "param")
        return like._replace(tensor=torch.empty(tuple(like.tensor.shape), dtype=dtype, device="meta"))

    def _buffers(self, held: Mapping[str, Sequence[Piece]]) -> list[Live]:
        lives = {live.name: live for live in self._state.buffers()}
        if unknown := sorted(key for key in held if key[0] == "b" and key not in lives and self._wants(key)):
            raise StateMismatch(f"the checkpoint holds buffer {unknown[0][2:]} that this model does not have")
        return [live for name, live in lives.items() if name in held]

    def _wants(self, key: str) -> bool:
        return any(entry.name == key for entry in self._parts[self._near].tensors)

    def _device(self, live: Live) -> str:
        """Where this process keeps it: with its parameter, unless it lay elsewhere than that already."""
        if live.tensor.device.type != "meta":
            return live.tensor.device.type
        _, optimizer, group, index, _ = live.name.split("/", 4)
        parameter = self._state.optimizers[optimizer].param_groups[int(group)]["params"][int(index)]
        apart = self._devices.get(self._key(live.name)) == "cpu" and self._devices.get("") != "cpu"
        return "cpu" if apart else str(parameter.device.type)

    def _must_be_equal(
        self, aims: Sequence[Piece], held: Mapping[str, Sequence[Piece]]
    ) -> Iterator[tuple[Piece, Piece]]:
        """Tensors that are each rank's own: this rank compares those of some ranks, all ranks together compare all."""
        if self._replicated or self._old_world == 1:
            return
        for aim in aims:
            if aim.name[0] == "b" or held[aim.name][0].whole != held[aim.name][0].shape:
                continue
            copies = {piece.rank: piece for piece in held[aim.name]}
            base = copies.get(self._near)
            if base is None or any(piece.shape != piece.whole for piece in copies.values()):
                continue
            for other, piece in copies.items():
                if other != self._near and (other == 0 or other % self._world == self._rank) and piece.nbytes:
                    yield base, piece

    # ---------------------------------------------------------------- plain state

    def _new_plain(self) -> bytes:
        self._check_groups(self._plain["groups"])
        arranged = len(msgspec.msgpack.decode(self._plain["buckets"])) == len(self._state.ddp())
        if not self._moved and arranged and self._plain.get("owners", b"") == self._state.owners():
            return self._parts[self._near].plain
        whole = dict(self._plain)
        whole["values"] = self._values()
        whole["owners"] = self._state.owners()
        if not arranged:
            whole["buckets"] = msgspec.msgpack.encode([])
        if self._moved:
            whole["others"] = self._others()
            if self._rank >= self._old_world and whole["random"] is not None:
                whole["random"] = derive_states(whole["random"], self._rank)
        return encode_plain(whole, "saved")

    def _check_groups(self, groups: Mapping[str, Sequence[Any]]) -> None:
        for name, saved in groups.items():
            here = self._state.optimizers.get(name)
            if here is not None and len(here.param_groups) != len(saved):
                raise StateMismatch(
                    f"optimizer {name!r} has {len(here.param_groups)} parameter groups here and {len(saved)} in the "
                    f"checkpoint; build it with the same groups"
                )

    def _values(self) -> dict[str, dict[str, Any]]:
        """Plain values that optimizers keep per parameter, from the saved places to those of this process."""
        saved = owners_in(self._plain.get("owners", b""))
        found: dict[str, dict[str, Any]] = {}
        for name, places in self._plain["values"].items():
            by_owner = {saved.get((name, path)) or f"#{path}": value for path, value in places.items()}
            moved = {}
            for group, index, _ in (
                pieces.places(self._state.optimizers[name]) if name in self._state.optimizers else ()
            ):
                owner = self._called.get((name, f"{group}/{index}")) or f"#{group}/{index}"
                if owner in by_owner:
                    moved[f"{group}/{index}"] = by_owner[owner]
            found[name] = moved
        return found

    def _others(self) -> dict[str, Any]:
        """State of everything that is neither module nor optimizer, for another world size."""
        plains = [
            self._plain if old == self._near else decode_plain(self._parts[old].plain) for old in range(self._old_world)
        ]
        found: dict[str, Any] = {}
        for name, near in self._plain["others"].items():
            item = self._state.others.get(name)
            if item is None:
                raise StateMismatch(f"the checkpoint holds {name!r}, which is not registered here")
            states = [plain["others"].get(name) for plain in plains]
            if callable(reshard := getattr(item, "reshard_state", None)):
                found[name] = reshard(states, self._rank, self._world)
            elif _per_rank(item) or len({encode_plain(one, name) for one in states}) > 1:
                raise StateMismatch(
                    f"{name!r} ({type(item).__name__}) keeps a state of its own on each of {self._old_world} ranks, "
                    f"and does not say what it means to {self._world}: give it reshard_state(states, rank, "
                    f"world_size), use keepstep's StepData or StepLoader, or go on with {self._old_world} ranks"
                )
            else:
                found[name] = near
        return found


def _per_rank(item: Any) -> bool:
    """Loaders of samples: equal states on all ranks would still not mean the same to another number of ranks."""
    return type(item).__module__.partition(".")[0] == "torchdata" or isinstance(item, torch.utils.data.DataLoader)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateMismatch(f"the checkpoint holds a tensor of dtype {name}, which this torch does not know")
    return found
