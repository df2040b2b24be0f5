"""Fingerprint: one number for the bits of many tensors, to find out whether replicas are still equal.

In host memory a tensor's fingerprint is its XXH3 checksum. On an accelerator it is a sum: the bytes are taken as
64-bit words, each word is folded (its upper half into its lower) and multiplied with an odd number that belongs to its
place, and the products are added up modulo 2**64. Whole-number sums come out the same in whatever order a device adds
them. Folding and odd factors can both be undone, so a change within any one word always changes the sum; the folding
keeps two flipped sign bits from cancelling each other. Against purpose neither is a protection.

After the optimizer's step, data-parallel replicas hold the same parameters and the same optimizer state bit for bit:
they have begun with the same values and added the same reduced gradients. Buffers are left out: running statistics
belong to their rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.checkpoint.sums import digest
from keepstep.trainer.exchange_torch import gather, hand_out
from keepstep.trainer.guard import Vote, vote
from keepstep.trainer.pieces_torch import Live

ROW = 1 << 16
"""Words that share one set of factors, 512 KiB."""
ROWS = 64
"""Rows hashed at once: bounds the memory for products to 32 MiB."""
SHOWN_BYTES = 64 * 1024 * 1024
"""Largest tensor that is handed over whole to tell which of its bits differ."""
SHOWN_BITS = 8
"""Differing bits that are listed."""
SHOWN_RANKS = 8
"""Odd ranks that are looked at closely."""
_STEP = -0x61C8864680B583EB
"""Odd; golden ratio, so that the factors of near places differ in all their bits (Knuth, TAOCP 6.4)."""
_MASK = (1 << 64) - 1


class Bit(NamedTuple):
    """A bit that differs: the element's place in the flattened tensor, and the bit's in the element (0 is lowest)."""

    element: int
    bit: int


class Odd(NamedTuple):
    """A rank that differs from its replicas: in which tensors, and in which bits of the first of them."""

    rank: int
    model: int
    tensors: tuple[str, ...]
    bits: tuple[Bit, ...] = ()
    changed: int = 0
    """Differing bits of the first tensor, all of them; 0 where it is too large to be looked at."""


class Hasher:
    """Fingerprints of tensors. Keeps the factors of the places, per device."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def each(self, tensors: Sequence[Tensor]) -> list[int]:
        """One number per tensor. Waits for each accelerator once."""
        found = [0] * len(tensors)
        sums: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.device.type == "cpu":
                found[index] = checksum(tensor)
            else:
                sums.setdefault(tensor.device, []).append((index, self.sum(tensor)))
        for pairs in sums.values():
            values = torch.stack([value for _, value in pairs]).tolist()
            for (index, _), value in zip(pairs, values, strict=True):
                found[index] = value
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """The fingerprint as an accelerator makes it, still there."""
        with torch.no_grad():
            data = words(tensor)
            factors = self._factor(data.device)
            total = torch.zeros((), dtype=torch.int64, device=data.device)
            for start in range(0, len(data), ROW * ROWS):
                block = data[start : start + ROW * ROWS]
                whole = len(block) // ROW
                if whole:
                    rows = torch.arange(start // ROW, start // ROW + whole, dtype=torch.int64, device=data.device)
                    sums = _folded(block[: whole * ROW].view(whole, ROW)).mul_(factors).sum(1)
                    total += (sums * (2 * rows + 1)).sum()
                rest = block[whole * ROW :]
                if len(rest):
                    total += _folded(rest).mul_(factors[: len(rest)]).sum() * (2 * (start // ROW + whole) + 1)
            return total

    def _factor(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            places = torch.arange(1, ROW + 1, dtype=torch.int64, device=device)
            self._factors[device] = (places * _STEP) | 1
        return self._factors[device]


def checksum(tensor: Tensor) -> int:
    """The fingerprint of a tensor in host memory."""
    here = tensor.detach().contiguous()
    if not here.nbytes:
        return 0
    raw = (ctypes.c_ubyte * here.nbytes).from_address(here.data_ptr())  # as long as `here` lives
    return _signed(digest(memoryview(raw).cast("B")))


def _folded(data: Tensor) -> Tensor:
    return (data >> 32).bitwise_and_(0xFFFF_FFFF).bitwise_xor_(data)


def words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its logical order, as 64-bit words; the last one is filled up with zeros."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    head = flat[:whole]
    if head.data_ptr() % 8 or head.storage_offset() % 8:
        head = head.clone()  # the view below wants aligned words, and a piece of a flat buffer need not be
    data = head.view(torch.int64)
    if whole == flat.numel():
        return data
    tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    tail[: flat.numel() - whole] = flat[whole:]
    return torch.cat((data, tail.view(torch.int64)))


def together(prints: Sequence[int]) -> int:
    """One number for a list of fingerprints."""
    total = 0
    for index, value in enumerate(prints):
        total = (total + (value & _MASK) * ((_STEP * (index + 1)) & _MASK | 1)) & _MASK
    return _signed(total)


def holds(lives: Sequence[Live]) -> int:
    """What a rank holds, as a number: equal on ranks that hold the same pieces, with whatever values."""
    said = ";".join(
        f"{one.name}:{tuple(one.tensor.shape)}:{one.tensor.dtype}:{one.tensor.device.type}:{one.global_shape}:{one.corner}"
        for one in lives
    )
    return _signed(digest(said.encode()))


class Compared(NamedTuple):
    """What a comparison has come to, on all ranks alike."""

    vote: Vote
    odd: tuple[Odd, ...] = ()
    tensors: tuple[str, ...] = ()
    """Where there is no majority: the tensors that differ."""
    prints: tuple[int, ...] = ()
    """By rank: one number for the bits of what it holds."""


def compare(lives: Sequence[Live], hasher: Hasher) -> Compared:
    """Compare this rank's pieces with its replicas'. Collective: 16 bytes per rank while all is well."""
    prints = hasher.each([one.tensor for one in lives])
    rows = gather([holds(lives) if lives else None, together(prints)])
    said = vote([(~rank if held is None else held, value) for rank, (held, value) in enumerate(rows)])
    every_print = tuple(value for _, value in rows)
    if said.agreed:
        return Compared(said, prints=every_print)
    every: list[list[int]] = gather(prints)
    names = [one.name for one in lives]
    shown: list[Odd] = []
    for rank, model in list(zip(said.odd, said.model, strict=True))[:SHOWN_RANKS]:
        mine = [names[i] for i in _differing(every[rank], every[model])] if _is(rank) else []
        shown.append(_look(Odd(rank, model, tuple(gather(mine)[rank])), lives))
    loose: list[int] = []
    if said.tied:
        first = every[said.tied[0]]
        loose = sorted({i for rank in said.tied for i in _differing(first, every[rank])})
    mine = [names[i] for i in loose if i < len(names)] if said.tied and _is(said.tied[0]) else []
    tied = gather(mine)[said.tied[0]] if said.tied else []
    return Compared(said, tuple(shown), tuple(tied), every_print)


def _differing(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _is(rank: int) -> bool:
    return rank == (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


def _look(odd: Odd, lives: Sequence[Live]) -> Odd:
    """Have the majority's rank hand over the first differing tensor, and tell which bits are others. Collective."""
    held = {one.name: one.tensor for one in lives}
    name = odd.tensors[0]
    size = held[name].nbytes if _is(odd.model) else 0
    size = int(gather(size)[odd.model])
    if size > SHOWN_BYTES:
        return odd
    raw = bytearray(_bytes(held[name]) if _is(odd.model) else bytes(size))
    hand_out(memoryview(raw), odd.model)
    found: tuple[int, list[list[int]]] = (0, [])
    if _is(odd.rank):
        found = differing_bits(_bytes(held[name]), bytes(raw), held[name].element_size())
    count, bits = gather(list(found))[odd.rank]
    return odd._replace(bits=tuple(Bit(*pair) for pair in bits), changed=count)


def _bytes(tensor: Tensor) -> bytes:
    here = tensor.detach().cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)


def differing_bits(one: bytes, other: bytes, element: int) -> tuple[int, list[list[int]]]:
    """How many bits differ, and the first few as [element, bit] (little-endian elements of ``element`` bytes)."""
    changed = torch.frombuffer(bytearray(one), dtype=torch.uint8) ^ torch.frombuffer(
        bytearray(other), dtype=torch.uint8
    )
    count = sum(int((changed & (1 << bit)).count_nonzero()) for bit in range(8))
    listed: list[list[int]] = []
    for at in changed.nonzero().flatten()[:SHOWN_BITS].tolist():
        value = int(changed[at])
        listed += [[at // element, at % element * 8 + bit] for bit in range(8) if value >> bit & 1]
    return count, listed[:SHOWN_BITS]


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
