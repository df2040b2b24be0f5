"""A program started by the fork server cannot tell that from ``python script args``."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_client import ShimClient

PROBE = """
import atexit, json, os, sys, signal
atexit.register(lambda: print("atexit ran"))
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "spec": str(__spec__),
    "package": __package__, "main": main.__file__, "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "value": os.environ.get("PROBE_VALUE"), "fds": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
    "session": os.getsid(0) == os.getpid(), "vars": sorted(k for k in globals() if not k.startswith("__")),
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "sigpipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
}))
"""


NOWHERE = {"args": [], "env": {}, "cwd": "/", "out": "/dev/null", "err": "/dev/null"}


@pytest.fixture(scope="module")
def shim() -> Iterator[ShimClient]:
    """One shim for all: each program is a fork of its own anyway."""
    with tempfile.TemporaryDirectory(prefix="ks", dir="/dev/shm") as folder:
        client = ShimClient(Path(folder))
        yield client
        client.close()


def script(folder: Path, text: str, name: str = "prog.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_script_sees_what_python_shows_it(shim: ShimClient, tmp_path: Path) -> None:
    """argv, path, __main__, stdin, signals, descriptors and atexit are those of a fresh interpreter."""
    path = script(tmp_path, PROBE)
    env = {"PROBE_VALUE": "x y"}
    code, out, err = shim.run("a", path, "--lr", "0.1", env=env, cwd=tmp_path)
    plain = subprocess.run(
        [sys.executable, path, "--lr", "0.1"],
        env={**os.environ, **env},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=True,
    )
    assert (code, err) == (0, "")
    mine, real = out.splitlines(), plain.stdout.splitlines()
    assert json.loads(mine[0]) == json.loads(real[0])
    assert mine[1:] == real[1:] == ["atexit ran"]


def test_module_form_is_python_dash_m(shim: ShimClient, tmp_path: Path) -> None:
    """``-m package.module`` resolves from the working directory and sets argv[0] to the module's file."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "prog.py").write_text("import sys; print(sys.argv, __name__, __package__, sys.path[0])")
    code, out, _ = shim.run("m", "pack.prog", "1", kind="module", cwd=tmp_path)
    plain = subprocess.run(
        [sys.executable, "-m", "pack.prog", "1"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (code, out) == (0, plain.stdout)


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()", 0, ""),
    ],
)
def test_exit_codes_are_pythons(shim: ShimClient, tmp_path: Path, text: str, code: int, stderr: str) -> None:
    """SystemExit in all its forms, _exit, a signal, and a thread that is still running."""
    got, out, err = shim.run(f"e{abs(hash(text))}", script(tmp_path, text))
    assert (got, err) == (code, stderr)
    if "late" in text:
        assert out == "late\n", "non-daemon threads are joined before the end"


def test_uncaught_exception_prints_only_the_users_frames(shim: ShimClient, tmp_path: Path) -> None:
    """The traceback is the one Python prints, exit code 1, and the exception is left as data for the agent."""
    path = script(tmp_path, "def f():\n    raise ValueError('bad batch')\n\nf()\n")
    code, _, err = shim.run("x", path)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert (code, err) == (1, plain.stderr)
    left = json.loads((shim.dir / "x.json").read_text())
    assert (left["type"], left["message"], left["line"], left["function"]) == ("ValueError", "bad batch", 2, "f")
    assert left["file"] == path
    assert left["consequence"] is False


def test_syntax_error_names_the_line(shim: ShimClient, tmp_path: Path) -> None:
    """A script that cannot be compiled fails as under Python, without our frames."""
    path = script(tmp_path, "x = (\n")
    code, _, err = shim.run("s", path)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert code == 1
    assert err.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert "keepstep" not in err.replace(str(Path(__file__).parents[2]), "")


def test_broken_collective_is_marked_as_consequence(shim: ShimClient, tmp_path: Path) -> None:
    """At level 0 nobody else can tell a victim from a culprit."""
    text = "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234')"
    assert shim.run("v", script(tmp_path, text))[0] == 1
    assert json.loads((shim.dir / "v.json").read_text())["consequence"] is True


def test_executables_start_before_and_without_any_fork(shim: ShimClient, tmp_path: Path) -> None:
    """``--no-python``: any executable; one that does not exist is refused with its name."""
    assert shim.run("b", "/bin/sh", "-c", "echo $0 $V; exit 3", kind="executable", start="spawn", env={"V": "5"}) == (
        3,
        "/bin/sh 5\n",
        "",
    )
    shim.send(op="spawn", id="n", start="spawn", kind="executable", target="/no/such", **NOWHERE)
    assert "/no/such" in shim.wait("refused", id="n")["why"]


def test_spawn_is_a_new_unbuffered_interpreter(shim: ShimClient, tmp_path: Path) -> None:
    """``--start spawn``: what torchrun does, ``python -u script``."""
    path = script(tmp_path, "import sys; print(sys.argv[1:], sys.stdout.write_through); sys.exit(4)")
    assert shim.run("p", path, "z", start="spawn") == (4, "['z'] True\n", "")


def test_random_state_differs_between_forks(shim: ShimClient, tmp_path: Path) -> None:
    """Two forks of one warm process do not draw the same numbers."""
    path = script(tmp_path, "import random; print(random.random())")
    assert shim.run("r1", path)[1] != shim.run("r2", path)[1]


def test_a_dead_programs_children_go_with_it(shim: ShimClient, tmp_path: Path) -> None:
    """kill -9 of a rank leaves no data loader worker holding memory."""
    text = "import subprocess, time\nc = subprocess.Popen(['sleep', '60'])\nprint(c.pid, flush=True)\ntime.sleep(60)"
    pid = shim.spawn("k", script(tmp_path, text))
    out = shim.dir / "k.out"
    while not (out.exists() and out.read_text().endswith("\n")):
        os.sched_yield()
    child = int(out.read_text())
    os.kill(pid, 9)
    assert shim.wait("exit", id="k")["status"] == 9
    try:
        fd = os.pidfd_open(child)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 5)[0], "the child of a killed rank lives on"
    os.close(fd)
