"""Keepers under faults: kill -9 in mid-transfer, a budget, damage at rest and on the way, rivals, and nobody left."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keepstep.checkpoint import config, pair
from keepstep.checkpoint.exceptions import PeerRefused
from keepstep.checkpoint.keeper import ALREADY_KEPT
from keepstep.checkpoint.keeper_hold import HOLD_DIR
from keepstep.checkpoint.keeper_seal import CALM_PAUSE_S, Sealer
from keepstep.checkpoint.keeper_send import Gap
from keepstep.checkpoint.keeper_serve import MAX_CONNECTIONS
from keepstep.checkpoint.keeper_take import Inbox
from keepstep.checkpoint.line import Line
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.peers import Answer, Put
from keepstep.checkpoint.scrub import Scrubber, Traffic, verdict
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.checkpoint.sums import CHUNK, digest
from keepstep.checkpoint.transfer import Offer, Took, Want, passport_of, send
from keepstep.model.env import KEEPER_SOCKET, REPLICA_DIR, SNAP_DIR
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from tests.checkpoint.fleet import Fleet, content, fleet, note, until
from tests.checkpoint.test_slot import fill

__all__ = ["fleet"]

SIZE = 3 * CHUNK + 12345


def budget(fleet: Fleet, node: str, peer_rate: int) -> None:
    config.write(
        fleet.root / node, config.CheckpointConfig(job=JobId("job"), policy=CheckpointPolicy(peer_rate=peer_rate))
    )


def arriving(fleet: Fleet, node: str, chunks: int) -> bool:
    """Whether a replica of rank 0 has begun to arrive and so many chunks have."""
    for path in pair.paths(fleet.root / node / REPLICA_DIR, 0, files=2):
        if path.exists():
            with contextlib.closing(Slot(path)) as slot:
                at = HEADER + chunks * CHUNK - 1
                if slot.version is None and slot.size > at and slot.memory[at]:
                    return True
    return False


@pytest.mark.parametrize("victim", ["a", "b"])
def test_kill_9_in_mid_transfer(fleet: Fleet, victim: str) -> None:
    """Sender or receiver is killed while a version is on its way: the older replica stays whole, and after a restart
    the newer one arrives."""
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    fleet.ring("a", b"0 1")
    until(lambda: both.slots[0].acked == 1, "step 1 to be acknowledged")
    budget(fleet, "a", CHUNK)  # a chunk per second: whoever is killed is killed in the middle
    fleet.ring("a", b"roster")
    fill(both.slots[1], Version(2, 1), 2, SIZE)
    fleet.ring("a", b"0 2")
    until(lambda: arriving(fleet, "b", 1), "the first chunk")
    fleet.kill(victim)
    assert [v for v, _ in pair.look(fleet.root / "b" / REPLICA_DIR, 0)] == [Version(1, 1)]
    assert both.slots[1].acked == -1
    budget(fleet, "a", 0)
    fleet.start(victim)
    until(lambda: both.slots[1].acked == 2, "step 2 to be acknowledged")
    found = pair.look(fleet.root / "b" / REPLICA_DIR, 0)
    assert [v for v, _ in found] == [Version(2, 1), Version(1, 1)]
    assert content(found[0][1]) == bytes([2]) * SIZE


def test_a_budget_that_is_lifted_lets_a_waiting_transfer_go(fleet: Fleet) -> None:
    """At the old rate it would take hours; the new settings file is noticed while it waits, without a bell."""
    budget(fleet, "a", 1000)
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    fleet.ring("a", b"0 1")
    until(lambda: pair.ranks_in(fleet.root / "b" / REPLICA_DIR) == {0}, "the transfer to begin")
    assert both.slots[0].acked == -1
    budget(fleet, "a", 0)
    until(lambda: both.slots[0].acked == 1, "step 1 to be acknowledged")


def test_a_version_overwritten_in_mid_transfer_gives_way_to_the_newest(fleet: Fleet) -> None:
    """The trainer goes round while the buddy still gets an old step: it ends up with the newest, never a mixture."""
    budget(fleet, "a", CHUNK)
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    fleet.ring("a", b"0 1")
    until(lambda: arriving(fleet, "b", 1), "the first chunk")
    for step in (2, 3, 4):
        fill(both.slots[both.target(step)], Version(step, 1), step, SIZE)
    budget(fleet, "a", 0)
    fleet.ring("a", b"0 4")
    newest = both.find(Version(4, 1))
    assert newest is not None
    until(lambda: newest.acked == 4, "step 4 to be acknowledged")
    for version, path in pair.look(fleet.root / "b" / REPLICA_DIR, 0):
        assert content(path) == bytes([version.step]) * SIZE


def test_a_link_slower_than_the_trainer_still_brings_versions_over(fleet: Fleet) -> None:
    """Each step is overwritten long before the buddy could have it: the keeper sends a copy, so that some step of the
    recent past is always there, and gives the copy's memory back when the trainer no longer outruns it."""
    budget(fleet, "a", 4 * CHUNK)  # three chunks: most of a second
    fleet.announce(fleet.roster())
    home, both = fleet.root / "a", pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    enough, step = threading.Event(), 0

    def train() -> None:
        nonlocal step
        while not enough.wait(0.02):
            step += 1
            fill(both.slots[both.target(step)], Version(step, 1), step % 251, SIZE)
            fleet.ring("a", f"0 {step}".encode())

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        until(lambda: len(pair.look(fleet.root / "b" / REPLICA_DIR, 0)) == 2, "two versions to come over")
        assert (home / HOLD_DIR / "rank0").exists()
    finally:
        enough.set()
        trainer.join()
    budget(fleet, "a", 0)
    last = both.find(Version(step, 1))
    assert last is not None
    until(lambda: last.acked == step, "the last step to be acknowledged")
    until(lambda: not (home / HOLD_DIR / "rank0").exists(), "the copy to be removed")
    for version, path in pair.look(fleet.root / "b" / REPLICA_DIR, 0):
        assert content(path) == bytes([version.step % 251]) * SIZE


def test_every_version_is_sealed_also_without_a_buddy(fleet: Fleet) -> None:
    """The archiver and whoever restores rely on checksums, whether or not there is another node."""
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    both.slots[0].pin()
    fill(both.slots[1], Version(2, 1), 2, SIZE)
    fleet.ring("a", b"0 2")
    until(lambda: both.slots[1].sealed and both.slots[0].sealed, "the newest and the pinned one to be sealed")
    both.slots[1].verify()


def test_sealing_takes_its_time_where_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another node versions that come in a pause go without checksums, and the last of them gets its own."""
    pauses: list[float] = []
    both = pair.Pair(tmp_path, 0)

    def wait(limit_s: float) -> bool:
        pauses.append(limit_s)
        for step in (2, 3) if len(pauses) == 1 else ():
            fill(both.slots[step % 2], Version(step, 1), step, SIZE)
            sealer.ring()
        return False

    looks: list[Version | None] = []
    sealer = Sealer(tmp_path, 0, lambda: looks.append(sealed_of(both)), calm=lambda: True)
    monkeypatch.setattr(sealer._end, "wait", wait)
    fill(both.slots[1], Version(1, 1), 1, SIZE)
    sealer.ring()
    sealer.start()
    until(lambda: len(pauses) == 2, "two rounds")
    sealer.stop()
    sealer.join()
    assert looks[:2] == [Version(1, 1), Version(3, 1)]
    assert all(0 < pause <= CALM_PAUSE_S for pause in pauses[:2])


def sealed_of(both: pair.Pair) -> Version | None:
    return max((slot.version for slot in both.slots if slot.version and slot.sealed), default=None)


def test_a_replica_that_has_changed_at_rest_is_dropped_and_sent_again(fleet: Fleet) -> None:
    """One flipped bit in the buddy's memory: found by its scrubber, told, and mended from the owner."""
    for node in ("a", "b"):
        fleet.kill(node)
        fleet.start(node, "--scrub-every-s", "0.1", "--confirm-s", "0.3")
    told = fleet.notes("b")
    fleet.announce(fleet.roster())
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    fleet.ring("a", b"0 1")
    until(lambda: both.slots[0].acked == 1, "step 1 to be acknowledged")
    (_, path), *_ = pair.look(fleet.root / "b" / REPLICA_DIR, 0)
    with contextlib.closing(Slot(path)) as replica:
        serial = replica.serial
        replica.memory[HEADER + 2 * CHUNK + 77] ^= 1
        found = note(told)
        assert (found.what, found.tier, found.step, found.rank) == ("damaged", "peer", 1, 0)
        assert f"bytes {HEADER + 2 * CHUNK} to" in found.why
        until(
            lambda: replica.serial > serial + 1 and replica.version is not None and replica.sealed, "it to come again"
        )
        replica.verify()
    told.close()


def test_an_own_version_that_has_changed_is_told_and_not_passed_on(fleet: Fleet) -> None:
    """Damaged before it could be sent: the buddy refuses it, the log hears where, the only copy stays; the next step
    is replicated as if nothing had been."""
    told = fleet.notes("a")
    both = pair.Pair(fleet.root / "a" / SNAP_DIR, 0)
    fill(both.slots[0], Version(1, 1), 1, SIZE)
    fleet.ring("a", b"0 1")
    until(lambda: both.slots[0].sealed, "step 1 to be sealed")
    both.slots[0].memory[HEADER + CHUNK + 3] ^= 128
    fleet.announce(fleet.roster())
    found = note(told)
    assert (found.what, found.tier, found.step, found.rank) == ("damaged", "memory", 1, 0)
    assert "kept" in found.why
    assert both.slots[0].version == Version(1, 1)
    assert pair.look(fleet.root / "b" / REPLICA_DIR, 0) == []
    fill(both.slots[1], Version(2, 1), 2, SIZE)
    fleet.ring("a", b"0 2")
    until(lambda: both.slots[1].acked == 2, "step 2 to be acknowledged")
    told.close()


def test_the_scrubber_looks_at_what_rests_and_gives_way_to_transfers(tmp_path: Path) -> None:
    """A version is read when it has lain still from one pass to the next, not while anything is sent; an own one with
    a newer beside it is dropped, the only one is told once and stays."""
    notes: list[Note] = []
    traffic = Traffic()
    both = pair.Pair(tmp_path / "snap", 0)
    for slot, step in zip(both.slots, (1, 2), strict=True):
        fill(slot, Version(step, 1), step, SIZE)
        slot.seal()
    scrubber = Scrubber({tmp_path / "snap": True}, traffic=traffic, tell=notes.append, bytes_per_s=0)
    both.slots[0].memory[HEADER + 5] ^= 1
    scrubber.pass_once()
    assert notes == [], "it may be a version that is only a moment old"
    with traffic:
        scrubber.pass_once()
    assert notes == []
    scrubber.pass_once()
    assert [(n.step, "newer version" in n.why) for n in notes] == [(1, True)]
    assert both.slots[0].version is None
    both.slots[1].memory[HEADER + CHUNK] ^= 1
    for _ in range(3):
        scrubber.pass_once()
    assert [(n.step, "kept" in n.why) for n in notes[1:]] == [(2, True)]
    assert both.slots[1].version == Version(2, 1)


@pytest.mark.parametrize(
    ("own", "complete", "acked", "dropped"),
    [
        (False, [], -1, True),
        (True, [], -1, False),
        (True, [Version(4, 1)], 4, False),
        (True, [Version(6, 1)], -1, True),
        (True, [Version(4, 2)], 5, True),
    ],
)
def test_what_a_damaged_version_is_worth(own: bool, complete: list[Version], acked: int, dropped: bool) -> None:
    """The only copy of a state is never thrown away; anything that another one stands in for is."""
    assert bool(verdict(own=own, version=Version(5, 1), complete=complete, acked=acked)) is dropped


def test_a_gap_is_told_once_and_its_end_too() -> None:
    """Virtual time: nothing before the limit, one note at it, one when the buddy has caught up, then a new count."""
    notes: list[Note] = []
    gap = Gap(3, notes.append, 10.0)
    for now in (0.0, 5.0, 9.9):
        gap.open(7, now)
        gap.look(now)
    assert notes == []
    assert gap.due_s(9.0) == pytest.approx(1.0)
    gap.why = "keeper b cannot be reached"
    for now in (10.0, 11.0, 30.0):
        gap.open(8, now)
        gap.look(now)
    assert [(n.what, n.rank, n.step) for n in notes] == [("gap", 3, 8)]
    assert "keeper b cannot be reached" in notes[0].why
    gap.over(9, 42.0)
    assert (notes[1].what, notes[1].step, notes[1].seconds) == ("closed", 9, 42.0)
    gap.open(10, 50.0)
    gap.look(59.0)
    gap.over(10, 59.0)
    assert len(notes) == 2


def test_a_rival_of_a_newer_version_takes_over_and_an_older_one_does_not(tmp_path: Path) -> None:
    """A half-sent step 5 holds rank 0's place: step 4 is refused with a sentence, step 6 ends it and arrives."""
    inbox = Inbox(tmp_path / "replica", fence=lambda put: "", tell=lambda n: None, say=lambda topic, text: None)
    slots = {}
    for step in (4, 5, 6):
        slots[step] = Slot(tmp_path / f"s{step}", create=True)
        fill(slots[step], Version(step, 1), step, SIZE)
        slots[step].seal()

    def serve(sock: socket.socket, put: Put) -> None:
        with Line(sock, "peer") as line:
            inbox.take(line, put)

    def begin(step: int) -> tuple[Line, threading.Thread]:
        put = Put(job=JobId("j"), token="", epoch=1, key="", rank=0, version=Version(step, 1), size=slots[step].used)
        near, far = socket.socketpair()
        thread = threading.Thread(target=serve, args=(far, put))
        thread.start()
        return Line(near, "inbox"), thread

    slow, slow_thread = begin(5)
    assert slow.hear(Answer).ok
    papers = passport_of(slots[5], Version(5, 1))
    table = b"".join(n.to_bytes(8, "little") for n in papers.table)
    slow.say(Offer(version=Version(5, 1), size=papers.size, digest=digest(papers.header + table)))
    slow.send(papers.header + table)
    assert slow.hear(Want | Took) == Want(ranges=((0, 4),))
    slow.send(b"x" * 1000)
    old, old_thread = begin(4)
    refused = old.hear(Answer)
    assert not refused.ok
    assert "step 5 of rank 0 is arriving" in refused.why
    new, new_thread = begin(6)
    assert new.hear(Answer).ok
    send(new, slots[6], Version(6, 1))
    for line, thread in ((slow, slow_thread), (old, old_thread), (new, new_thread)):
        thread.join(20)
        assert not thread.is_alive()
        line.close()
    assert [v.step for v, _ in pair.look(tmp_path / "replica", 0)] == [6]


def test_a_replica_without_checksums_is_not_kept_over_a_restart(tmp_path: Path) -> None:
    """Its keeper died between the last byte and the seal: the owner was never told, and sends it again."""
    files = pair.Pair(tmp_path, 0)
    fill(files.slots[0], Version(1, 1), 1, 100)
    files.slots[0].seal()
    fill(files.slots[1], Version(2, 1), 2, 100)
    Inbox(tmp_path, fence=lambda put: "", tell=lambda n: None, say=lambda topic, text: None)
    assert [v.step for v, _ in pair.look(tmp_path, 0)] == [1]


def test_more_connections_than_a_keeper_takes_get_a_sentence(fleet: Fleet) -> None:
    """Who only holds connections open does not take the keeper's memory; a sentence names the limit."""
    fleet.announce(fleet.roster())
    fleet.client("b").have(0)
    with contextlib.ExitStack() as idle:
        for _ in range(MAX_CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", fleet.port("b"))))
        until(lambda: "transfers are open" in refused(fleet), "the limit to hold")
    until(lambda: not refused(fleet), "the places to be free again")


def refused(fleet: Fleet) -> str:
    try:
        fleet.client("b").have(0)
    except PeerRefused as error:
        return str(error)
    return ""


def test_two_keepers_on_plain_arguments_replicate_and_leave_by_themselves(tmp_path: Path) -> None:
    """No agent, no roster, no token: ``--buddy`` and a bell are enough; with ``--linger-s`` both end when nobody
    wants anything any more; a second keeper of the same directory leaves at once."""
    words = [sys.executable, "-m", "keepstep.checkpoint.keeper", "--host", "127.0.0.1", "--linger-s", "1.5"]
    started = [subprocess.Popen([*words, "--node-dir", str(tmp_path / "b")])]
    try:
        until((tmp_path / "b" / "keeper.port").exists, "port of b")
        port = (tmp_path / "b" / "keeper.port").read_text()
        both = pair.Pair(tmp_path / "a" / SNAP_DIR, 0)
        fill(both.slots[0], Version(1, 1), 1, SIZE)
        started.append(subprocess.Popen([*words, "--node-dir", str(tmp_path / "a"), "--buddy", f"127.0.0.1:{port}"]))
        until(lambda: awake(tmp_path / "b") and both.slots[0].acked == 1, "step 1 to be acknowledged")
        assert [process.wait(20) for process in started] == [0, 0]
        words[-1] = "600"
        started.append(subprocess.Popen([*words, "--node-dir", str(tmp_path / "c")]))
        until((tmp_path / "c" / "keeper.port").exists, "the first keeper")
        second = subprocess.run([*words, "--node-dir", str(tmp_path / "c")], stderr=subprocess.PIPE, text=True)
        assert second.returncode == ALREADY_KEPT
        assert "another one is at work" in second.stderr
    finally:
        for process in started:
            process.kill()
            process.wait()


def awake(node: Path) -> bool:
    """Ring, so that this keeper does not leave before the other one has started, however long that takes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.sendto(b"still here", str(node / KEEPER_SOCKET))
    return True
