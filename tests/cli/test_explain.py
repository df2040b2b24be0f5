"""``keepstep explain`` from outside: files, stdin, codes, and what a person can get wrong."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.cli.explain_read import unpacked
from keepstep.cli.main import main

FELL = "node-017 kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"
MORE = "[rank1]: NCCL error: unhandled system error\n"


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(FELL + MORE)
    return path


def test_the_page_names_the_culprit_first(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "infrastructure: node-017, GPU 0000:9d:00"
    assert any("1 | node-017 kernel" in line for line in lines)
    assert any(line.startswith("  only consequences: 1 x nccl_error") for line in lines)
    assert any(line.startswith("  do: replace_node. Take node-017 out") for line in lines)


def test_json_has_what_programs_need(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", str(log)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "keepstep.v1/Diagnosis"
    assert {"category", "root_cause", "transient", "action", "culprit", "confidence", "evidence"} <= said.keys()
    assert said["culprit"]["node"] == "node-017"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_packed_logs_are_unpacked_and_joined_ones_read_to_the_end(pack: Callable[[bytes], bytes]) -> None:
    text = (FELL * 12_000).encode()
    assert b"".join(unpacked([pack(text)])) == text
    joined = pack(text) + pack(MORE.encode())
    pieces = [joined[i : i + 1000] for i in range(0, len(joined), 1000)]
    assert b"".join(unpacked(pieces)) == text + MORE.encode()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_of_a_packed_log_that_was_cut_off_the_rest_is_used(pack: Callable[[bytes], bytes]) -> None:
    whole = pack(os.urandom(200_000).hex().encode())
    assert isinstance(b"".join(unpacked([whole[:-500]])), bytes)
    assert isinstance(b"".join(unpacked([whole[:50] + os.urandom(50) + whole[100:]])), bytes)
    text = b"".join(unpacked([gzip.compress((FELL * 5_000).encode())[:-8]]))
    assert text == (FELL * 5_000).encode()


def test_a_log_that_was_packed_twice_is_unpacked_twice_and_no_more_than_is_sane() -> None:
    text = FELL.encode()
    packed = gzip.compress(gzip.compress(text))
    assert b"".join(unpacked([packed])) == text
    assert b"".join(unpacked([packed[:1], packed[1:3], packed[3:]])) == text
    for _ in range(8):
        packed = gzip.compress(packed)
    assert b"".join(unpacked([packed]))[:2] == b"\x1f\x8b"


def test_a_file_that_cannot_be_read_to_its_end_counts_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing disk: what came before the error is explained, and the error is said; nothing at all is an error."""

    class Failing(io.RawIOBase):
        def __init__(self, *given: bytes) -> None:
            self.left = list(given)

        def read(self, size: int = -1) -> bytes:
            if not self.left:
                raise OSError(5, "Input/output error")
            return self.left.pop(0)

    class In:
        def __init__(self, buffer: Failing) -> None:
            self.buffer = buffer

    monkeypatch.setattr("sys.stdin", In(Failing(FELL.encode())))
    assert main(["explain", "-"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("infrastructure: node-017")
    assert f"stdin could be read up to byte {len(FELL)} only: Input/output error" in said.err
    monkeypatch.setattr("sys.stdin", In(Failing()))
    assert main(["explain", "-"]) != 0
    assert "stdin cannot be read: Input/output error" in capsys.readouterr().err


def test_several_files_are_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node-1").mkdir()
    (tmp_path / "node-2").mkdir()
    (tmp_path / "node-1" / "rank_0.err").write_text(MORE)
    (tmp_path / "node-2" / "rank_9.err").write_text("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    files = [str(path) for path in sorted(tmp_path.glob("*/*.err"))]
    assert main(["explain", "--json", *files]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["culprit"]["node"], said["culprit"]["rank"]) == ("node-2", 9)
    assert said["evidence"][0]["source"] == "rank_9.err"


def test_jsonl_answers_every_line_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps({"log": FELL}),
        "no json",
        json.dumps({"log": 3}),
        json.dumps({"id": 7, "log": "KeyError: 'x'"}),
    ]
    monkeypatch.setattr("sys.stdin", Stdin("\n".join(lines).encode()))
    assert main(["explain", "--json", "--jsonl"]) == 1
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["category"] for one in said] == ["infrastructure", "unknown", "unknown", "user_code"]
    assert "line 2" in said[1]["error"]


def test_stdin_is_read_for_a_dash_and_for_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["explain", "-", "--json"], ["explain", "--json"]):
        monkeypatch.setattr("sys.stdin", Stdin(FELL.encode()))
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["action"] == "replace_node"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (["xid", "79"], "replace_node"),
        (["GPU079"], "replace_node"),
        (["Xid 31"], "stop_and_notify_user"),
        (["sxid", "20034"], "replace_node"),
        (["ncclRemoteError"], "a consequence"),
        (["137"], "SIGKILL"),
        (["exit", "-9"], "SIGKILL"),
        (["SIGBUS"], "/dev/shm"),
        (["exit", "93"], "do not restart"),
        (["storage_quota"], "free_storage_then_resume"),
    ],
)
def test_codes_are_explained(code: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *code]) == 0
    assert expected in capsys.readouterr().out


def test_wrong_inputs_are_named(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.log"
    empty.touch()
    assert main(["explain", str(empty)]) == 0
    assert "unknown" in capsys.readouterr().out
    for words, said in (
        ([str(tmp_path / "missing.log")], "there is no file"),
        ([str(tmp_path)], "is a folder"),
        (["--jsn", str(log)], "unknown option: --jsn"),
        (["--jsonl", str(log), str(log)], "reads one file"),
        (["xid", "4711"], "there is no file xid, and no code"),
    ):
        assert main(["explain", *words]) != 0
        assert said in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.chmod(0)
    assert main(["explain", str(log)]) == 1
    assert "cannot be read: Permission denied" in capsys.readouterr().err
