"""Durable tiers: one suite over all of them, then what only one kind can do wrong."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.exceptions import TierAway, TierDenied, TierFull, TierMissing
from keepstep.checkpoint.tiers import open as opening
from keepstep.checkpoint.tiers.directory import MARKER, DirectoryTier
from keepstep.checkpoint.tiers.files import Files
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.checkpoint.tiers.retry import Retrying
from keepstep.ports.tier import Tier
from tests.checkpoint import s3

KINDS = ("memory", "directory", "obstore", "s3", "retrying")
REGION = "us-east-1"


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Store]:
    pytest.importorskip("obstore", reason="the extra 'checkpoint' is not installed")
    with s3.serve() as (store, endpoint):
        point_at(monkeypatch, endpoint)
        yield store


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": REGION,
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    match request.param:
        case "memory":
            yield MemoryTier()
        case "directory":
            yield DirectoryTier(tmp_path / "a" / "tier", create=True)
        case "retrying":
            yield Retrying(DirectoryTier(tmp_path, create=True))
        case "obstore":
            pytest.importorskip("obstore", reason="the extra 'checkpoint' is not installed")
            from keepstep.checkpoint.tiers.remote_obstore import RemoteTier

            yield RemoteTier("memory:///")
        case "s3":
            request.getfixturevalue("cloud")
            yield open_tier("s3://bucket/some/prefix", budget_s=0)


def test_what_is_put_is_there_whole_and_named(tier: Tier) -> None:
    """Put, size, get, ranges and names agree; another put replaces."""
    assert tier.put("step-1/a.json", [b"hello ", memoryview(b"world")]) == 11
    assert tier.put("step-1/b", []) == 0
    tier.put("step-10/c", [b"x"])
    assert tier.get("step-1/a.json") == b"hello world"
    assert tier.get("step-1/a.json", 6) == b"world"
    assert tier.get("step-1/a.json", 3, 4) == b"lo w"
    assert (tier.size("step-1/a.json"), tier.size("step-1/b")) == (11, 0)
    assert tier.get("step-1/b") == b""
    assert list(tier.names()) == ["step-1/a.json", "step-1/b", "step-10/c"]
    assert list(tier.names("step-1/")) == ["step-1/a.json", "step-1/b"]
    assert list(tier.names("step-1")) == ["step-1/a.json", "step-1/b", "step-10/c"]
    tier.put("step-1/a.json", [b"new"])
    assert tier.get("step-1/a.json") == b"new"


def test_what_is_missing_is_said_to_be_missing(tier: Tier) -> None:
    """No object, and fewer bytes than asked for, are ``TierMissing``; removing nothing is quiet."""
    for call in (lambda: tier.get("step-1/no"), lambda: tier.size("step-1/no"), lambda: tier.get("no", 2, 3)):
        with pytest.raises(TierMissing):
            call()
    tier.put("few", [b"12345"])
    for start, length in ((0, 6), (3, 3), (5, 1), (90, 1)):
        with pytest.raises(TierMissing):
            tier.get("few", start, length)
    tier.remove("step-1/no")
    tier.remove("few")
    tier.remove("few")
    assert list(tier.names()) == []


def test_a_large_object_arrives_in_parts(tier: Tier) -> None:
    """Chunks of any size make one object; none of them is kept longer than it is valid."""
    piece = bytearray(3 * 1024 * 1024 + 1)

    def chunks() -> Iterator[memoryview]:
        for number in range(7):
            piece[:] = bytes([number]) * len(piece)
            yield memoryview(piece)

    assert tier.put("large", chunks()) == 7 * len(piece)
    assert tier.size("large") == 7 * len(piece)
    for number in range(7):
        assert tier.get("large", number * len(piece), 3) == bytes([number]) * 3
    assert tier.get("large", 7 * len(piece) - 1, 1) == b"\x06"


@pytest.mark.parametrize("size", [10, 20 * 1024 * 1024])
def test_a_writer_that_fails_leaves_nothing(tier: Tier, size: int) -> None:
    """An error while the bytes are made comes out as it is, and there is no object, nor half of one."""

    def chunks() -> Iterator[bytes]:
        for _ in range(4):
            yield bytes(size // 4)
        raise LookupError("the slot was damaged")

    tier.put("other", [b"stays"])
    with pytest.raises(LookupError):
        tier.put("broken", chunks())
    assert list(tier.names()) == ["other"]
    with pytest.raises(TierMissing):
        tier.get("broken")


# -------------------------------------------------------------------- directory


class Failing(Files):
    """Fails one operation, or every one from then on."""

    def __init__(self, operation: str, number: int, code: int = errno.EIO) -> None:
        self.operation, self.left, self.code = operation, number, code

    def _maybe(self, operation: str) -> None:
        if operation == self.operation:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))

    def write(self, fd: int, data: memoryview) -> int:
        self._maybe("write")
        return super().write(fd, data[:1000])

    def fsync(self, fd: int) -> None:
        self._maybe("fsync")
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._maybe("rename")
        super().rename(old, new)

    def create(self, path: Path) -> int:
        self._maybe("create")
        return super().create(path)

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        self._maybe("read")
        return super().read(path, start, length)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, TierFull),
        (errno.EDQUOT, TierFull),
        (errno.EROFS, TierDenied),
        (errno.EACCES, TierDenied),
        (errno.EIO, TierAway),
        (errno.ESTALE, TierAway),
        (errno.ENOTCONN, TierAway),
    ],
)
@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename"])
def test_each_error_of_the_system_has_its_kind(
    tmp_path: Path, operation: str, code: int, kind: type[Exception]
) -> None:
    """Full, forbidden, and gone: each says the path, and nothing is left behind."""
    DirectoryTier(tmp_path, create=True).put("a/old", [b"old"])
    tier = DirectoryTier(tmp_path, files=Failing(operation, 0, code))
    with pytest.raises(kind, match=str(tmp_path)):
        tier.put("a/new", [b"x" * 5000])
    with pytest.raises(kind):
        tier.put("a/old", [b"y" * 5000])
    assert sorted(os.listdir(tmp_path / "a")) == ["old"]
    assert tier.get("a/old") == b"old"


def test_a_write_that_takes_few_bytes_is_gone_on_with(tmp_path: Path) -> None:
    """The system may write less than it was given."""
    tier = DirectoryTier(tmp_path, create=True, files=Failing("none", 0))
    data = bytes(range(256)) * 40
    tier.put("a", [data, memoryview(data)])
    assert tier.get("a") == data + data


def test_a_read_error_is_not_a_missing_object(tmp_path: Path) -> None:
    """EIO must never look like an object that is not there."""
    DirectoryTier(tmp_path, create=True).put("a", [b"a"])
    with pytest.raises(TierAway):
        DirectoryTier(tmp_path, files=Failing("read", 0)).get("a")


def test_a_lost_mount_is_not_written_to(tmp_path: Path) -> None:
    """After the file system has gone the bare mount point stays empty, and reading does not find "nothing" either."""
    root = tmp_path / "mnt"
    tier = DirectoryTier(root, create=True)
    tier.put("step-1/a", [b"a"])
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    for call in (
        lambda: tier.put("step-1/b", [b"b"]),
        lambda: list(tier.names()),
        lambda: tier.get("step-1/a"),
        lambda: tier.remove("step-1/a"),
        lambda: DirectoryTier(root, create=True, seen=True),
    ):
        with pytest.raises(TierAway, match="not mounted"):
            call()
    assert os.listdir(root) == []
    root.rmdir()
    with pytest.raises(TierAway):
        tier.put("step-1/b", [b"b"])
    assert not root.exists()
    (tmp_path / "unmounted").rename(root)
    tier.put("step-1/b", [b"b"])
    assert list(tier.names()) == ["step-1/a", "step-1/b"]


DIES = """
import os, pathlib, sys
from keepstep.checkpoint.tiers.directory import DirectoryTier
def half():
    yield b"half"
    print(os.getpid(), flush=True)
    os._exit(0)
DirectoryTier(pathlib.Path(sys.argv[1])).put("a/left", half())
"""


def test_temporary_files_are_swept_when_their_writer_is_gone(tmp_path: Path) -> None:
    """This host's by process number, others' by age, also those of a host of the same name; who is at work goes on."""
    tier = DirectoryTier(tmp_path, create=True)
    tier.put("a/kept", [b"k"])
    ended = subprocess.run([sys.executable, "-c", DIES, tmp_path], capture_output=True, text=True, check=True)
    (left,) = (name for name in os.listdir(tmp_path / "a") if name.endswith("~left"))
    old = tmp_path / "a" / ".tmp~elsewhere~1~0~rank1.safetensors"
    namesake = f".tmp~{socket.gethostname()}~{ended.stdout.strip()}~0~rank0.safetensors"
    for name in (old.name, ".tmp~elsewhere~1~1~rank1.safetensors", namesake):
        (tmp_path / "a" / name).write_bytes(b"half")
    os.utime(old, (0, 0))
    seen: list[int] = []

    def meanwhile() -> Iterator[bytes]:
        yield b"h"
        assert list(tier.names()) == ["a/kept"]
        seen.append(tier.sweep(3600))
        yield b"alf"

    tier.put("a/mine", meanwhile())
    assert seen == [2]
    assert left not in os.listdir(tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == sorted(
        [".tmp~elsewhere~1~1~rank1.safetensors", namesake, "kept", "mine"]
    )


def test_a_folder_that_a_collector_takes_away_is_made_again(tmp_path: Path) -> None:
    """A collector may remove the empty folder between its making and its use."""

    class Racing(Files):
        raced = 0

        def create(self, path: Path) -> int:
            if path.parent.name == "step-1" and self.raced < 3:
                self.raced += 1
                os.rmdir(path.parent)
            return super().create(path)

    tier = DirectoryTier(tmp_path, create=True, files=Racing())
    tier.put("step-1/a", [b"a"])
    assert tier.get("step-1/a") == b"a"


def test_the_last_object_takes_its_folder_along(tmp_path: Path) -> None:
    """Removed generations leave no empty folders; the root stays."""
    tier = DirectoryTier(tmp_path, create=True)
    tier.put("step-1/a", [b"a"])
    tier.remove("step-1/a")
    assert os.listdir(tmp_path) == [MARKER]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../up"])
def test_a_name_never_leads_out_of_the_tier(tmp_path: Path, name: str) -> None:
    """Names come from files that anybody may have written."""
    tier = DirectoryTier(tmp_path, create=True)
    for call in (lambda: tier.get(name), lambda: tier.put(name, [b""]), lambda: tier.remove(name)):
        with pytest.raises(TierDenied, match="not a name"):
            call()


# -------------------------------------------------------------------- remote


def test_a_throttling_store_is_tried_again_and_training_is_told_in_the_end(cloud: s3.Store) -> None:
    """503 SlowDown passes; one that goes on is ``TierAway`` once the budget is used up."""
    tier = open_tier("s3://bucket/p")
    cloud.moods.extend([(503, "SlowDown")] * 4)
    tier.put("a", [b"a"])
    assert tier.get("a") == b"a"
    cloud.always = (503, "SlowDown")
    with pytest.raises(TierAway, match="s3://bucket/p/b"):
        open_tier("s3://bucket/p", budget_s=0).put("b", [b"b"])


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", TierDenied),
        (401, "Unauthorized", TierDenied),
        (404, "NoSuchBucket", TierDenied),
        (507, "InsufficientStorage", TierFull),
        (500, "InternalError", TierAway),
    ],
)
def test_each_answer_of_a_store_has_its_kind(cloud: s3.Store, status: int, code: str, kind: type[Exception]) -> None:
    """What a person has to do differs: wait, free space, or mend the policy."""
    tier = open_tier("s3://bucket/p", budget_s=0)
    cloud.always = (status, code)
    for data in (b"x", bytes(9 * 1024 * 1024)):
        with pytest.raises(kind, match="s3://bucket/p/name"):
            tier.put("name", [data])


def test_an_upload_that_fails_in_the_middle_leaves_neither_object_nor_parts(cloud: s3.Store) -> None:
    """Parts that nobody completes would cost money for ever."""
    tier = open_tier("s3://bucket/p", budget_s=0)

    def chunks() -> Iterator[bytes]:
        yield bytes(9 * 1024 * 1024)
        cloud.moods.extend([(403, "AccessDenied")])
        yield bytes(9 * 1024 * 1024)

    with pytest.raises(TierDenied):
        tier.put("broken", chunks())
    assert cloud.objects == {}
    assert cloud.uploads == {}


def test_a_part_that_is_throttled_is_sent_again_and_not_all_before_it(cloud: s3.Store) -> None:
    """503 in the middle of an upload in parts: the object is whole in the end, and the parts before it went up once."""
    said: list[int] = []

    class Pieces(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            for number, piece in enumerate(super().__iter__()):
                if number == 3 and not said:
                    said.append(1)
                    cloud.moods.extend([(503, "SlowDown")] * 12)
                yield piece

    pieces = Pieces(bytes([number]) * (5 * 1024 * 1024) for number in range(5))
    assert open_tier("s3://bucket/p").put("large", pieces) == 25 * 1024 * 1024
    assert said == [1]
    assert not cloud.moods
    assert cloud.objects["bucket/p/large"] == b"".join(list.__iter__(pieces))
    assert cloud.uploads == {}
    assert cloud.requests.count("PUT bucket/p/large") == 4 + 12


def test_an_answer_that_breaks_off_is_asked_for_again_and_never_taken_for_whole(cloud: s3.Store) -> None:
    """The connection ends within the body, in a whole object and in a range; patience brings all the bytes."""
    data = bytes(range(256)) * 4096
    tier = open_tier("s3://bucket/p")
    tier.put("a", [data])
    cloud.cut.extend([1000, 0, 500_000])
    assert tier.get("a") == data
    cloud.cut.extend([7, 9])
    assert tier.get("a", 100, 900_000) == data[100:900_100]
    assert not cloud.cut
    cloud.cut.extend([100] * 1000)
    hasty = open_tier("s3://bucket/p", budget_s=0)
    for call in (lambda: hasty.get("a"), lambda: hasty.get("a", 5, 900_000), lambda: list(hasty.names())):
        with pytest.raises(TierAway, match="s3://bucket/p"):
            call()


def test_a_slow_answer_counts_while_it_moves_and_ends_when_it_takes_too_long(
    cloud: s3.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow is not broken: within the limit of one request the bytes come; beyond it the store is away."""
    from keepstep.checkpoint.tiers import remote_obstore

    data = bytes(range(200))
    open_tier("s3://bucket/p").put("a", [data])
    cloud.trickle = (50, 0.1)
    assert open_tier("s3://bucket/p", budget_s=0).get("a") == data
    monkeypatch.setattr(remote_obstore, "REQUEST_S", 0.25)
    cloud.trickle = (10, 0.1)
    with pytest.raises(TierAway, match="s3://bucket/p/a"):
        open_tier("s3://bucket/p", budget_s=0).get("a")


def test_a_list_of_many_pages_is_whole(cloud: s3.Store) -> None:
    """S3 gives a thousand names at a time; a catalog that saw only the first page would miss generations."""
    tier = open_tier("s3://bucket/p")
    names = [f"step-{number:012}.e1/rank00000.json" for number in range(25)]
    for name in names:
        tier.put(name, [b"x"])
    cloud.page, before = 10, len(cloud.requests)
    assert list(tier.names()) == names
    assert len(cloud.requests) - before == 3
    cloud.moods.extend([(503, "SlowDown")] * 2)
    assert list(tier.names("step-00000000002")) == names[20:]


def test_a_store_that_is_not_there_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens: the error comes within the budget and names the URL."""
    pytest.importorskip("obstore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        point_at(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(TierAway, match="s3://bucket/p"):
            open_tier("s3://bucket/p", budget_s=0).put("a", [b"a"])


def test_a_store_that_falls_silent_is_away(cloud: s3.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the request and does not answer: the limit of one request ends the wait."""
    from keepstep.checkpoint.tiers import remote_obstore

    monkeypatch.setattr(remote_obstore, "REQUEST_S", 0.2)
    tier = open_tier("s3://bucket/p", budget_s=0)
    cloud.asleep = threading.Event()
    try:
        with pytest.raises(TierAway, match="s3://bucket/p/a"):
            tier.put("a", [b"a"])
        with pytest.raises(TierAway):
            tier.get("a")
    finally:
        cloud.asleep.set()


def test_other_clouds_open_too_and_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their requests go through the same code; what differs is how they are named and configured."""
    pytest.importorskip("obstore")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    assert open_tier("gs://bucket/prefix").where == "gs://bucket/prefix"
    with pytest.raises(TierDenied, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_tier("az://container/prefix")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_tier("az://container/prefix").label == "remote"


def test_parts_grow_where_an_object_would_need_too_many(cloud: s3.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 takes ten thousand parts; a rank's state may be larger than ten thousand small ones."""
    from keepstep.checkpoint.tiers import remote_obstore

    monkeypatch.setattr(remote_obstore, "MAX_PARTS", 4)

    class Sized(list[bytes]):
        size_hint = 32 * 1024 * 1024

    tier = open_tier("s3://bucket/p", budget_s=0)
    tier.put("large", Sized([bytes(4 * 1024 * 1024)] * 8))
    parts = [line for line in cloud.requests if line == "PUT bucket/p/large"]
    assert len(parts) <= 4
    assert tier.size("large") == 32 * 1024 * 1024


# -------------------------------------------------------------------- retry and open


class Flaky(MemoryTier):
    def __init__(self, failures: int, error: type[Exception] = TierAway) -> None:
        super().__init__()
        self.failures, self.error, self.calls = failures, error, 0

    def put(self, name: str, chunks: object) -> int:
        self.calls += 1
        taken = list(chunks)  # type: ignore[call-overload]
        if self.calls <= self.failures:
            raise self.error("no answer")
        return super().put(name, taken)


def patient(tier: Tier, budget_s: float) -> tuple[Retrying, list[float]]:
    """Time passes only in pauses."""
    pauses: list[float] = []
    return Retrying(tier, budget_s=budget_s, draw=lambda: 0.5, sleep=pauses.append, clock=lambda: sum(pauses)), pauses


def test_pauses_grow_up_to_a_limit_and_the_budget_ends_them() -> None:
    """The sum of all pauses stays within the budget."""
    retrying, pauses = patient(Flaky(10**6), 60)
    with pytest.raises(TierAway, match="gave up after"):
        retrying.put("a", [b"a"])
    assert sum(pauses) < 60
    assert max(pauses) == 5.0
    assert all(a <= b for a, b in itertools.pairwise(pauses))


def test_a_long_call_that_fails_at_its_end_has_its_budget_before_it() -> None:
    """An hour of upload, then 503 for the last request: the hour does not count against the tries that follow."""
    now = [0.0]

    class Slow(Flaky):
        def put(self, name: str, chunks: object) -> int:
            now[0] += 3600
            return super().put(name, chunks)

    def pause(seconds: float) -> None:
        now[0] += seconds

    tier = Slow(1)
    Retrying(tier, budget_s=30, draw=lambda: 0.5, sleep=pause, clock=lambda: now[0]).put("a", [b"a"])
    assert tier.get("a") == b"a"
    hopeless = Slow(10**6)
    with pytest.raises(TierAway, match="gave up after 2 tries"):
        Retrying(hopeless, budget_s=30, draw=lambda: 0.5, sleep=pause, clock=lambda: now[0]).put("a", [b"a"])


def test_every_try_gets_all_the_bytes_again() -> None:
    """A list can be gone through again; a generator cannot, and is tried once."""
    tier = Flaky(3)
    patient(tier, 60)[0].put("a", [b"1", b"2"])
    assert tier.get("a") == b"12"
    once = Flaky(1)
    with pytest.raises(TierAway):
        patient(once, 60)[0].put("a", (chunk for chunk in [b"1"]))
    assert once.calls == 1


@pytest.mark.parametrize("error", [TierDenied, TierFull, TierMissing])
def test_what_will_not_change_is_not_tried_again(error: type[Exception]) -> None:
    """A missing permission does not come from waiting."""
    tier = Flaky(1, error)
    with pytest.raises(error):
        patient(tier, 60)[0].put("a", [b"a"])
    assert tier.calls == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "empty name"),
        ("ftp://host/x", "ftp:// is not a place"),
        ("https://host/x", "use a path, or one of s3://"),
        ("s3:///prefix", "names no bucket"),
        ("file://host/x", "file:///path/to/dir"),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_the_way_out(url: str, message: str) -> None:
    """The flag's value is wrong: say what would be right."""
    with pytest.raises(TierDenied, match=message):
        open_tier(url)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore is optional, and only object stores need it."""
    monkeypatch.delitem(sys.modules, "keepstep.checkpoint.tiers.remote_obstore", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierDenied, match=r"pip install 'keepstep\[checkpoint\]'"):
        open_tier("s3://bucket/p")


def test_readers_make_no_directories(tmp_path: Path) -> None:
    """``keepstep ckpt ls /typo`` says so instead of making it."""
    with pytest.raises(TierMissing, match="no such directory"):
        open_tier(str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()
    tier = open_tier((tmp_path / "new").as_uri(), create=True)
    assert tier.where == str(tmp_path / "new")
    assert opening.is_directory("file:///x")


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Neither made over nor taken for away."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierDenied):
        open_tier(str(tmp_path / "file" / "tier"), create=True)


def test_memory_urls_name_one_store_of_this_process() -> None:
    """For trying things out and for tests of what is above."""
    open_tier("memory://shared").put("a", [b"a"])
    assert open_tier("memory://shared").get("a") == b"a"
    assert list(open_tier("memory://other").names()) == []
