"""Transfer: one version from one keeper's memory into another's, or into a newcomer's.

The sender offers header and checksums; the receiver names the chunks it wants, which after a broken connection are
those that are missing; the bytes follow raw. Chunks that do not match their checksum are asked for again, a few
times. The receiver has the last word. While one chunk is received the one before is checked: both take the same time
as either.

    sender                              receiver
    Offer, header, checksums     ->
                                 <-     Want(chunks)
    bytes of these chunks        ->
                                 <-     Want(chunks)  for those that came damaged
    ...                                 ...
                                 <-     Took(ok)
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keepstep.checkpoint import sums
from keepstep.checkpoint.arrival import (
    MAX_SLOT,
    Arrival,
    Passport,
    Shelf,
    chunk_count,
    pack_table,
    unpack_table,
)
from keepstep.checkpoint.exceptions import (
    CheckpointError,
    PeerRefused,
    PeerUnreachable,
    SlotDamaged,
    SlotInvalid,
    VersionGone,
)
from keepstep.checkpoint.line import Line
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.model.wire import Frame

ASK_AGAIN = 3
"""How often damaged chunks of one transfer are asked for again."""
MAX_RANGES = 512
"""Stretches of chunks in one request; a receiver that misses more asks for the stretches between them, too."""
BESIDE_FROM = 16
"""Chunks from which on one is checked while the next is received; for fewer a thread would cost more than it saves."""
PREPARE_S = 300.0
"""How long a receiver may take to allocate the memory for a version."""


class Offer(Frame, frozen=True, kw_only=True):
    """``digest`` covers the header and the checksums that follow this word."""

    version: Version
    size: int
    digest: int


class Want(Frame, frozen=True, kw_only=True):
    """Chunks by number, as half-open ranges."""

    ranges: tuple[tuple[int, int], ...]


class Took(Frame, frozen=True, kw_only=True):
    """The end. ``damaged``: bytes did not match their checksums, however often they were asked for."""

    ok: bool
    why: str = ""
    damaged: bool = False


# ---------------------------------------------------------------- sending


def passport_of(slot: Slot, version: Version) -> Passport:
    """What identifies the sealed version in ``slot``.

    Raises:
        VersionGone: it is not there any more.
    """
    serial = slot.serial
    try:
        slot.refresh()
        header, size, table = slot.memory[:HEADER], slot.used, slot.table()
    except (SlotInvalid, ValueError, IndexError) as error:
        if isinstance(error, SlotDamaged) and slot.serial == serial:
            raise
        raise VersionGone(f"{slot.path.name}: step {version.step} is being overwritten") from error
    if slot.serial != serial or slot.version != version:
        raise VersionGone(f"{slot.path.name}: step {version.step} is being overwritten")
    return Passport(version=version, size=size, header=header, table=tuple(table))


def send(
    line: Line, slot: Slot, version: Version, *, pace: Pace | None = None, on_want: Callable[[], None] | None = None
) -> None:
    """Give the other end a sealed version.

    Args:
        pace: the bandwidth budget; none where left out.
        on_want: called when the other end turns out to lack something.

    Raises:
        VersionGone: it was overwritten meanwhile; there is a newer one.
        SlotDamaged: the other end could not get it undamaged.
        PeerRefused: it did not want it.
        PeerUnreachable: the connection broke.
    """
    serial, passport = slot.serial, passport_of(slot, version)
    papers = passport.header + pack_table(passport.table)
    line.say(Offer(version=version, size=passport.size, digest=sums.digest(papers)))
    line.send(papers)
    for _ in range(ASK_AGAIN + 2):
        word: Want | Took = line.hear(Want | Took, patience_s=PREPARE_S)
        if isinstance(word, Took):
            return _believe(line, word)
        if on_want is not None:
            on_want()
        for start, end in _bytes_of(line, word.ranges, passport.size):
            _send_range(line, slot, start, end, serial=serial, pace=pace)
    raise PeerUnreachable(f"{line.who} asks for the same chunks again and again")


def _believe(line: Line, word: Took) -> None:
    if word.damaged:
        raise SlotDamaged(f"{line.who}: {word.why}")
    if not word.ok:
        raise PeerRefused(f"{line.who}: {word.why}")


def _bytes_of(line: Line, ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Where these chunks lie; whoever asks for something that cannot be gets none of them."""
    found, last = [], 0
    for first, behind in ranges:
        if not last <= first < behind <= chunk_count(size):
            raise PeerUnreachable(f"{line.who} asks for chunks {first} to {behind} of {chunk_count(size)}")
        last = behind
        found.append((HEADER + first * sums.CHUNK, min(HEADER + behind * sums.CHUNK, size)))
    return found


def _send_range(line: Line, slot: Slot, start: int, end: int, *, serial: int, pace: Pace | None) -> None:
    at = start
    while at < end:
        piece = min(end, at + (pace.piece if pace is not None else sums.CHUNK))
        if pace is not None and not pace.wait(piece - at, stop=lambda: not line.wanted()):
            raise PeerUnreachable(f"{line.who} is no longer needed")
        if slot.serial != serial:
            raise VersionGone(f"{slot.path.name}: was overwritten while it was sent")
        line.send_file(slot.fileno(), at, piece)
        at = piece


# ---------------------------------------------------------------- receiving


def receive(
    line: Line,
    shelf: Shelf,
    version: Version,
    *,
    allowed: Callable[[], str] = lambda: "",
    progress: Callable[[int, int], None] = lambda done, size: None,
) -> Path:
    """Take the version that the other end offers, and return its file.

    Args:
        allowed: asked before the version counts; a sentence is a reason against it.

    Raises:
        SlotDamaged, SlotInvalid, SlotFull: it did not become a version here.
        PeerUnreachable: the connection broke; what has arrived stays for the next try.
    """
    try:
        arrival = shelf.arrival(_hear_offer(line, version))
        for _ in range(ASK_AGAIN + 1):
            missing = arrival.missing()
            if not missing:
                break
            _pull(line, arrival, _fold(missing), progress)
        if missing := arrival.missing():
            raise SlotDamaged(
                f"rank file {arrival.slot.path.name} step {version.step}: {len(missing)} chunks (the first is number "
                f"{missing[0]}) were damaged on the way, {ASK_AGAIN + 1} times"
            )
        if why := allowed():
            raise SlotInvalid(why)
        path = arrival.finish()
    except (SlotInvalid, CheckpointError, OSError) as error:
        if not isinstance(error, PeerUnreachable):
            line.say(Took(ok=False, why=str(error), damaged=isinstance(error, SlotDamaged)))
        raise
    line.say(Took(ok=True))
    return path


def _hear_offer(line: Line, version: Version) -> Passport:
    offer: Offer = line.hear(Offer)
    if not HEADER < offer.size <= MAX_SLOT:
        raise SlotInvalid(f"step {version.step}: a version of {offer.size} bytes cannot be right")
    papers = line.read(HEADER + 8 * chunk_count(offer.size))
    if offer.version != version:
        raise SlotInvalid(f"step {offer.version.step} was offered where {version.step} was announced")
    if sums.digest(papers) != offer.digest:
        raise PeerUnreachable(f"{line.who}: the checksums of step {version.step} were damaged on the way")
    return Passport(
        version=version, size=offer.size, header=bytes(papers[:HEADER]), table=unpack_table(papers[HEADER:])
    )


def _fold(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers as ranges; at most ``MAX_RANGES``, the last of which may hold some that are not wanted."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and (ranges[-1][1] == number or len(ranges) == MAX_RANGES):
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def _pull(
    line: Line, arrival: Arrival, ranges: Sequence[tuple[int, int]], progress: Callable[[int, int], None]
) -> None:
    """Ask for chunks and take them; what was received before the connection breaks is checked in any case."""
    line.say(Want(ranges=tuple(ranges)))
    line.expect(sum(arrival.nbytes(first, behind) for first, behind in ranges))
    numbers = [number for first, behind in ranges for number in range(first, behind)]
    size, done = arrival.passport.size - HEADER, arrival.received
    with _checking(arrival, beside=len(numbers) >= BESIDE_FROM) as check:
        for number in numbers:
            arrival.check_alone()
            with arrival.view(number) as view:
                line.read_into(view)
                done += len(view)
            check(number)
            progress(min(done, size), size)


@contextlib.contextmanager
def _checking(arrival: Arrival, *, beside: bool) -> Iterator[Callable[[int], object]]:
    """What to call with each chunk that is here; all are checked at the end of the block."""
    if not beside:
        yield arrival.check
        return
    full: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def check() -> None:
        while (number := full.get()) is not None:
            arrival.check(number)

    checker = threading.Thread(target=check, name="keepstep-check", daemon=True)
    checker.start()
    try:
        yield full.put
    finally:
        full.put(None)
        checker.join()
