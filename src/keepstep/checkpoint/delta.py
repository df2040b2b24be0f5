"""Differences: what a generation stores when most of it can be told from the one before. Planning is pure.

A payload is cut into *stretches* that never mix elements of different width, and each becomes one ``Frame``. The codec
of a frame says how its bytes follow from the file and the base; its name is all that a reader needs:

    same          the base's bytes
    raw           the file's bytes
    zstd          the file's bytes, decompressed
    planes4+zstd  decompressed, then byte planes of 4-byte elements put together again
    xor4+zstd     the same, then XOR with the base
    sub4+zstd     the same, then un-zigzagged and added to the base as 4-byte integers

Consecutive steps change a weight by a little: as integers, the bits of both lie near each other, so the high byte
planes of the difference are almost empty. That is exact for any bit pattern, and never larger than raw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from keepstep.checkpoint.exceptions import CheckpointError, PayloadDamaged
from keepstep.checkpoint.generation import Frame
from keepstep.checkpoint.slot import TensorEntry

STRETCH = 2 * 1024 * 1024
"""Most bytes of payload in one frame that is written: a unit of work for a thread."""
MAX_FRAME = 16 * 1024 * 1024
"""Largest frame that is read: what a damaged or foreign description can make a reader allocate."""
MAX_RATIO = 0.9
"""A difference that takes a larger share of the full size is not written: it would save little and lengthen a chain."""
NEGLIGIBLE_S = 1.0
"""A difference that takes no longer is not refused for its time."""
RESTS = 10
"""Full generations after a difference that did not pay, before one is tried again."""
WIDTHS = (1, 2, 4, 8)
SAME, RAW = "same", "raw"
_CODEC = re.compile(r"^(?:(planes|xor|sub)([1248])\+)?zstd$")


class Stretch(NamedTuple):
    """Bytes of a payload whose elements are all ``width`` bytes wide."""

    start: int
    nbytes: int
    width: int


class Codec(NamedTuple):
    """What a codec's name says: ``form`` is ``""``, ``planes``, ``xor`` or ``sub``."""

    form: str
    width: int


class Measured(NamedTuple):
    """What differences cost: stored bytes per byte of payload, and bytes of payload encoded per second."""

    ratio: float
    rate: float


class Verdict(NamedTuple):
    """Whether to write a difference, and the sentence that says why."""

    worth: bool
    reason: str


# ---------------------------------------------------------------- planning


def width(entry: TensorEntry) -> int:
    """Bytes of one number of a tensor; a complex element is two numbers. Told from the record, not from torch."""
    count = math.prod(entry.shape)
    if count == 0 or entry.nbytes % count:
        return 1
    size = entry.nbytes // count
    if entry.dtype.startswith("complex"):
        size //= 2
    return size if size in WIDTHS else 1


def stretches(size: int, tensors: Sequence[TensorEntry]) -> Iterator[Stretch]:
    """Cut ``size`` bytes of payload. Small neighbours of one width share a stretch."""
    runs: list[tuple[int, int, int]] = []
    end = 0
    for entry in sorted(tensors, key=lambda entry: entry.offset):
        start, stop = max(entry.offset, end), min(entry.offset + entry.nbytes, size)
        if stop <= start:
            continue
        if start > end:
            runs.append((end, start, 1))
        runs.append((start, stop, width(entry)))
        end = stop
    if end < size:
        runs.append((end, size, 1))
    joined: list[tuple[int, int, int]] = []
    for start, stop, wide in runs:
        if joined and joined[-1][2] == wide:
            joined[-1] = (joined[-1][0], stop, wide)
        else:
            joined.append((start, stop, wide))
    for start, stop, wide in joined:
        for at in range(start, stop, STRETCH):
            yield Stretch(at, min(STRETCH, stop - at), wide)


def codec(frame: Frame) -> Codec:
    """Read a compressed frame's codec.

    Raises:
        PayloadDamaged: no such codec.
    """
    match = _CODEC.match(frame.codec)
    if match is None:
        raise PayloadDamaged(f"{_name(frame)}: codec {frame.codec[:32]!r} is not known to this keepstep; update it")
    return Codec(match[1] or "", int(match[2] or 1))


def check(frames: Sequence[Frame], *, stored: int, payload: int) -> None:
    """Whether frames cover a payload exactly, one behind the other, from a file of ``stored`` bytes.

    Raises:
        PayloadDamaged: names the first frame that is wrong.
    """
    at = 0
    for frame in frames:
        if frame.start != at or not 0 < frame.nbytes <= MAX_FRAME:
            raise PayloadDamaged(f"{_name(frame)}: expected 1 to {MAX_FRAME} bytes from byte {at} on")
        if frame.offset < 0 or frame.stored < 0 or frame.offset + frame.stored > stored:
            raise PayloadDamaged(
                f"{_name(frame)}: lies at {frame.offset}+{frame.stored} in a file of {stored} bytes; it is cut short"
            )
        expected = {SAME: 0, RAW: frame.nbytes}.get(frame.codec)
        if expected is None:
            codec(frame)
        elif frame.stored != expected:
            raise PayloadDamaged(f"{_name(frame)}: {frame.codec} with {frame.stored} instead of {expected} bytes")
        at += frame.nbytes
    if at != payload:
        raise PayloadDamaged(f"frames end at byte {at} of a payload of {payload} bytes")


def _name(frame: Frame) -> str:
    return f"frame {frame.codec[:32]} of payload bytes {frame.start} to {frame.start + frame.nbytes}"


# ---------------------------------------------------------------- choosing


def worth_it(*, payload: int, measured: Measured, tier_rate: float, interval_s: float = 0.0) -> Verdict:
    """Whether a difference pays against a full write of the same payload.

    It has to be smaller, and it has to be durable no later than a full one would be, or at least soon, or before the
    next generation is due. Encoding and writing overlap, so the slower of the two counts.

    Args:
        payload: bytes of the payload.
        measured: what ``measure`` found on this payload, or what the last difference took.
        tier_rate: bytes per second that the tier has been taking; 0 where nothing is known yet.
        interval_s: seconds until the next generation is due; 0 where that is not known.
    """
    share = f"{measured.ratio:.0%} of {payload / 1e6:,.0f} MB"
    if measured.ratio > MAX_RATIO:
        return Verdict(False, f"full: a difference would take {share}, more than {MAX_RATIO:.0%}")
    if measured.rate <= 0:
        return Verdict(False, "full: the rate of encoding is not known")
    encode_s = payload / measured.rate
    if tier_rate <= 0:
        return Verdict(True, f"difference: {share}; the tier's rate is not known yet")
    full_s, delta_s = payload / tier_rate, max(encode_s, payload * measured.ratio / tier_rate)
    times = f"{delta_s:.2f} s against {full_s:.2f} s for a full one"
    if delta_s <= max(full_s, NEGLIGIBLE_S):
        return Verdict(True, f"difference: {share}, {times}")
    if interval_s > 0 and delta_s <= interval_s:
        return Verdict(True, f"difference: {share}, {times}, and the next is due in {interval_s:.0f} s")
    return Verdict(False, f"full: encoding at {measured.rate / 1e6:,.0f} MB/s is slower than the tier: {times}")


class Choice:
    """Whether the next generation should be a difference, from what the last ones took. Pure; told the time.

    Attributes:
        verdict: the answer, with its reason.
    """

    def __init__(self) -> None:
        self.verdict = Verdict(True, "difference: none has been measured yet")
        self._full_rate = self._interval_s = 0.0
        self._last_s: float | None = None
        self._resting = 0

    def wrote(self, *, full: bool, payload: int, size: int, took_s: float, at_s: float) -> None:
        """Take note of a generation.

        Args:
            size: bytes that were stored.
            took_s: seconds until it was durable; 0 where that was not measured.
            at_s: time of a clock that does not jump.
        """
        if self._last_s is not None:
            self._interval_s = at_s - self._last_s
        self._last_s = at_s
        if full:
            if took_s > 0:
                self._full_rate = payload / took_s
            if self._resting:
                self._resting -= 1
                if not self._resting:
                    self.verdict = Verdict(True, "difference: tried again")
            return
        if not payload:
            return
        measured = Measured(size / payload, payload / took_s if took_s > 0 else float("inf"))
        self.verdict = worth_it(
            payload=payload, measured=measured, tier_rate=self._full_rate, interval_s=self._interval_s
        )
        if not self.verdict.worth:
            self._resting = RESTS


# ---------------------------------------------------------------- doing


def encode(
    payload: memoryview, base: memoryview | None, tensors: Sequence[TensorEntry], *, workers: int = 0
) -> Iterator[tuple[Frame, bytes]]:
    """Frames of a payload with their stored bytes, in order; the file is these bytes one behind the other.

    Args:
        base: the payload that a reader will have; ``None`` for frames that rest on nothing.
        workers: threads; 0 for as many as this process may use, up to a limit.

    Raises:
        CheckpointError: the base has another size, or zstandard is not installed.
    """
    if base is not None and base.nbytes != payload.nbytes:
        raise CheckpointError(
            f"a payload of {payload.nbytes} bytes has no difference to one of {base.nbytes}; write it in full"
        )
    plan = list(stretches(payload.nbytes, tensors))
    found: Iterator[tuple[Frame, bytes]] = _zstd().encode(payload, base, plan, workers=workers)
    return found


def decode(
    frames: Sequence[Frame], file: memoryview, base: memoryview | None, out: memoryview, *, workers: int = 0
) -> None:
    """Rebuild a payload into ``out``, which may be the memory of ``base`` itself: a chain is applied in place.

    Raises:
        PayloadDamaged: names the frame that is malformed. What ``out`` holds is then undefined.
        CheckpointError: zstandard is not installed.
    """
    check(frames, stored=file.nbytes, payload=out.nbytes)
    if base is not None and base.nbytes != out.nbytes:
        raise PayloadDamaged(f"the base has {base.nbytes} bytes, the difference stands for {out.nbytes}")
    _zstd().decode(frames, file, base, out, workers=workers)


def measure(payload: memoryview, base: memoryview, tensors: Sequence[TensorEntry]) -> Measured:
    """What a difference of this payload would take, told from every few of its stretches."""
    found: Measured = _zstd().measure(payload, base, list(stretches(payload.nbytes, tensors)))
    return found


def missing() -> str:
    """What stands in the way of differences in this installation, with the way out; empty when nothing does."""
    try:
        _zstd()
    except CheckpointError as error:
        return str(error)
    return ""


def _zstd() -> ModuleType:
    try:
        from keepstep.checkpoint import delta_zstd
    except ImportError as error:
        raise CheckpointError(
            f"differences need numpy and zstandard ({error}): pip install 'keepstep[checkpoint]', or write every "
            f"generation in full"
        ) from error
    return delta_zstd
