"""Whole: a generation as the tensors that it stands for, not as the parts that ranks wrote. Needs no torch.

Tensors are called by the names of the user's modules, optimizer state by the parameter it belongs to; each is a set
of pieces, which ``reshard`` puts together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import msgspec
from msgspec import Struct

from keepstep.checkpoint import reshard
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.reshard import Piece
from keepstep.checkpoint.slot import TensorEntry

READERS = 16
"""Descriptions that are read at the same time."""
Owners = dict[tuple[str, str], str]
"""``{(optimizer, "group/index"): "module/parameter"}``."""


class WholeTensor(Struct, frozen=True, kw_only=True):
    """A tensor of the model or the optimizer.

    Attributes:
        kind: ``p`` parameter, ``b`` buffer, ``o`` optimizer state.
        of: registered name of the module or optimizer.
        name: parameter or buffer as the user's module calls it; ``#group/index`` where that is not known.
        state: for optimizer state, what it is (``exp_avg``).
    """

    key: str
    kind: str
    of: str
    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    item: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item


def plain_of(part: Part) -> dict[str, Any]:
    """A part's plain state; tensors and other things of torch's stay undecoded."""
    found = msgspec.msgpack.decode(part.plain) if part.plain else {}
    return found if isinstance(found, dict) else {}


def owners_of(part: Part) -> Owners:
    """Which parameter each optimizer's group and index was; without those of no registered module."""
    raw = plain_of(part).get("owners")
    return owners_in(raw if isinstance(raw, bytes) else b"")


def owners_in(raw: bytes) -> Owners:
    """The same from ``State.owners``."""
    found: dict[str, list[list[str]]] = msgspec.msgpack.decode(raw) if raw else {}
    return {
        (name, f"{g}/{i}"): owner
        for name, groups in found.items()
        for g, group in enumerate(groups)
        for i, owner in enumerate(group)
        if owner
    }


def key_of(name: str, owners: Owners) -> str:
    """A tensor's name that means the same on every rank and in every run."""
    if name[0] != "o":
        return name
    _, optimizer, group, index, state = name.split("/", 4)
    path = f"{group}/{index}"
    return f"o/{optimizer}/{owners.get((optimizer, path), f'#{path}')}/{state}"


def pieces(part: Part) -> Iterator[tuple[TensorEntry, Piece]]:
    """A part's tensors as pieces of whole ones, under the names of ``key_of``."""
    owners = owners_of(part)
    for entry in part.tensors:
        whole = entry.global_shape or entry.shape
        corner = entry.corner or (0,) * len(whole)
        volume = prod(entry.shape)
        item = entry.nbytes // volume if volume else 1
        key = key_of(entry.name, owners)
        yield entry, Piece(key, entry.dtype, whole, corner, entry.shape, entry.offset, item, part.rank)


def is_own(entry: TensorEntry, part: Part) -> bool:
    """Whether a tensor is its rank's own affair: neither a piece of a larger one nor the same on all ranks."""
    if entry.name[0] == "b":
        return not entry.global_shape
    return not entry.global_shape and not part.replicated and part.world_size > 1


class Whole:
    """All tensors of a generation. What each rank has for itself is taken from the lowest that has it.

    Raises:
        GenerationIncomplete, PayloadDamaged: a part's description is nowhere to be had.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader, self.manifest = reader, reader.manifest()
        with ThreadPoolExecutor(READERS, "parts") as pool:
            self.parts: list[Part] = list(pool.map(reader.part, range(self.manifest.world_size)))
        self._held: dict[str, list[Piece]] = {}
        self.apart = 0
        """Tensors that several ranks hold each for itself."""
        own: set[str] = set()
        for part in self.parts:
            for entry, piece in pieces(part):
                if is_own(entry, part):
                    if piece.name in own:
                        continue
                    own.add(piece.name)
                self._held.setdefault(piece.name, []).append(piece)
        self.apart = len(own) if self.manifest.world_size > 1 else 0
        self.tensors = [_whole(found) for _, found in sorted(self._held.items())]

    def fill(
        self,
        wanted: Sequence[tuple[WholeTensor, int]],
        target: memoryview,
        progress: Any = None,
    ) -> None:
        """Put tensors together at their offsets in ``target``.

        Raises:
            LayoutMismatch: the pieces of a tensor do not make it up.
            PayloadDamaged: some of its bytes are nowhere to be had.
        """
        aims = [
            Piece(one.key, one.dtype, one.shape, (0,) * len(one.shape), one.shape, offset, one.item)
            for one, offset in wanted
        ]
        self.reader.fill(reshard.reads(reshard.plan(aims, self._held)), target, progress)


def _whole(found: Sequence[Piece]) -> WholeTensor:
    piece = next((one for one in found if prod(one.shape)), found[0])
    kind, of, rest = piece.name.split("/", 2)
    name, state = rest.rsplit("/", 1) if kind == "o" else (rest, "")
    if kind == "o" and not name.startswith("#"):
        name = name.split("/", 1)[1]
    return WholeTensor(
        key=piece.name,
        kind=kind,
        of=of,
        name=name,
        state=state,
        dtype=piece.dtype,
        shape=piece.whole,
        item=piece.item,
    )
