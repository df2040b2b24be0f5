"""First error: what is taken out of a process' output, and what the agent tells of a real process that failed."""

from __future__ import annotations

import time
from pathlib import Path

from keepstep.agent.first_error import CHARS, LINES, LOOKED_BYTES, TOTAL_CHARS, first_error, size

FELL = "NVRM: Xid (PCI:0000:9d:00): 79, pid=1, name=x, GPU has fallen off the bus."
STACK = (
    ["Traceback (most recent call last):"]
    + [text for i in range(20) for text in (f'  File "/job/m{i}.py", line {i}, in f', f"    call({i})")]
    + ["RuntimeError: CUDA error: unspecified launch failure"]
)


def said(tmp_path: Path, *lines: str, name: str = "err") -> str:
    path = tmp_path / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_causes_come_before_the_noise_that_follows(tmp_path: Path) -> None:
    """Progress is passed over, an echo that is repeated is told once, and the order is that of the file."""
    echoes = [f"[rank0]: Connection closed by peer [10.0.0.{i}]" for i in range(500)]
    err = said(tmp_path, *(f"step {i} loss 2.0" for i in range(500)), FELL, *echoes)
    assert first_error(err, "") == (FELL, echoes[0])


def test_a_stack_keeps_its_innermost_calls_and_its_exception(tmp_path: Path) -> None:
    """Also when a label of the rank stands before each line, and when a second exception follows the first."""
    chain = [*STACK, "", "During handling of the above exception, another exception occurred:", "", STACK[0]]
    chain += ['  File "/job/x.py", line 9, in g', "    h()", "ValueError: no"]
    for label in ("", "[rank7]: "):
        lines = [*(f"{label}{line}" for line in STACK), "training ends"]
        found = first_error(said(tmp_path, *lines), "")
        assert [line.removeprefix(label) for line in found] == [STACK[0], *STACK[-9:]]
    found = first_error(said(tmp_path, *chain, "bye"), "")
    assert "ValueError: no" in found
    assert "bye" not in found


def test_stderr_comes_first_and_stdout_is_read_too(tmp_path: Path) -> None:
    out = said(tmp_path, "corrupt record in shard-7.tar", name="out")
    err = said(tmp_path, "fatal: giving up")
    assert first_error(err, out) == ("fatal: giving up", "corrupt record in shard-7.tar")


def test_what_an_earlier_process_wrote_into_the_same_file_is_not_this_ones(tmp_path: Path) -> None:
    err = said(tmp_path, FELL)
    start = size(err)
    with open(err, "a") as file:
        file.write("ValueError: bad batch\n")
    assert first_error(err, "", start) == ("ValueError: bad batch",)


def test_all_is_bounded(tmp_path: Path) -> None:
    """Lines, characters, and the time that a look at any amount of any bytes takes."""
    names = ["".join(chr(97 + (i // 26**k) % 26) for k in range(4)) for i in range(5000)]
    found = first_error(said(tmp_path, *(f"error {name} {'x' * 30}" for name in names)), "")
    assert len(found) == LINES
    found = first_error(said(tmp_path, *(f"error {name} {'y' * 5000}" for name in names[:90])), "")
    assert 0 < sum(map(len, found)) <= TOTAL_CHARS
    assert max(map(len, found)) <= CHARS + 5
    path = tmp_path / "junk"
    path.write_bytes(b"x" * LOOKED_BYTES * 3 + b"\nerror at the end\n")
    begun = time.process_time()
    assert first_error(str(path), "") == ("error at the end",)
    assert time.process_time() - begun < 0.5
    assert first_error(str(tmp_path / "missing"), str(tmp_path)) == ()
    path.write_bytes(bytes(range(256)) * 100)
    first_error(str(path), "")
