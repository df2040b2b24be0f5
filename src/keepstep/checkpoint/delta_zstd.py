"""The codec of differences: integer difference or XOR, byte planes, zstd; by threads, stretch by stretch.

For every stretch the forms are tried on a small sample, and the whole is encoded in the one that came out smallest.
NumPy and zstandard work without the interpreter's lock, so threads add up.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from keepstep.checkpoint.delta import RAW, SAME, Codec, Measured, Stretch, codec
from keepstep.checkpoint.exceptions import PayloadDamaged
from keepstep.checkpoint.generation import Frame

Bytes = NDArray[np.uint8]

MAX_WORKERS = 4
"""Threads of one call at most: this runs beside training."""
SAMPLES, SAMPLE = 4, 8 * 1024
"""A form is tried on this many pieces of this many bytes of a stretch."""
BLOCK = 256 * 1024
"""Bytes that are transformed at a time: they stay in the processor's cache from pass to pass."""
GLANCE = 4096
"""Bytes that are compared before it is worth comparing a whole stretch."""
MEASURED_SHARE, MEASURED_LEAST = 16, 8
"""``measure`` encodes one in so many stretches, and at least so many."""
LEVEL = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, hash_log=10, min_match=7)
"""zstd's fastest level with a match finder that gives up early: byte planes are for its entropy coder, and repeats of
less than seven bytes cost more than they save."""

_kept = threading.local()


def encode(
    payload: memoryview, base: memoryview | None, plan: Sequence[Stretch], *, workers: int = 0
) -> Iterator[tuple[Frame, bytes]]:
    """See ``delta.encode``; ``plan`` covers the payload."""
    new, old = _bytes(payload), None if base is None else _bytes(base)

    def one(stretch: Stretch) -> tuple[str, bytes]:
        part = slice(stretch.start, stretch.start + stretch.nbytes)
        return _encode(new[part], None if old is None else old[part], stretch.width)

    offset = 0
    for stretch, (name, stored) in zip(plan, _ordered(one, plan, workers), strict=True):
        yield Frame(stretch.start, stretch.nbytes, offset, len(stored), name), stored
        offset += len(stored)


def decode(
    frames: Sequence[Frame], file: memoryview, base: memoryview | None, out: memoryview, *, workers: int = 0
) -> None:
    """See ``delta.decode``; ``frames`` have been checked."""
    source, target, old = _bytes(file), _bytes(out), None if base is None else _bytes(base)

    def one(frame: Frame) -> None:
        part = slice(frame.start, frame.start + frame.nbytes)
        stored = source[frame.offset : frame.offset + frame.stored]
        _decode(frame, stored, None if old is None else old[part], target[part])

    for _ in _ordered(one, frames, workers):
        pass


def measure(payload: memoryview, base: memoryview, plan: Sequence[Stretch]) -> Measured:
    """See ``delta.measure``."""
    new, old = _bytes(payload), _bytes(base)
    count = min(len(plan), max(MEASURED_LEAST, len(plan) // MEASURED_SHARE))
    chosen = [plan[number * len(plan) // count] for number in range(count)]
    total = stored = 0
    began = time.perf_counter()

    def one(stretch: Stretch) -> tuple[int, int]:
        part = slice(stretch.start, stretch.start + stretch.nbytes)
        return stretch.nbytes, len(_encode(new[part], old[part], stretch.width)[1])

    for nbytes, size in _ordered(one, chosen, 0):
        total, stored = total + nbytes, stored + size
    took = max(time.perf_counter() - began, 1e-9)
    return Measured(stored / total, total / took) if total else Measured(1.0, 0.0)


# ---------------------------------------------------------------- one stretch


def _encode(new: Bytes, old: Bytes | None, width: int) -> tuple[str, bytes]:
    if old is not None and _equal(new, old):
        return SAME, b""
    forms = [Codec("planes", width)] if width > 1 else [Codec("", 1)]
    if old is not None:
        forms += [Codec("sub", width), Codec("xor", width)]
    best = forms[0]
    if len(forms) > 1:
        best = min(forms, key=lambda form: _sampled(new, old, form))
    stored: bytes = _compressor().compress(_transform(new, old, best))
    if len(stored) >= len(new):
        return RAW, new.tobytes()
    return (f"{best.form}{best.width}+zstd" if best.form else "zstd"), stored


def _sampled(new: Bytes, old: Bytes | None, form: Codec) -> int:
    """Compressed bytes of a few pieces, spread over the stretch."""
    if len(new) <= SAMPLES * SAMPLE:
        return len(_compressor().compress(_transform(new, old, form)))
    step = (len(new) - SAMPLE) // (SAMPLES - 1) // 16 * 16
    places = [slice(k * step, k * step + SAMPLE) for k in range(SAMPLES)]
    piece = np.concatenate([new[place] for place in places])
    base = None if old is None else np.concatenate([old[place] for place in places])
    return len(_compressor().compress(_transform(piece, base, form)))


def _decode(frame: Frame, stored: Bytes, old: Bytes | None, out: Bytes) -> None:
    where = f"frame {frame.codec} of payload bytes {frame.start} to {frame.start + frame.nbytes}"
    if frame.codec == RAW:
        out[:] = stored
        return
    if frame.codec == SAME:
        if old is None:
            raise PayloadDamaged(f"{where}: rests on a base, and there is none")
        if out.ctypes.data != old.ctypes.data:
            out[:] = old
        return
    form, width = codec(frame)
    if form in ("xor", "sub") and old is None:
        raise PayloadDamaged(f"{where}: rests on a base, and there is none")
    try:
        # Asked before anything is allocated: a damaged frame must not be able to ask for all memory.
        if (size := zstandard.frame_content_size(stored.data)) != frame.nbytes:
            raise PayloadDamaged(f"{where}: says that it holds {size} bytes")
        body = _decompressor().decompress(stored.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadDamaged(f"{where}: {error}") from error
    if len(body) != frame.nbytes:
        raise PayloadDamaged(f"{where}: holds {len(body)} bytes")
    _restore(np.frombuffer(body, np.uint8), old, Codec(form, width), out)


# ---------------------------------------------------------------- forms


def _transform(new: Bytes, old: Bytes | None, form: Codec) -> memoryview:
    """The bytes that are compressed: planes of the elements in ``form``, then what is no whole element.

    They lie in this thread's scratch memory until its next call.
    """
    if form.form == "":
        return new.data
    width, whole = form.width, len(new) // form.width * form.width
    mixed = _scratch("mixed", len(new))
    planes = mixed[:whole].reshape(width, -1)
    for part in _blocks(whole):
        here = new[part]
        if form.form != "planes":
            assert old is not None
            here = _difference(here, old[part], form)
        planes[:, part.start // width : part.stop // width] = here.reshape(-1, width).T
    if old is None or form.form == "planes":
        mixed[whole:] = new[whole:]
    else:
        np.bitwise_xor(new[whole:], old[whole:], out=mixed[whole:])
    return mixed.data


def _difference(new: Bytes, old: Bytes, form: Codec) -> Bytes:
    """XOR, or the difference as integers, small in either direction: 0, -1, 1, -2 become 0, 1, 2, 3."""
    found = _scratch("block", len(new))
    if form.form == "xor":
        return np.bitwise_xor(new, old, out=found)
    signed = np.dtype(f"<i{form.width}")
    step, sign = found.view(signed), _scratch("sign", len(new)).view(signed)
    np.subtract(new.view(signed), old.view(signed), out=step)
    np.right_shift(step, 8 * form.width - 1, out=sign)
    np.left_shift(step, 1, out=step)
    np.bitwise_xor(step, sign, out=step)
    return found


def _restore(body: Bytes, old: Bytes | None, form: Codec, out: Bytes) -> None:
    """The way back. ``out`` may be ``old``: each element is read before it is written."""
    width, whole = form.width, len(body) // form.width * form.width
    planes = body[:whole].reshape(width, -1)
    for part in _blocks(whole):
        count = part.stop - part.start
        mixed = _scratch("block", count)
        elements = mixed.reshape(-1, width)
        for place in range(width):
            elements[:, place] = planes[place, part.start // width : part.stop // width]
        if form.form == "sub":
            assert old is not None
            kind = np.dtype(f"<u{width}")
            step, sign = mixed.view(kind), _scratch("sign", count).view(kind)
            np.bitwise_and(step, 1, out=sign)
            np.negative(sign, out=sign)
            np.right_shift(step, 1, out=step)
            np.bitwise_xor(step, sign, out=step)
            np.add(old[part].view(kind), step, out=out[part].view(kind))
        elif form.form == "xor":
            assert old is not None
            np.bitwise_xor(mixed, old[part], out=out[part])
        else:
            out[part] = mixed
    if old is None or form.form in ("", "planes"):
        out[whole:] = body[whole:]
    else:
        np.bitwise_xor(body[whole:], old[whole:], out=out[whole:])


def _blocks(size: int) -> Iterator[slice]:
    for at in range(0, size, BLOCK):
        yield slice(at, min(at + BLOCK, size))


def _scratch(name: str, size: int) -> Bytes:
    """Memory of this thread that is used again and again, so that it stays in the cache."""
    held: dict[str, Bytes] = _kept.__dict__.setdefault("scratch", {})
    if name not in held or len(held[name]) < size:
        held[name] = np.empty(max(size, BLOCK), np.uint8)
    return held[name][:size]


def _equal(new: Bytes, old: Bytes) -> bool:
    return np.array_equal(new[:GLANCE], old[:GLANCE]) and np.array_equal(new, old)


# ---------------------------------------------------------------- threads


def _ordered(work: Callable[[Any], Any], items: Sequence[Any], workers: int) -> Iterator[Any]:
    """Results in the order of the items; few are under way at once, so memory stays bounded."""
    workers = workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    if workers == 1 or len(items) < 2:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="keepstep-delta")
    under_way: deque[Future[Any]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: they are not made for sharing."""
    if not hasattr(_kept, "compressor"):
        _kept.compressor = zstandard.ZstdCompressor(compression_params=LEVEL)
    found: zstandard.ZstdCompressor = _kept.compressor
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _kept.decompressor
    return found


def _bytes(view: memoryview) -> Bytes:
    return np.frombuffer(view, np.uint8)
