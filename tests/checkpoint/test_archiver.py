"""Archiver: pins become durable generations, whatever dies, fills up or goes away meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.checkpoint import archive, catalog
from keepstep.checkpoint import config as settings
from keepstep.checkpoint.archiver import Archiver
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import CheckpointError, TierAway
from keepstep.checkpoint.finisher import COMPLETE_S, Finisher
from keepstep.checkpoint.generation import folder, payload_name
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.notes import read as read_note
from keepstep.checkpoint.scribe import Scribe
from keepstep.checkpoint.slot import HEADER, Slot, Version
from keepstep.checkpoint.target import Seen, Target, targets
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.files import Files
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.checkpoint.todo import Todo
from keepstep.model.env import ARCHIVER_FINISH, ARCHIVER_SOCKET, NOTES_SOCKET
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from tests.checkpoint.states import Spec, slot_path, write_slot
from tests.checkpoint.test_tiers import DIES, Failing, cloud  # noqa: F401

PATIENCE_S = 60.0
SEED = int(os.environ.get("KEEPSTEP_SEED", "20263"))
LARGE: tuple[Spec, ...] = (("weight", "float32", (1_000_000,), 4_000_000), ("bias", "float32", (10,), 40))


class Node:
    """A node directory with an agent's ear for notes, and archivers to start and to kill."""

    def __init__(self, path: Path, policy: CheckpointPolicy, job: str = "job") -> None:
        self.dir = path
        path.mkdir()
        settings.write(path, CheckpointConfig(job=JobId(job), policy=policy))
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(str(path / NOTES_SOCKET))
        self.ear.settimeout(PATIENCE_S)
        self.notes: list[Note] = []
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *more: str, before: Callable[[], None] | None = None, inside: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        command = [*inside, sys.executable, "-m", "keepstep.checkpoint.archiver", "--node-dir", str(self.dir), *more]
        with open(self.dir / "archiver.err", "ab") as err:
            self.process = subprocess.Popen(command, stderr=err, preexec_fn=before)
        return self.process

    @property
    def said(self) -> str:
        return (self.dir / "archiver.err").read_text()

    def pinned(self, rank: int = 0) -> bool:
        slot = Slot(slot_path(self.dir, rank))
        try:
            return slot.pinned
        finally:
            slot.close()

    def ring(self, words: bytes = b"0 1") -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            with contextlib.suppress(OSError):  # it looks by itself, too
                bell.sendto(words, str(self.dir / ARCHIVER_SOCKET))

    def hear(self, what: str, step: int, tier: str = "") -> Note:
        """Wait for a note."""
        while True:
            for note in self.notes:
                if (note.what, note.step) == (what, step) and tier in ("", note.tier):
                    return note
            note = read_note(self.ear.recv(65536))
            assert note is not None
            self.notes.append(note)

    def finish(self) -> int:
        assert self.process is not None
        await_(lambda: (self.dir / ARCHIVER_SOCKET).exists())
        self.ring(ARCHIVER_FINISH)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.ear.close()


def await_(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


@contextmanager
def node(path: Path, policy: CheckpointPolicy) -> Iterator[Node]:
    found = Node(path, policy)
    try:
        yield found
    finally:
        found.close()


def complete_steps(url: str) -> list[int]:
    return [g.version.step for g in catalog.read(open_tier(url)) if g.complete]


@pytest.mark.acceptance
def test_two_nodes_make_one_generation(tmp_path: Path) -> None:
    """Each node writes its rank; the one with rank 0 completes when the other's part has come, and says so."""
    shared = str(tmp_path / "shared")
    policy = CheckpointPolicy(dir=shared, local_dir=str(tmp_path / "local"), keep=1)
    with node(tmp_path / "a", policy) as a, node(tmp_path / "b", policy) as b:
        a.start()
        write_slot(slot_path(a.dir, 0), Version(100, 1), rank=0, world_size=2)
        a.hear("saved", 100, "local")
        await_(lambda: not a.pinned())
        assert complete_steps(shared) == []
        b.start()
        write_slot(slot_path(b.dir, 1), Version(100, 1), rank=1, world_size=2)
        assert a.hear("saved", 100, "remote").bytes > 0
        a.hear("verified", 100, "remote")
        for step in (200, 300):
            write_slot(slot_path(b.dir, 1), Version(step, 1), rank=1, world_size=2)
            write_slot(slot_path(a.dir, 0), Version(step, 1), rank=0, world_size=2)
            a.ring()
            b.ring()
            a.hear("verified", step, "remote")
        a.hear("expired", 200, "remote")
        assert complete_steps(shared) == [300]
        archive.verify(open_tier(shared), Version(300, 1), write=False)
        assert (a.finish(), b.finish()) == (0, 0)


@pytest.mark.acceptance
def test_an_archiver_killed_anywhere_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    """kill -9 at random instants while pins come: in the end each pinned version is complete, and pins are lifted."""
    print(f"KEEPSTEP_SEED={SEED}")
    luck = random.Random(SEED)
    shared = str(tmp_path / "shared")
    policy = CheckpointPolicy(dir=shared, local_dir=str(tmp_path / "local"), keep=100, full_every=3)
    with node(tmp_path / "node", policy) as one:
        for step in range(100, 700, 100):
            write_slot(slot_path(one.dir, 0), Version(step, 1), specs=LARGE, steady=True)
            process = one.start()
            await_((one.dir / ARCHIVER_SOCKET).exists)
            time.sleep(luck.uniform(0, 0.12))
            process.send_signal(signal.SIGKILL)
            process.wait()
            (one.dir / ARCHIVER_SOCKET).unlink(missing_ok=True)
            for generation in catalog.read(open_tier(shared, create=True)):
                if generation.complete:
                    archive.verify(open_tier(shared), generation.version, write=False)
            if one.pinned():
                one.start()
                await_(lambda: not one.pinned())
                assert one.finish() == 0
        one.start()
        one.finish()
        assert complete_steps(shared) == list(range(600, 0, -100))
        own = catalog.read(open_tier(policy.local_dir))  # there each part counts by itself
        assert [g.version.step for g in own if g.ranks == (0,)] == list(range(600, 0, -100))


@pytest.mark.acceptance
def test_a_full_disk_costs_a_generation_and_nothing_else(tmp_path: Path) -> None:
    """No room: said once with the way out, the pin is lifted, what is complete stays; with room it goes on."""
    shared = str(tmp_path / "shared")
    with node(tmp_path / "node", CheckpointPolicy(dir=shared)) as one:
        write_slot(slot_path(one.dir, 0), Version(100, 1))
        one.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)))
        one.hear("verified", 100)
        for step in (200, 300):
            write_slot(slot_path(one.dir, 0), Version(step, 1), specs=LARGE)
            one.ring()
            assert "free space" in one.hear("skipped", step).why
            await_(lambda: not one.pinned())
        assert one.said.count("free space there, or keep fewer generations") == 1
        assert complete_steps(shared) == [100]
        assert [path.name for path in Path(shared).glob("**/.tmp*")] == []
        assert one.finish() == 0
        write_slot(slot_path(one.dir, 0), Version(400, 1), specs=LARGE)
        one.start()
        one.hear("verified", 400)
        assert one.finish() == 0


def small_disk(path: Path) -> tuple[str, ...]:
    """A command that runs another one where ``path`` is a file system of 3 MiB; skips where that is not allowed."""
    path.mkdir()
    command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    mount = f"mount -t tmpfs -o size=3m small '{path}'"
    try:
        tried = subprocess.run([*command, mount], capture_output=True, timeout=PATIENCE_S, check=False)
    except OSError as error:
        pytest.skip(f"no file system of our own to fill: {error}")
    if tried.returncode != 0:
        pytest.skip(f"no file system of our own to fill: {tried.stderr.decode().strip()}")
    return (*command, f'{mount} && exec "$@"', "sh")


@pytest.mark.acceptance
def test_a_disk_that_is_really_full_gives_way_to_smaller_generations(tmp_path: Path) -> None:
    """ENOSPC from the kernel in the middle of a file: nothing of it stays, and what fits is written again."""
    shared = tmp_path / "shared"
    inside = small_disk(shared)
    with node(tmp_path / "node", CheckpointPolicy(dir=str(shared), keep=1)) as one:
        process = one.start(inside=inside)
        seen = Path(f"/proc/{process.pid}/root{shared}")
        for step, specs in ((100, LARGE[1:]), (200, LARGE), (300, LARGE), (400, LARGE[1:])):
            write_slot(slot_path(one.dir, 0), Version(step, 1), specs=specs)
            one.ring()
            if specs is LARGE:
                assert "No space left" in one.hear("skipped", step).why
            else:
                one.hear("verified", step)
            await_(lambda: not one.pinned())
        one.hear("expired", 100)
        assert complete_steps(str(seen)) == [400]
        assert [path.name for path in seen.glob("step-*")] == [folder(Version(400, 1))]
        assert not [path for path in seen.glob("**/*") if path.name.startswith(".tmp")]
        assert one.finish() == 0


def test_halves_of_a_generation_that_a_full_disk_broke_do_not_stay(tmp_path: Path) -> None:
    """One rank's part fits, another's does not: nobody waits for it, and the next generation has the room."""
    shared = tmp_path / "shared"
    with node(tmp_path / "node", CheckpointPolicy(dir=str(shared))) as one:
        write_slot(slot_path(one.dir, 0), Version(100, 1), world_size=2)
        write_slot(slot_path(one.dir, 1), Version(100, 1), rank=1, world_size=2, specs=LARGE)
        one.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)))
        assert one.hear("skipped", 100).rank == 1
        await_(lambda: not one.pinned(0) and not one.pinned(1))
        assert one.finish() == 0, one.said
        assert not list(shared.glob("step-*/*"))


def test_ranks_that_fit_and_ranks_that_do_not_are_one_trouble(tmp_path: Path) -> None:
    """The small part of rank 0 fits each time: no line per try, no "works again", and no generation that is none."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    with node(tmp_path / "node", CheckpointPolicy(dir=str(shared), local_dir=str(local))) as one:
        for step in (100, 200, 300):
            write_slot(slot_path(one.dir, 1), Version(step, 1), rank=1, world_size=2, specs=LARGE)
            write_slot(slot_path(one.dir, 0), Version(step, 1), world_size=2)
            if step == 100:
                one.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)))
            one.ring()
            await_(lambda: not one.pinned(0) and not one.pinned(1))
        assert one.finish() == 0, one.said
        for label in ("local", "remote"):
            (line,) = (line for line in one.said.splitlines() if f"{label} tier" in line)
            assert "step 100 is left out (the parts of 1 of 2 ranks on this node)" in line
        assert "works again" not in one.said
        one.ear.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.hear("saved", 300)
        assert "saved" not in {note.what for note in one.notes}


def test_the_end_does_not_wait_for_what_an_earlier_run_left_half_written(tmp_path: Path) -> None:
    """The part of its rank 1 will never come; a newer generation is complete, so nothing depends on it."""
    shared = str(tmp_path / "shared")
    desk = Desk(tmp_path / "earlier", CheckpointPolicy(dir=shared))
    write_slot(slot_path(desk.dir, 0), Version(100, 1), world_size=2)
    desk.scribe.write(slot_path(desk.dir, 0), 0, desk.config, desk.targets)
    with node(tmp_path / "node", CheckpointPolicy(dir=shared)) as one:
        write_slot(slot_path(one.dir, 0), Version(200, 1))
        one.start()
        one.hear("verified", 200)
        assert one.finish() == 0
        assert complete_steps(shared) == [200]


@pytest.mark.acceptance
def test_a_mount_that_went_away_is_not_replaced_by_its_mount_point(tmp_path: Path) -> None:
    """Also not by an archiver that starts afterwards; when the mount is back, so is the tier."""
    root = tmp_path / "mnt"
    with node(tmp_path / "node", CheckpointPolicy(dir=str(root))) as one:
        write_slot(slot_path(one.dir, 0), Version(100, 1))
        one.start()
        one.hear("verified", 100)
        assert one.finish() == 0
        root.rename(tmp_path / "away")
        root.mkdir()
        target = Target(str(root), "remote", 0, Seen(one.dir), lambda _: None)
        with pytest.raises(TierAway, match="not mounted"):
            target.open()
        assert os.listdir(root) == []
        root.rmdir()
        (tmp_path / "away").rename(root)
        assert complete_steps(str(root)) == [100]
        target.open()


@pytest.mark.acceptance
def test_a_throttled_store_gets_its_generation_in_the_end(
    tmp_path: Path,
    cloud: object,  # noqa: F811
) -> None:
    """503 SlowDown again and again: tried again with pauses, and then it is there."""
    with node(tmp_path / "node", CheckpointPolicy(dir="s3://bucket/job")) as one:
        cloud.moods.extend([(503, "SlowDown")] * 6)  # type: ignore[attr-defined]
        write_slot(slot_path(one.dir, 0), Version(100, 1), specs=LARGE)
        one.start()
        one.hear("verified", 100)
        assert one.finish() == 0
        assert complete_steps("s3://bucket/job") == [100]


@pytest.mark.acceptance
def test_it_ends_when_nobody_is_there_and_works_only_once_per_node(tmp_path: Path) -> None:
    """A second one says that there is a first; with --linger-s it leaves by itself; without the directory at once."""
    with node(tmp_path / "node", CheckpointPolicy(dir=str(tmp_path / "shared"))) as one:
        first = one.start()
        await_(lambda: (one.dir / ARCHIVER_SOCKET).exists())
        second = one.start()
        assert second.wait(PATIENCE_S) == 0
        assert "another archiver works" in one.said
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_S) == 0
        write_slot(slot_path(one.dir, 0), Version(100, 1))
        assert one.start("--linger-s", "0.2").wait(PATIENCE_S) == 0
        assert complete_steps(str(tmp_path / "shared")) == [100]
        command = [sys.executable, "-m", "keepstep.checkpoint.archiver", "--node-dir", str(tmp_path / "no")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 1


# -------------------------------------------------------------------- in this process


class Desk:
    """A scribe with its targets, and what it said."""

    def __init__(self, path: Path, policy: CheckpointPolicy) -> None:
        self.dir = path / "node"
        (self.dir / "snap").mkdir(parents=True)
        self.notes: list[Note] = []
        self.said: list[str] = []
        self.config = CheckpointConfig(job=JobId("job"), policy=policy)
        self.targets = targets(self.config, Seen(self.dir), self.said.append)
        self.scribe = Scribe(self.notes.append, Todo(self.dir), sleep=lambda _: None)

    def write(self, step: int, specs: tuple[Spec, ...] = LARGE, *, seal: bool = True) -> object:
        write_slot(slot_path(self.dir, 0), Version(step, 1), specs=specs, seal=seal, steady=True)
        found = self.scribe.write(slot_path(self.dir, 0), 0, self.config, self.targets)
        for target in self.targets:
            target.settle(Version(step, 1), {0})
        return found

    def parts(self, label: str) -> list[str]:
        tier = next(target for target in self.targets if target.label == label).open()
        return [name.rpartition(".")[2] for name in tier.names() if name.endswith(("safetensors", "delta"))]

    def pinned(self) -> bool:
        slot = Slot(slot_path(self.dir, 0))
        try:
            return slot.pinned
        finally:
            slot.close()


def test_differences_come_between_full_ones(tmp_path: Path) -> None:
    """``full_every`` bounds the chain, and both tiers hold the same bytes."""
    pytest.importorskip("zstandard")
    policy = CheckpointPolicy(dir=str(tmp_path / "far"), local_dir=str(tmp_path / "near"), full_every=3)
    desk = Desk(tmp_path, policy)
    for step in range(1, 6):
        assert desk.write(step, (("zeros", "float32", (0,), 0), *LARGE)) is not None
    assert desk.parts("local") == ["safetensors", "delta", "delta", "safetensors", "delta"]
    assert desk.parts("remote") == desk.parts("local")
    assert desk.write(6, LARGE) is not None
    assert desk.parts("local")[-1] == "safetensors", "another layout has no difference to the former one"


def test_a_difference_is_not_written_where_its_base_is_missing(tmp_path: Path) -> None:
    """One tier missed a generation: the next one is full, everywhere."""
    pytest.importorskip("zstandard")
    policy = CheckpointPolicy(dir=str(tmp_path / "far"), local_dir=str(tmp_path / "near"), full_every=10)
    desk = Desk(tmp_path, policy)
    desk.write(1, LARGE)
    far = desk.targets[1]
    whole, far._tier = far._tier, read_only(tmp_path / "far")
    desk.write(2, LARGE)
    far._tier = whole
    desk.write(3, LARGE)
    assert desk.parts("local") == ["safetensors", "delta", "safetensors"]
    assert desk.parts("remote") == ["safetensors", "safetensors"]
    assert [note.what for note in desk.notes] == ["skipped"]


@pytest.mark.parametrize("complete", [3, 1])
def test_nothing_is_rested_on_what_was_found_damaged(tmp_path: Path, complete: int) -> None:
    """Damage in the full generation ends the differences at once, also where those between still wait for other nodes:
    what rests on damage can never be restored. Then a new chain begins."""
    pytest.importorskip("zstandard")
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far"), full_every=10))
    for step in (1, 2, 3):
        desk.write(step, LARGE)
    tier = desk.targets[0].open()
    for step in range(1, complete + 1):
        archive.complete(tier, Version(step, 1), 1)
    with (tmp_path / "far" / payload_name(Version(1, 1), 0, "full")).open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"rot")
    with contextlib.suppress(CheckpointError):
        archive.verify(tier, Version(1, 1))
    assert catalog.look(tier, Version(1, 1)).damaged
    desk.write(4, LARGE)
    desk.write(5, LARGE)
    assert desk.parts("remote") == ["safetensors", "delta", "delta", "safetensors", "delta"]


def read_only(path: Path) -> DirectoryTier:
    return DirectoryTier(path, "remote", files=Failing("create", 0, errno.EROFS))


def test_the_far_tier_is_written_from_the_slot_when_the_near_one_fails(tmp_path: Path) -> None:
    """A full local disk does not keep a generation from the shared tier."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far"), local_dir=str(tmp_path / "near")))
    desk.targets[0].open()
    desk.targets[0]._tier = DirectoryTier(tmp_path / "near", files=Failing("write", 1, errno.ENOSPC))
    written = desk.write(1)
    assert written is not None
    assert list(written.parts) == ["remote"]  # type: ignore[attr-defined]
    assert [(note.what, note.tier) for note in desk.notes] == [("skipped", "local")]
    assert not desk.pinned()


def test_the_pin_goes_as_soon_as_one_tier_is_whole(tmp_path: Path) -> None:
    """The trainer gets its file back before the slow tier has its copy."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far"), local_dir=str(tmp_path / "near")))
    seen: list[bool] = []

    class Watching(DirectoryTier):
        def put(self, name: str, chunks: object) -> int:
            seen.append(desk.pinned())
            return super().put(name, chunks)  # type: ignore[arg-type]

    desk.targets[0]._tier = Watching(tmp_path / "near", create=True)
    desk.targets[1]._tier = Watching(tmp_path / "far", create=True)
    desk.write(1)
    assert seen == [True, True, False, False]


def test_a_damaged_state_is_said_and_not_written(tmp_path: Path) -> None:
    """The note names the bytes; the pin is lifted so that the next generation can come."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    write_slot(slot_path(desk.dir, 0), Version(1, 1), specs=LARGE)
    slot = Slot(slot_path(desk.dir, 0))
    slot.memory[HEADER + 100] ^= 1
    slot.close()
    assert desk.scribe.write(slot_path(desk.dir, 0), 0, desk.config, desk.targets) is None
    assert [(note.what, note.tier) for note in desk.notes] == [("damaged", "memory")]
    assert not desk.pinned()
    assert desk.parts("remote") == []


def test_without_a_keeper_the_archiver_makes_the_checksums(tmp_path: Path) -> None:
    """It waits a moment for the keeper's, which are older than its own could be."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    assert desk.write(1, seal=False) is not None
    assert desk.parts("remote") == ["safetensors"]


def test_a_trouble_is_said_once_until_a_generation_is_complete(tmp_path: Path) -> None:
    """A hundred generations into a read-only directory make one line, and one more when it works again."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    target = desk.targets[0]
    whole = target.open()
    target._tier = read_only(tmp_path / "far")
    for step in range(1, 5):
        desk.write(step, LARGE[1:])
    (said,) = desk.said
    assert "step 1 is left out (the parts of 1 of 1 ranks on this node)" in said
    assert "make it writable" in said
    target._tier = whole
    target.hurry()
    desk.write(5, LARGE[1:])
    assert len(desk.said) == 1, "a part alone ends nothing"
    target.worked(Version(5, 1))
    assert len(desk.said) == 2
    assert "works again, step 5 is there" in desk.said[1]
    assert "4 generations from step 1 to 4 are missing" in desk.said[1]


def test_leftovers_do_not_keep_a_full_disk_full(tmp_path: Path) -> None:
    """What a killed writer left fills the disk, so that no generation comes to its end: it is swept all the same."""
    local = tmp_path / "near"
    with node(tmp_path / "node", CheckpointPolicy(local_dir=str(local), dir="")) as one:
        DirectoryTier(local, create=True)
        ended = subprocess.run([sys.executable, "-c", DIES, local], capture_output=True, text=True, check=True)
        assert ended.returncode == 0
        (left,) = local.glob("a/.tmp~*")

        class Small(Files):
            def write(self, fd: int, data: memoryview) -> int:
                if left.exists():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(fd, data)

        worker = Archiver(one.dir)
        worker._read_config()
        (target,) = worker._targets
        target._tier = DirectoryTier(local, files=Small())
        for step in (100, 200):
            write_slot(slot_path(one.dir, 0), Version(step, 1), specs=LARGE[1:])
            assert worker._round()
            assert not one.pinned()
        worker._teller.close()
        assert complete_steps(str(local)) == [200]
        assert not left.exists()


def test_an_archiver_without_memory_leaves_out_a_generation_and_lives(tmp_path: Path) -> None:
    """It would else be started, and end, again and again, and the pin would stay."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    whole = desk.targets[0].open()

    class Poor(DirectoryTier):
        def put(self, name: str, chunks: object) -> int:
            raise MemoryError

    desk.targets[0]._tier = Poor(tmp_path / "far", create=True)
    assert desk.write(1, LARGE[1:]) is not None
    assert not desk.pinned()
    assert "no memory to write with" in desk.notes[0].why
    desk.targets[0]._tier = whole
    desk.write(2, LARGE[1:])
    assert desk.parts("remote") == ["safetensors"]


def test_a_copy_that_was_owed_when_the_archiver_died_is_made_by_the_next(tmp_path: Path) -> None:
    """The pin is gone by then; the node's list of copies to make is not."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far"), local_dir=str(tmp_path / "near")))

    class Killed(DirectoryTier):
        def put(self, name: str, chunks: object) -> int:
            raise KeyboardInterrupt

    desk.targets[1]._tier = Killed(tmp_path / "far", create=True)
    with pytest.raises(KeyboardInterrupt):
        desk.write(1)
    assert not desk.pinned()
    assert desk.parts("local") == ["safetensors"]
    fresh = targets(desk.config, Seen(desk.dir), desk.said.append)
    successor = Scribe(desk.notes.append, Todo(desk.dir))
    (written,) = successor.catch_up(fresh)
    assert set(written.parts) == {"local", "remote"}
    archive.complete(fresh[1].open(), Version(1, 1), 1)
    assert successor.catch_up(fresh) == []


def finisher(notes: list[Note], said: list[str], clock: list[float]) -> Finisher:
    return Finisher(notes.append, said.append, clock=lambda: clock[0])


def test_missing_nodes_are_waited_for_and_then_named(tmp_path: Path) -> None:
    """After the named limit the generation is skipped; the sentence says which ranks' parts never came."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    write_slot(slot_path(desk.dir, 0), Version(1, 1), world_size=3)
    desk.scribe.write(slot_path(desk.dir, 0), 0, desk.config, desk.targets)
    notes, said, clock = [], [], [0.0]
    waiting = finisher(notes, said, clock)
    waiting.expect(Version(1, 1), 3)
    while waiting.pending:
        waiting.look(desk.targets[0], desk.config, [])
        assert clock[0] <= COMPLETE_S + 10
        clock[0] += waiting.wait_s or 0.0
    assert [note.what for note in notes] == ["skipped"]
    assert "ranks 1, 2" in notes[0].why
    assert "ranks 1, 2" in said[0]


def test_what_a_dead_archiver_had_not_completed_is_taken_up(tmp_path: Path) -> None:
    """Its successor finds parts without a manifest by looking, and completes them."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    desk.write(1, LARGE[1:])
    desk.write(2, LARGE[1:])
    notes, said, clock = [], [], [0.0]
    successor = finisher(notes, said, clock)
    successor.scan(desk.targets[0])
    successor.look(desk.targets[0], desk.config, [])
    assert complete_steps(str(tmp_path / "far")) == [2, 1]
    assert not successor.pending


def test_a_copy_that_rotted_on_the_way_is_made_again(tmp_path: Path) -> None:
    """Read-back differs: the part is written a second time, and the damage is told."""
    desk = Desk(tmp_path, CheckpointPolicy(dir=str(tmp_path / "far")))
    spoilt: list[str] = []

    class Spoiling(DirectoryTier):
        def put(self, name: str, chunks: object) -> int:
            size = super().put(name, chunks)  # type: ignore[arg-type]
            if not spoilt:
                spoilt.append(name)
                path = self.root / name
                data = bytearray(path.read_bytes())
                data[1000] ^= 4
                path.write_bytes(data)
            return size

    desk.targets[0]._tier = Spoiling(tmp_path / "far", create=True)
    assert desk.write(1) is not None
    assert spoilt == [payload_name(Version(1, 1), 0, "full")]
    assert [note.what for note in desk.notes] == ["damaged"]
    assert (tmp_path / "far" / folder(Version(1, 1)) / "rank00000.json").exists()
