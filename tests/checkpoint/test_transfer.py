"""Transfers: whatever breaks, is flipped or is overwritten on the way, the receiver ends up with the very bytes or
with nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import pair, sums
from keepstep.checkpoint.arrival import Arrival, Passport, Shelf, chunk_count, pack_table
from keepstep.checkpoint.exceptions import (
    CheckpointError,
    PeerRefused,
    PeerUnreachable,
    SlotDamaged,
    SlotInvalid,
    VersionGone,
)
from keepstep.checkpoint.line import Line
from keepstep.checkpoint.peers import Answer, Get, PeerClient
from keepstep.checkpoint.slot import HEADER, Description, Slot, Version
from keepstep.checkpoint.transfer import ASK_AGAIN, MAX_RANGES, Offer, Took, Want, _fold, passport_of, receive, send
from keepstep.model.ids import JobId
from keepstep.model.wire import pack

CHUNK = 4096
CHUNKS = 10
SIZE = CHUNK * CHUNKS - 700


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Many chunks in little memory."""
    before, sums.CHUNK = sums.CHUNK, CHUNK
    yield
    sums.CHUNK = before


def source(path: Path, step: int = 5, seed: int = 0) -> Slot:
    """A sealed version of pseudo-random bytes."""
    slot = Slot(path, create=True)
    slot.begin()
    slot.grow(HEADER + SIZE)
    slot.memory[HEADER : HEADER + SIZE] = bytes((i * 7919 + seed * 31 + (i >> 8)) & 255 for i in range(SIZE))
    slot.complete(Version(step, 1), HEADER + SIZE, Description(key="e1/controller"))
    slot.seal()
    return slot


class Flaky(Line):
    """A sender whose wire breaks after ``budget`` bytes of bulk, or changes what it carries."""

    budget = 1 << 40
    spoil: Callable[[bytearray, int], None] | None = None
    carried = 0

    def send_file(self, fd: int, start: int, end: int) -> None:
        data = bytearray(os.pread(fd, end - start, start))
        if self.spoil is not None:
            self.spoil(data, start)
        take = min(len(data), self.budget)
        self.send(data[:take])
        self.budget -= take
        self.carried += take
        if take < len(data):
            self.cut()
            raise PeerUnreachable("the wire was cut")


def exchange(
    sending: Callable[[Flaky], object], receiving: Callable[[Line], object]
) -> tuple[BaseException | None, object, Flaky]:
    """Run both ends: the sender's error, what the receiver returned or raised, and the sender's line."""
    left, right = socket.socketpair()
    sender, receiver = Flaky(left, "receiver"), Line(right, "sender")
    failed: list[BaseException] = []

    def run() -> None:
        try:
            sending(sender)
        except BaseException as error:
            failed.append(error)
            sender.cut()

    thread = threading.Thread(target=run)
    thread.start()
    outcome: object
    try:
        outcome = receiving(receiver)
    except CheckpointError as error:
        outcome = error
    finally:
        receiver.cut()
        thread.join(20)
        assert not thread.is_alive()
        sender.close()
        receiver.close()
    return (failed[0] if failed else None), outcome, sender


def same(path: object, slot: Slot) -> bool:
    assert isinstance(path, Path), path
    other = Slot(path)
    try:
        other.verify()
        return other.version == slot.version and other.memory[HEADER : slot.used] == slot.memory[HEADER : slot.used]
    finally:
        other.close()


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, SIZE), max_size=4))
def test_a_broken_transfer_goes_on_where_it_was(cuts: list[int]) -> None:
    """However often and wherever the wire is cut, whole chunks that have arrived are not sent twice, no version
    exists before the end, and then it is the same to the last bit."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        slot, shelf = source(root / "rank0.9"), Shelf(root / "replica", 0)
        left = chunk_count(slot.used)
        for cut in cuts:

            def broken(line: Flaky, budget: int = cut) -> None:
                line.budget = budget
                send(line, slot, Version(5, 1))

            error, outcome, line = exchange(broken, lambda line: receive(line, shelf, Version(5, 1)))
            if error is None:
                assert left == 0 or line.carried >= (left - 1) * CHUNK
                left = 0
                continue
            assert isinstance(outcome, PeerUnreachable)
            assert pair.look(root / "replica", 0) == []
            left -= line.carried // CHUNK
        slot.pin()  # words of the header that change while the version stays must not make it another one
        slot.acked = 3
        error, outcome, line = exchange(
            lambda line: send(line, slot, Version(5, 1)), lambda line: receive(line, shelf, Version(5, 1))
        )
        assert error is None
        assert line.carried <= left * CHUNK
        assert same(outcome, slot)
        shelf.close()
        slot.close()


@pytest.mark.parametrize("times", range(ASK_AGAIN + 2))
def test_damaged_chunks_are_asked_for_again_and_never_believed(tmp_path: Path, times: int) -> None:
    """Flipped bits in two chunks, a number of times in a row: up to the limit only these chunks come again; beyond
    it both sides say so, and there is no version."""
    slot, shelf, tries = source(tmp_path / "rank0.9"), Shelf(tmp_path / "replica", 0), dict.fromkeys((2, 7), 0)

    def spoil(data: bytearray, start: int) -> None:
        number = (start - HEADER) // CHUNK
        if tries.get(number, times) < times:
            tries[number] += 1
            data[100] ^= 1

    def sending(line: Flaky) -> None:
        line.spoil = spoil
        send(line, slot, Version(5, 1))

    error, outcome, line = exchange(sending, lambda line: receive(line, shelf, Version(5, 1)))
    if times <= ASK_AGAIN:
        assert error is None
        assert same(outcome, slot)
        assert line.carried == slot.used - HEADER + 2 * times * CHUNK
        return
    assert isinstance(error, SlotDamaged)
    assert isinstance(outcome, SlotDamaged)
    assert "2 chunks" in str(outcome)
    assert pair.look(tmp_path / "replica", 0) == []


def test_a_version_that_is_overwritten_meanwhile_is_given_up(tmp_path: Path) -> None:
    """The writer begins anew in the middle: the sender stops with its own error, the receiver has no version."""
    slot, shelf = source(tmp_path / "rank0.9"), Shelf(tmp_path / "replica", 0)

    def spoil(data: bytearray, start: int) -> None:
        if start >= HEADER + 4 * CHUNK:
            slot.begin()

    def sending(line: Flaky) -> None:
        line.spoil = spoil
        send(line, slot, Version(5, 1))

    error, outcome, _ = exchange(sending, lambda line: receive(line, shelf, Version(5, 1)))
    assert isinstance(error, VersionGone)
    assert isinstance(outcome, PeerUnreachable)
    assert pair.look(tmp_path / "replica", 0) == []


def test_what_is_there_already_is_not_sent(tmp_path: Path) -> None:
    """A lost acknowledgement costs one round trip; a replica that has been dropped meanwhile comes again."""
    slot, shelf, wanted = source(tmp_path / "rank0.9"), Shelf(tmp_path / "replica", 0), []

    def sending(line: Flaky) -> None:
        send(line, slot, Version(5, 1), on_want=lambda: wanted.append(1))

    def receiving(line: Line) -> Path:
        return receive(line, shelf, Version(5, 1))

    first = exchange(sending, receiving)[2].carried
    replica = Slot(pair.look(tmp_path / "replica", 0)[0][1])
    serial = replica.serial
    assert [first, exchange(sending, receiving)[2].carried] == [slot.used - HEADER, 0]
    assert replica.serial == serial, "a complete replica stopped counting while it was asked about"
    replica.invalidate()
    assert exchange(sending, receiving)[2].carried == slot.used - HEADER
    assert len(wanted) == 2


def test_a_newcomer_mends_only_what_is_damaged(tmp_path: Path) -> None:
    """Who does not trust its own copy checks it chunk by chunk and fetches the one that has changed."""
    slot, home = source(tmp_path / "rank0.9"), tmp_path / "snap"
    first = Shelf(home, 0, trusted=False)
    exchange(lambda line: send(line, slot, Version(5, 1)), lambda line: receive(line, first, Version(5, 1)))
    first.close()
    own = Slot(pair.look(home, 0)[0][1])
    own.memory[HEADER + 3 * CHUNK + 5] ^= 4
    again = Shelf(home, 0, trusted=False)
    error, outcome, line = exchange(
        lambda line: send(line, slot, Version(5, 1)), lambda line: receive(line, again, Version(5, 1))
    )
    assert error is None
    assert line.carried == CHUNK
    assert same(outcome, slot)


def fetch(slot: Slot, budgets: list[int], home: Path, progress: Callable[[int, int], None]) -> tuple[object, list[int]]:
    """Fetch from a keeper whose wire breaks after each budget: what came of it, and the bytes of each connection."""
    carried: list[int] = []
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(20)

    def serve() -> None:
        for budget in budgets:
            sock, _ = server.accept()
            with Flaky(sock, "newcomer") as line, contextlib.suppress(CheckpointError):
                line.hear(Get)
                line.say(Answer(ok=True, size=slot.used))
                line.budget = budget
                try:
                    send(line, slot, Version(5, 1))
                finally:
                    carried.append(line.carried)

    thread = threading.Thread(target=serve)
    thread.start()
    port, job = server.getsockname()[1], JobId("j")
    client = PeerClient(host="127.0.0.1", port=port, job=job, token="", epoch=1, key="", stop=lambda: False)
    outcome: object
    try:
        outcome = client.fetch(0, Version(5, 1), home, progress)
    except CheckpointError as error:
        outcome = error
    thread.join(20)
    assert not thread.is_alive()
    server.close()
    return outcome, carried


def test_a_newcomers_fetch_goes_on_after_a_broken_connection(tmp_path: Path) -> None:
    """The wire is cut twice: the third connection brings what was missing, and progress has been told all along."""
    slot, told = source(tmp_path / "rank0.9"), []
    outcome, carried = fetch(
        slot, [3 * CHUNK + 5, 4 * CHUNK, 1 << 30], tmp_path / "snap", lambda done, size: told.append((done, size))
    )
    assert same(outcome, slot)
    assert carried[2] <= slot.used - HEADER - 6 * CHUNK
    assert told[-1] == (slot.used - HEADER, slot.used - HEADER)
    assert told == sorted(told)


def test_a_keeper_that_gives_nothing_is_not_asked_twice(tmp_path: Path) -> None:
    """A newcomer in a hurry goes to another holder."""
    slot = source(tmp_path / "rank0.9")
    outcome, carried = fetch(slot, [0], tmp_path / "snap", lambda done, size: None)
    assert isinstance(outcome, PeerUnreachable)
    assert carried == [0]


def test_an_older_replica_stays_whole_while_a_newer_one_arrives(tmp_path: Path) -> None:
    """At no instant of a transfer is there less than one complete version on the buddy node."""
    old, new = source(tmp_path / "a", step=4), source(tmp_path / "b", step=5, seed=1)
    home = tmp_path / "replica"
    shelf = Shelf(home, 0)
    exchange(lambda line: send(line, old, Version(4, 1)), lambda line: receive(line, shelf, Version(4, 1)))
    seen = []

    def sending(line: Flaky) -> None:
        line.spoil = lambda data, start: seen.append([v.step for v, _ in pair.look(home, 0)])
        send(line, new, Version(5, 1))

    exchange(sending, lambda line: receive(line, shelf, Version(5, 1)))
    assert seen == [[4]] * CHUNKS
    assert [v.step for v, _ in pair.look(home, 0)] == [5, 4]


def test_a_fence_that_falls_in_mid_transfer_counts(tmp_path: Path) -> None:
    """A roster that arrives while an old epoch's bytes are coming in: they never become a version."""
    slot, shelf, fence = source(tmp_path / "rank0.9"), Shelf(tmp_path / "replica", 0), [""]

    def sending(line: Flaky) -> None:
        line.spoil = lambda data, start: fence.__setitem__(0, "epoch 1 is fenced off by 2")
        send(line, slot, Version(5, 1))

    error, outcome, _ = exchange(sending, lambda line: receive(line, shelf, Version(5, 1), allowed=lambda: fence[0]))
    assert isinstance(error, PeerRefused)
    assert "fenced off" in str(error)
    assert isinstance(outcome, SlotInvalid)
    assert pair.look(tmp_path / "replica", 0) == []


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack(Took(ok=True)),
        pack(Offer(version=Version(5, 1), size=1 << 60, digest=0)),
        pack(Offer(version=Version(5, 1), size=HEADER + 10, digest=0)) + bytes(HEADER + 8),
        pack(Offer(version=Version(6, 1), size=HEADER + 10, digest=0)) + bytes(HEADER + 8),
        pack(Offer(version=Version(5, 1), size=HEADER + 10, digest=sums.digest(bytes(HEADER + 8)))) + bytes(HEADER + 8),
    ],
    ids=["http", "out of turn", "absurd size", "damaged papers", "another version", "no sound header"],
)
def test_nonsense_is_refused_before_memory_is_taken(tmp_path: Path, words: bytes) -> None:
    """What does not speak like a keeper leaves no version and no allocation."""

    def sending(line: Flaky) -> None:
        line.send(words)
        line.cut()

    _, outcome, _ = exchange(sending, lambda line: receive(line, Shelf(tmp_path / "replica", 0), Version(5, 1)))
    assert isinstance(outcome, CheckpointError)
    assert not (tmp_path / "replica").exists()


def test_damaged_checksums_are_the_wires_fault(tmp_path: Path) -> None:
    """A bit flipped in the table itself breaks this try off before any byte is compared with it; the next may do."""
    good = passport_of(source(tmp_path / "rank0.9"), Version(5, 1))
    papers = bytearray(good.header + pack_table(good.table))
    offer = Offer(version=Version(5, 1), size=good.size, digest=sums.digest(papers))
    papers[-1] ^= 1

    def sending(line: Flaky) -> None:
        line.say(offer)
        line.send(papers)

    _, outcome, _ = exchange(sending, lambda line: receive(line, Shelf(tmp_path / "replica", 0), Version(5, 1)))
    assert isinstance(outcome, PeerUnreachable)
    assert "checksums" in str(outcome)
    assert not (tmp_path / "replica").exists()


@pytest.mark.parametrize("ranges", [((0, 99),), ((3, 3),), ((5, 6), (2, 3)), ((-1, 2),)])
def test_a_receiver_that_asks_for_nonsense_gets_nothing(tmp_path: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    """Ranges outside the version, empty or out of order end the transfer."""
    slot = source(tmp_path / "rank0.9")

    def receiving(line: Line) -> None:
        line.hear(Offer)
        line.read(HEADER + 8 * chunk_count(slot.used))
        line.say(Want(ranges=ranges))

    error, _, line = exchange(lambda line: send(line, slot, Version(5, 1)), receiving)
    assert isinstance(error, PeerUnreachable)
    assert line.carried == 0


@given(numbers=st.sets(st.integers(0, 3000), min_size=1))
@settings(max_examples=50, deadline=None)
def test_ranges_cover_what_is_missing(numbers: set[int]) -> None:
    """Every missing chunk is in exactly one range, in order, and the request stays small."""
    ranges = _fold(sorted(numbers))
    covered = [n for first, behind in ranges for n in range(first, behind)]
    assert covered == sorted(set(covered))
    assert numbers <= set(covered)
    assert len(ranges) <= MAX_RANGES
    if len(ranges) < MAX_RANGES:
        assert set(covered) == numbers


def test_a_passport_must_fit(tmp_path: Path) -> None:
    """An announced size outside all reason allocates nothing, nor does a table of another length."""
    slot = source(tmp_path / "rank0.9")
    good = passport_of(slot, Version(5, 1))
    good.check()
    for size, table in ((1 << 60, good.table), (HEADER, ()), (good.size, good.table[1:])):
        with pytest.raises(SlotInvalid):
            Passport(version=Version(5, 1), size=size, header=good.header, table=table).check()
    with pytest.raises(VersionGone):
        passport_of(slot, Version(4, 1))


def test_remains_of_a_broken_transfer_do_not_mix_into_the_next(tmp_path: Path) -> None:
    """Somebody else has begun to write the file: an earlier arrival can neither go on nor finish."""
    slot = source(tmp_path / "rank0.9")
    good = passport_of(slot, Version(5, 1))
    target = Slot(tmp_path / "replica0", create=True)
    first = Arrival(target, good)
    second = Arrival(target, good)
    with pytest.raises(SlotInvalid, match="newer transfer"):
        first.check_alone()
    for number in second.missing():
        with second.view(number) as view:
            start = HEADER + number * CHUNK
            view[:] = slot.memory[start : start + len(view)]
        assert second.check(number)
    assert second.received == good.size - HEADER
    assert same(second.finish(), slot)
    with pytest.raises(SlotInvalid, match="chunks are missing"):
        first.finish()
