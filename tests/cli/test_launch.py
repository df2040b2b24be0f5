"""The launcher and its processes: restarts, signals, exit codes, and nobody left behind.

Real processes and signals. The agent is a stand-in script here, so that each kind of death can be arranged exactly; the
whole door with real agents is tested in ``test_run``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from keepstep.cli.children import RESTARTS, Budget
from keepstep.cli.net import own_address_towards, resolve, who_listens

DRIVER = """
import signal, sys
from pathlib import Path
from keepstep.agent import proc
from keepstep.cli import launch
from keepstep.cli.children import Signals
from keepstep.cli.flags import parse
from keepstep.cli.home import Home
from keepstep.cli.plan import make_plan
from keepstep.cli.preflight import Checked
home_dir, agent = Path(sys.argv[1]), sys.argv[2]
launch.LEAVE_S, launch.STOP_GRACE_S = 0.5, float(sys.argv[3])
plan = make_plan(parse(["t.py"], {}))
checked = Checked(nproc=1, address="127.0.0.1", local=True, own="127.0.0.1", root=home_dir, remarks=())
home = Home("job", home_dir, checked)
home.agent_argv = [sys.executable, "-c", agent, str(home_dir)]
proc.become_subreaper()
with Signals(plan.signals) as signals:
    try:
        code = launch.Watch(plan, home, signals).until_the_end()
    finally:
        launch.leave(home, signals)
sys.exit(code)
"""

AGENT = """
import os, pathlib, signal, subprocess, sys, time
home = pathlib.Path(sys.argv[1])
def count(name):
    with (home / name).open("a") as f: f.write(f"{os.getpid()}\\n")
    return len((home / name).read_text().splitlines())
def say(name): (home / name).write_text(str(os.getpid()))
def sleeper():  # in a session of its own, as the shim's workers are
    code = "import signal,time\\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\\ntime.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL)
"""


class Launched:
    """A launcher in a process of its own, with everything that descends from it."""

    def __init__(self, home: Path, agent: str, grace_s: float) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(home), AGENT + agent, str(grace_s)],
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def pid_in(self, name: str) -> int:
        until(lambda: (self.home / name).exists() and (self.home / name).read_text().strip() != "")
        return int((self.home / name).read_text().split()[-1])

    def end(self, timeout_s: float = 20.0) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, err.decode()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start launchers; whatever they leave behind is killed at the end."""
    made: list[Launched] = []

    def start(agent: str, grace_s: float = 30.0) -> Launched:
        made.append(Launched(tmp_path, agent, grace_s))
        return made[-1]

    yield start
    for one in made:
        for process in [*_below(one.process.pid), one.process.pid]:
            kill(process)
        for name in tmp_path.glob("*pid*"):
            for word in name.read_text().split():
                kill(int(word))
        one.process.wait()


def _below(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(done: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Poll a condition with a deadline."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_the_agents_exit_code_is_the_launchers(launched: Callable[..., Launched]) -> None:
    """Whatever code the agent gives is passed through."""
    assert launched("sys.exit(37)").end()[0] == 37


def test_a_killed_agent_is_started_again(launched: Callable[..., Launched]) -> None:
    """SIGKILL of the agent twice costs two restarts, and the third one's code is the job's."""
    run = launched("if count('pids') < 3: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(5)")
    code, said = run.end()
    assert code == 5
    assert said.count("the agent ended with SIGKILL; starting it again") == 2


def test_a_crash_is_told_from_a_passed_through_code(launched: Callable[..., Launched]) -> None:
    """Exit code 1 with exit.json is the script's; without it the agent itself has crashed and starts again."""
    run = launched(
        "if count('pids') < 2: raise RuntimeError('bug')\n(home / 'exit.json').write_text('{}')\nsys.exit(1)"
    )
    code, said = run.end()
    assert code == 1
    assert said.count("starting it again") == 1


def test_the_budget_is_finite_and_refills() -> None:
    """The first restart is at once, the last one within two minutes, and a long life fills the budget again."""
    budget = Budget()
    delays = [budget.delay(0.0) for _ in range(RESTARTS + 1)]
    assert delays[0] == 0.0
    assert delays[-1] is None
    assert sum(delay or 0 for delay in delays) < 120
    assert budget.delay(3600.0) == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on_once(launched: Callable[..., Launched], number: signal.Signals) -> None:
    """SIGINT stays SIGINT, the others become SIGTERM; the agent's own exit code is returned."""
    run = launched(
        "signal.signal(15, lambda *_: sys.exit(21)); signal.signal(2, lambda *_: sys.exit(22))\n"
        "say('pid')\ntime.sleep(600)"
    )
    run.pid_in("pid")
    run.process.send_signal(number)
    code, said = run.end()
    assert code == (22 if number == signal.SIGINT else 21)
    assert f"{number.name}: stopping job" in said


def test_an_agent_killed_while_stopping_is_not_started_again(launched: Callable[..., Launched]) -> None:
    """After SIGTERM nobody is started; the code is 128 plus the signal."""
    run = launched("signal.signal(15, lambda *_: os.kill(os.getpid(), 9)); say('pid')\ntime.sleep(600)")
    run.pid_in("pid")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 128 + signal.SIGTERM


def test_the_second_ctrl_c_kills_everything(launched: Callable[..., Launched]) -> None:
    """An agent and a worker that ignore all signals are gone, with exit code 130 and an exit.json."""
    run = launched(
        "signal.signal(2, lambda *_: say('asked'))\n(home / 'worker.pid').write_text(str(sleeper().pid)); say('pid')\n"
        "while True: time.sleep(600)"
    )
    agent, worker = run.pid_in("pid"), run.pid_in("worker.pid")
    run.process.send_signal(signal.SIGINT)
    run.pid_in("asked")
    time.sleep(0.35)  # two that come closer together are one: terminal and wrapper both pass ctrl-C on
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end()
    assert code == 130
    assert not alive(agent)
    assert not alive(worker)
    assert '"code":130' in (run.home / "exit.json").read_text()


def test_an_agent_that_will_not_stop_is_killed_in_the_end(launched: Callable[..., Launched]) -> None:
    """After the grace everything is killed, although the agent ignores SIGTERM."""
    run = launched("signal.signal(15, signal.SIG_IGN); say('pid')\nwhile True: time.sleep(600)", grace_s=0.5)
    agent = run.pid_in("pid")
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert code == 143
    assert "has not stopped within" in said
    assert not alive(agent)


def test_orphans_are_found_and_killed_at_the_end(launched: Callable[..., Launched]) -> None:
    """A process in a session of its own whose parent has left is still the launcher's, and does not outlive it."""
    run = launched("(home / 'worker.pid').write_text(str(sleeper().pid))\nsys.exit(0)")
    worker = run.pid_in("worker.pid")
    code, said = run.end()
    assert code == 0
    assert not alive(worker)
    assert "1 processes had not left" in said


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """Under nohup a closed terminal does not stop training (torchrun takes SIGHUP all the same)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = Launched(tmp_path, "signal.signal(15, lambda *_: sys.exit(21)); say('pid')\ntime.sleep(600)", 30.0)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        run.pid_in("pid")
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        code, said = run.end()
        assert code == 21
        assert "SIGHUP" not in said
    finally:
        for pid in [*_below(run.process.pid), run.process.pid]:
            kill(pid)


class TestProbe:
    """Who listens at an endpoint."""

    def test_nobody_and_strangers(self) -> None:
        """A free port is nobody, an echo server is somebody else; neither is taken for a controller."""
        import socket
        import threading

        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
            assert who_listens("127.0.0.1", port) == "nobody"
            server.listen()

            def echo() -> None:
                line, _ = server.accept()
                with line:
                    line.sendall(line.recv(100))

            thread = threading.Thread(target=echo)
            thread.start()
            assert who_listens("127.0.0.1", port) == "other"
            thread.join()

    def test_addresses(self) -> None:
        """The address others reach us under, and names."""
        assert own_address_towards("127.0.0.1", 1) == "127.0.0.1"
        assert resolve("localhost", 1) == "127.0.0.1"
