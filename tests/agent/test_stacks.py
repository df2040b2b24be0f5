"""Stacks of real processes: by py-spy, by the process itself where nobody may look, and what the kernel says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent import stackdump, stacks
from keepstep.agent.stacks import Tree
from keepstep.model.ids import Rank, SlotId
from keepstep.model.stacks import MAX_FRAMES, ProcessStacks

HAS_TOOL = stacks.find_tool() is not None
WAITER = """
    import sys, threading, subprocess
    {before}
    def deepest():
        print("ready", flush=True)
        sys.stdin.read()
    def helper():
        threading.Event().wait()
    threading.Thread(target=helper, name="helper", daemon=True).start()
    deepest()
"""


@contextlib.contextmanager
def program(node: Path, *, before: str = "", answering: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A process that waits in ``deepest``, as an agent would have started it, or as a stranger would."""
    dump = f"from keepstep.agent import stackdump; stackdump.answer({str(node)!r})" if answering else "pass"
    code = textwrap.dedent(WAITER).format(before=f"{dump}\n{before}")
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=node
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def take(pid: int, node: Path) -> list[ProcessStacks]:
    return asyncio.run(stacks.take([Tree(Rank(3), SlotId("r3"), pid)], node))


def functions(process: ProcessStacks) -> set[str]:
    return {frame.function for thread in process.threads for frame in thread.frames}


@pytest.fixture(params=["py-spy", "faulthandler"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "faulthandler":
        monkeypatch.setattr(stacks, "find_tool", lambda: None)
    elif not HAS_TOOL:
        pytest.skip("py-spy is not installed")
    return str(request.param)


def test_a_process_is_seen_where_it_waits(tmp_path: Path, how: str) -> None:
    """Both ways find the same: the main thread first, its innermost call first, the helper thread, too."""
    with program(tmp_path) as process:
        (found,) = take(process.pid, tmp_path)
    assert (found.rank, found.role, found.how, found.pid) == (3, "trainer", how, process.pid)
    assert found.main is not None
    assert found.main.main
    assert [frame.function for frame in found.main.frames] == ["deepest", "<module>"]
    assert "helper" in functions(found)
    assert found.state in "RS"
    assert found.cpu_s > 0
    assert found.read_bytes > 0


def test_twice_tells_of_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump is read from where the last one ended."""
    monkeypatch.setattr(stacks, "find_tool", lambda: None)
    with program(tmp_path) as process:
        first, second = take(process.pid, tmp_path), take(process.pid, tmp_path)
    assert len(first[0].threads) == len(second[0].threads) == 2


def test_what_it_has_started_is_seen_too(tmp_path: Path, how: str) -> None:
    """Data loaders and checkpoint writers hang as well, and the trainer only waits for them."""
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with program(tmp_path, before=child) as process:
        found = take(process.pid, tmp_path)
        for one in found:
            if one.role == "child":
                os.kill(one.pid, signal.SIGKILL)
    assert sorted(one.role for one in found) == ["child", "trainer"]
    (other,) = (one for one in found if one.role == "child")
    if how == "faulthandler":
        # Not ours: the signal would have ended it.
        assert other.how == "none"
        assert "not started by keepstep" in other.why


def test_a_stopped_process_is_told_as_stopped(tmp_path: Path, how: str) -> None:
    with program(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        (found,) = take(process.pid, tmp_path)
    assert found.state == "T"
    assert (found.how, bool(found.threads)) == (("py-spy", True) if how == "py-spy" else ("none", False))


def test_a_stranger_is_not_ended_by_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_tool", lambda: None)
    with program(tmp_path, answering=False) as process:
        (found,) = take(process.pid, tmp_path)
        assert process.poll() is None
    assert (found.how, found.threads) == ("none", ())
    assert "py-spy is not installed" in found.why


def test_a_process_that_is_gone_is_left_out(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert take(process.pid, tmp_path) == []


def test_a_tool_that_fails_says_why_and_the_process_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(stacks, "find_tool", lambda: str(tool))
    with program(tmp_path) as process:
        (found,) = take(process.pid, tmp_path)
    assert found.how == "faulthandler"
    assert "Permission Denied" in found.why
    assert "deepest" in functions(found)


def test_a_tool_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks, "find_tool", lambda: str(tool))
    monkeypatch.setattr(stacks, "TAKE_S", 0.3)
    with program(tmp_path) as process:
        (found,) = take(process.pid, tmp_path)
    assert found.how == "faulthandler"
    assert "longer than" in found.why


def test_a_deep_recursion_is_cut_in_the_middle(tmp_path: Path, how: str) -> None:
    deep = "def down(n):\n    return down(n - 1) if n else deepest()\n"
    code = (
        textwrap.dedent(WAITER)
        .format(before=f"from keepstep.agent import stackdump; stackdump.answer({str(tmp_path)!r})\n{deep}")
        .replace("\ndeepest()\n", "\ndown(70)\n")
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (found,) = take(process.pid, tmp_path)
        process.kill()
    main = found.main
    assert main is not None
    assert len(main.frames) == MAX_FRAMES
    assert main.frames[0].function == "deepest"
    assert main.frames[-1].function == "<module>"
    assert main.cut > 0


def test_a_dump_that_is_no_dump_is_no_stack() -> None:
    assert stackdump.parse("") == ()
    assert stackdump.parse("\0\1 garbage\n  File nonsense\n") == ()
