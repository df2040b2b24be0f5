"""Delta: a difference restores every bit, costs no more than the bytes themselves, and admits to being damaged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import delta, delta_zstd
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.delta import Measured
from keepstep.checkpoint.exceptions import CheckpointError, PayloadDamaged
from keepstep.checkpoint.generation import Frame
from keepstep.checkpoint.slot import TensorEntry

KINDS = [("float32", 4), ("bfloat16", 2), ("int64", 8), ("uint8", 1), ("complex64", 8), ("complex128", 16)]
SPECIAL = [0x00000000, 0x80000000, 0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF]
"""Zero, minus zero, two NaNs, both infinities, the smallest numbers that are not normal, the largest."""


@contextlib.contextmanager
def small_stretches() -> Iterator[None]:
    """Stretches and blocks of a size that small payloads cross many times."""
    before = delta.STRETCH, delta_zstd.BLOCK, delta_zstd.SAMPLE
    delta.STRETCH, delta_zstd.BLOCK, delta_zstd.SAMPLE = 1024, 128, 64
    try:
        yield
    finally:
        delta.STRETCH, delta_zstd.BLOCK, delta_zstd.SAMPLE = before


@st.composite
def payloads(draw: st.DrawFn) -> tuple[bytes, bytes, list[TensorEntry]]:
    """A payload, a base that it resembles more or less, and records that may leave bytes out."""
    entries, at = [], 0
    for number in range(draw(st.integers(0, 5))):
        dtype, size = draw(st.sampled_from(KINDS))
        count = draw(st.integers(0, 700))
        at += draw(st.sampled_from([0, 0, 0, 1, 7]))
        entries.append(TensorEntry(f"t{number}", dtype, (count,), at, count * size))
        at += count * size
    total = at + draw(st.sampled_from([0, 0, 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, total, np.uint8)
    how = draw(st.sampled_from(["same", "near", "special", "sparse", "other", "ones"]))
    new = base.copy()
    words = new[: total // 4 * 4].view("<u4")
    if how == "near":
        words += rng.integers(0, 1000, len(words), np.uint32) - np.uint32(500)
    elif how == "special":
        words[:] = rng.choice(np.array(SPECIAL, np.uint32), len(words))
    elif how == "sparse" and total:
        new[rng.integers(0, total, 3)] ^= 0x80
    elif how == "other":
        new = rng.integers(0, 256, total, np.uint8)
    elif how == "ones":
        new[:], base[:] = 0xFF, rng.choice(np.array([0, 0xFF], np.uint8), total)
    return new.tobytes(), base.tobytes(), entries


def encoded(new: bytes, base: bytes | None, entries: list[TensorEntry], workers: int = 1) -> tuple[list[Frame], bytes]:
    held = None if base is None else memoryview(base)
    pairs = list(delta.encode(memoryview(new), held, entries, workers=workers))
    return [frame for frame, _ in pairs], b"".join(stored for _, stored in pairs)


def decoded(frames: list[Frame], file: bytes, base: bytes | None, size: int, workers: int = 1) -> bytes:
    out = bytearray(size)
    held = None if base is None else memoryview(base)
    delta.decode(frames, memoryview(file), held, memoryview(out), workers=workers)
    return bytes(out)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(payloads(), st.booleans(), st.integers(1, 2))
def test_every_bit_comes_back(payload: tuple[bytes, bytes, list[TensorEntry]], rests: bool, workers: int) -> None:
    """Any bytes, over any base or none, by one thread or two; the file is never larger than the payload."""
    new, base, entries = payload
    held = base if rests else None
    with small_stretches():
        frames, file = encoded(new, held, entries, workers)
        assert decoded(frames, file, held, len(new), workers) == new
    assert len(file) <= len(new)
    assert [frame.offset for frame in frames] == [sum(f.stored for f in frames[:n]) for n in range(len(frames))]
    if not rests:
        assert decoded(frames, file, None, len(new)) == new


@settings(max_examples=60, deadline=None, derandomize=True)
@given(payloads())
def test_a_chain_is_applied_in_place(payload: tuple[bytes, bytes, list[TensorEntry]]) -> None:
    """The memory of the base may be the memory of the result."""
    new, base, entries = payload
    with small_stretches():
        there, file = encoded(new, base, entries)
        back, other = encoded(base, new, entries)
        memory = bytearray(base)
        view = memoryview(memory)
        delta.decode(there, memoryview(file), view, view, workers=2)
        assert memory == new
        delta.decode(back, memoryview(other), view, view, workers=2)
        assert memory == base


@settings(max_examples=150, deadline=None, derandomize=True)
@given(payloads())
def test_stretches_cover_a_payload(payload: tuple[bytes, bytes, list[TensorEntry]]) -> None:
    """Without gap or overlap, whole elements each, and none holds elements of two widths."""
    new, _, entries = payload
    with small_stretches():
        found = list(delta.stretches(len(new), entries))
        most = delta.STRETCH
    at = 0
    for stretch in found:
        assert stretch.start == at
        assert 0 < stretch.nbytes <= most
        at += stretch.nbytes
        for entry in entries:
            inside = min(at, entry.offset + entry.nbytes) - max(stretch.start, entry.offset)
            if inside > 0:
                assert stretch.width == delta.width(entry)
                assert (stretch.start - entry.offset) % stretch.width == 0 or stretch.start < entry.offset
    assert at == len(new)


@pytest.mark.parametrize("rests", [True, False])
def test_records_that_do_not_fit_cost_only_room(rests: bool) -> None:
    """Overlapping or cut records lead to odd stretches, never to a wrong byte."""
    rng = np.random.default_rng(1)
    base = rng.integers(0, 4, 4003, np.uint8)
    new = base ^ rng.integers(0, 2, 4003, np.uint8)
    entries = [TensorEntry("a", "float32", (501,), 0, 2004), TensorEntry("b", "float64", (999,), 1999, 7992)]
    held = base.tobytes() if rests else None
    frames, file = encoded(new.tobytes(), held, entries)
    assert [frame.codec[-5:] for frame in frames] == ["+zstd", "+zstd"]
    assert decoded(frames, file, held, 4003) == new.tobytes()


DTYPES = sorted(
    {str(d) for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")}
)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_torch(name: str) -> None:
    """Whatever torch can hold is told by its record and comes back; numbers are compared plane by plane."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    rng = np.random.default_rng(3)
    count = 4099
    base = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    new = base.copy()
    new[:: dtype.itemsize] += 1
    entry = TensorEntry("x", name.removeprefix("torch."), (count,), 0, len(new))
    assert delta.width(entry) == (dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize)
    frames, file = encoded(new.tobytes(), base.tobytes(), [entry])
    assert decoded(frames, file, base.tobytes(), len(new)) == new.tobytes()
    assert len(file) < len(new) * (0.1 if dtype.itemsize == 1 else 0.6)


def test_what_stands_still_takes_no_room() -> None:
    """Frozen layers cost a line of the description and nothing in the file."""
    frozen = np.random.default_rng(1).integers(0, 256, 5 << 20, np.uint8).tobytes()
    frames, file = encoded(frozen, frozen, [TensorEntry("x", "float32", (len(frozen) // 4,), 0, len(frozen))])
    assert {frame.codec for frame in frames} == {delta.SAME}
    assert file == b""
    assert max(frame.nbytes for frame in frames) == delta.STRETCH


def test_small_steps_of_weights_are_differences() -> None:
    """A weight's next value lies near the one before: as integers the bits differ by little, and that is stored."""
    rng = np.random.default_rng(1)
    base = rng.normal(0, 0.02, 300_000).astype(np.float32)
    new = (base + rng.normal(0, 1e-5, len(base))).astype(np.float32)
    frames, file = encoded(new.tobytes(), base.tobytes(), [TensorEntry("w", "float32", base.shape, 0, base.nbytes)])
    assert {frame.codec for frame in frames} == {"sub4+zstd"}
    assert len(file) < 0.65 * new.nbytes


def test_flipped_bits_are_told_by_xor() -> None:
    """Where bits are switched rather than numbers moved, XOR is the smaller form, and it is taken."""
    rng = np.random.default_rng(1)
    base = rng.integers(0, 2**32, 200_000, np.uint32)
    new = base ^ (rng.integers(0, 2, len(base), np.uint32) << np.uint32(15)) ^ np.uint32(0x01000000)
    frames, file = encoded(new.tobytes(), base.tobytes(), [TensorEntry("w", "int32", base.shape, 0, base.nbytes)])
    assert {frame.codec for frame in frames} == {"xor4+zstd"}
    assert decoded(frames, file, base.tobytes(), new.nbytes) == new.tobytes()


def test_noise_is_stored_as_it_is() -> None:
    """What cannot be made smaller is not made larger."""
    rng = np.random.default_rng(1)
    new, base = (rng.integers(0, 256, 3_000_001, np.uint8).tobytes() for _ in range(2))
    frames, file = encoded(new, base, [TensorEntry("n", "uint8", (len(new),), 0, len(new))])
    assert {frame.codec for frame in frames} == {delta.RAW}
    assert file == new


# ---------------------------------------------------------------- damage


def an_example() -> tuple[bytes, bytes, list[Frame], bytes]:
    rng = np.random.default_rng(5)
    base = rng.normal(0, 0.02, 3000).astype(np.float32)
    new = (base * np.float32(1.0001)).astype(np.float32)
    new[500:800] = base[500:800]
    tail = rng.integers(0, 256, 900, np.uint8).tobytes()
    whole, old = new.tobytes() + tail, base.tobytes() + tail[::-1]
    with small_stretches():
        frames, file = encoded(whole, old, [TensorEntry("w", "float32", (3000,), 0, 12000)])
    assert {frame.codec for frame in frames} == {"sub4+zstd", "same", "raw"}
    return whole, old, frames, file


WHOLE, OLD, FRAMES, FILE = an_example()
ODD = st.one_of(st.integers(-3, 20_000), st.sampled_from([-1, 2**31, 2**63 - 1, -(2**63)]))
CODECS = ["same", "raw", "zstd", "xor4+zstd", "sub1+zstd", "sub4+zstd", "planes8+zstd", "sub3+zstd", "", "zip", "\n"]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_malformed_frames_are_refused_by_name(data: st.DataObject) -> None:
    """Whatever a frame or the file says: refused with a sentence, or decoded within ``out``. Nothing else happens."""
    frames, file = list(FRAMES), bytearray(FILE)
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(frames) - 1))
        what = data.draw(st.sampled_from(["start", "nbytes", "offset", "stored", "codec", "drop", "flip", "cut"]))
        if what == "drop" and len(frames) > 1:
            del frames[which]
        elif what == "flip" and file:
            file[data.draw(st.integers(0, len(file) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del file[data.draw(st.integers(0, len(file))) :]
        elif what == "codec":
            frames[which] = msgspec.structs.replace(frames[which], codec=data.draw(st.sampled_from(CODECS)))
        elif what in ("start", "nbytes", "offset", "stored"):
            frames[which] = msgspec.structs.replace(frames[which], **{what: data.draw(ODD)})
    base = data.draw(st.sampled_from([OLD, None]))
    guarded = bytearray(b"\xa5" * (len(WHOLE) + 128))
    out = memoryview(guarded)[64 : 64 + len(WHOLE)]
    held = None if base is None else memoryview(base)
    with contextlib.suppress(PayloadDamaged):
        delta.decode(frames, memoryview(file), held, out, workers=1)
    assert guarded[:64] == b"\xa5" * 64
    assert guarded[-64:] == b"\xa5" * 64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"codec": "lz9"}, "codec 'lz9' is not known"),
        ({"nbytes": 0}, "expected 1 to"),
        ({"nbytes": delta.MAX_FRAME + 1}, "expected 1 to"),
        ({"offset": len(FILE)}, "cut short"),
        ({"stored": 5}, r"sub4\+zstd"),
        ({"codec": "raw"}, "instead of"),
    ],
)
def test_the_frame_that_is_wrong_is_named(change: dict[str, object], says: str) -> None:
    """The sentence tells which bytes of the payload are lost, and why."""
    assert FRAMES[1].codec == "sub4+zstd"
    frames = [FRAMES[0], msgspec.structs.replace(FRAMES[1], **change), *FRAMES[2:]]
    with pytest.raises(PayloadDamaged, match=says) as found:
        decoded(frames, FILE, OLD, len(WHOLE))
    assert "payload bytes 1024 to" in str(found.value)


def test_a_frame_cannot_ask_for_memory() -> None:
    """A frame whose content claims another size than its description is refused before anything is allocated."""
    import zstandard

    bomb = zstandard.compress(bytes(1 << 26))
    frame = Frame(0, 1000, 0, len(bomb), "zstd")
    with pytest.raises(PayloadDamaged, match="says that it holds 67108864 bytes"):
        decoded([frame], bomb, None, 1000)


def test_differences_need_their_base() -> None:
    """A base of another size, or none, is told before anything is done."""
    with pytest.raises(CheckpointError, match="write it in full"):
        encoded(bytes(8), bytes(4), [])
    with pytest.raises(PayloadDamaged, match="the base has 4 bytes"):
        decoded(FRAMES, FILE, bytes(4), len(WHOLE))
    with pytest.raises(PayloadDamaged, match="rests on a base"):
        decoded(FRAMES, FILE, None, len(WHOLE))
    with pytest.raises(PayloadDamaged, match="frames end at byte"):
        decoded(FRAMES[:-1], FILE, OLD, len(WHOLE))


def test_without_zstandard_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base installation has no compressor: one sentence says what to install."""
    import sys

    monkeypatch.delattr("keepstep.checkpoint.delta_zstd")
    monkeypatch.delitem(sys.modules, "keepstep.checkpoint.delta_zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CheckpointError, match=r"pip install 'keepstep\[checkpoint\]'"):
        delta.encode(memoryview(b""), None, [])
    assert "pip install" in delta.missing()
    assert not Basis().choice.verdict.worth  # the archiver writes every generation in full


def test_an_abandoned_encoder_leaves_no_thread() -> None:
    """Whoever stops in the middle, because a tier is full, leaves nothing running."""
    import threading

    new = np.random.default_rng(1).integers(0, 4, 20 << 20, np.uint8).tobytes()
    going = delta.encode(memoryview(new), None, [], workers=2)
    next(iter(going))
    assert any(thread.name.startswith("keepstep-delta") for thread in threading.enumerate())
    going.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("keepstep-delta") for thread in threading.enumerate())


# ---------------------------------------------------------------- the choice


def test_a_difference_must_pay() -> None:
    """The sentence tells what was compared."""
    slow = delta.worth_it(payload=10**9, measured=Measured(0.6, 300e6), tier_rate=100e6)
    assert slow.worth
    assert slow.reason == "difference: 60% of 1,000 MB, 6.00 s against 10.00 s for a full one"
    fast = delta.worth_it(payload=10**9, measured=Measured(0.6, 300e6), tier_rate=2e9)
    assert not fast.worth
    assert "slower than the tier" in fast.reason
    room = delta.worth_it(payload=10**9, measured=Measured(0.6, 300e6), tier_rate=2e9, interval_s=60)
    assert room.worth
    assert "due in 60 s" in room.reason
    assert not delta.worth_it(payload=10**9, measured=Measured(0.95, 9e9), tier_rate=1e6, interval_s=1e9).worth
    assert delta.worth_it(payload=10**9, measured=Measured(0.5, 1e8), tier_rate=0).worth
    assert not delta.worth_it(payload=10**9, measured=Measured(0.5, 0), tier_rate=0).worth


rates = st.floats(1e3, 1e11)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 10**13), st.floats(0, 1.5), rates, rates, st.floats(0, 1e6))
def test_never_later_and_larger(payload: int, ratio: float, rate: float, tier: float, interval: float) -> None:
    """A difference that is chosen is smaller, and durable before a full one would be or before the next is due."""
    verdict = delta.worth_it(payload=payload, measured=Measured(ratio, rate), tier_rate=tier, interval_s=interval)
    took = max(payload / rate, ratio * payload / tier)
    if verdict.worth:
        assert ratio < 1
        assert took <= max(payload / tier, delta.NEGLIGIBLE_S) or took <= interval
    slower = delta.worth_it(payload=payload, measured=Measured(ratio, rate), tier_rate=tier / 10, interval_s=interval)
    if verdict.worth and interval == 0:
        assert slower.worth  # a slower tier is all the more reason


def test_the_next_generation_follows_from_the_last_ones() -> None:
    """A difference that did not pay is followed by full ones for a while, and then tried again."""
    choice = delta.Choice()
    assert choice.verdict.worth
    choice.wrote(full=True, payload=10**9, size=10**9, took_s=1.0, at_s=0.0)
    choice.wrote(full=False, payload=10**9, size=6 * 10**8, took_s=2.0, at_s=60.0)
    assert choice.verdict.worth  # slower, but the next one is due in a minute only
    assert "due in 60 s" in choice.verdict.reason
    choice.wrote(full=False, payload=10**9, size=6 * 10**8, took_s=2.0, at_s=61.5)
    assert not choice.verdict.worth
    for number in range(delta.RESTS):
        assert not choice.verdict.worth
        choice.wrote(full=True, payload=10**9, size=10**9, took_s=1.0, at_s=63.0 + 1.5 * number)
    assert choice.verdict.worth
    choice.wrote(full=False, payload=10**9, size=95 * 10**7, took_s=0.1, at_s=100.0)
    assert not choice.verdict.worth
    assert "more than 90%" in choice.verdict.reason


def test_an_empty_or_unmeasured_generation_says_nothing() -> None:
    """Found there after a restart, or without a byte of payload: the choice stays as it was."""
    choice = delta.Choice()
    choice.wrote(full=False, payload=0, size=0, took_s=0.0, at_s=0.0)
    choice.wrote(full=True, payload=100, size=100, took_s=0.0, at_s=1.0)
    choice.wrote(full=False, payload=100, size=50, took_s=0.0, at_s=2.0)
    assert choice.verdict.worth


def test_measuring_comes_near_the_truth() -> None:
    """A few stretches tell what all of them take."""
    rng = np.random.default_rng(1)
    base = rng.normal(0, 0.02, 6_000_000).astype(np.float32)
    new = base.copy()
    new[: len(new) // 2] *= np.float32(1.001)
    entries = [TensorEntry("w", "float32", base.shape, 0, base.nbytes)]
    measured = delta.measure(memoryview(new.tobytes()), memoryview(base.tobytes()), entries)
    _, file = encoded(new.tobytes(), base.tobytes(), entries)
    assert math.isclose(measured.ratio, len(file) / new.nbytes, rel_tol=0.25)
    assert measured.rate > 0
    assert delta.measure(memoryview(b""), memoryview(b""), []) == Measured(1.0, 0.0)
