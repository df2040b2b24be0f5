"""The whole door with real controllers and agents: a job is started, looked at, ended, killed; and nothing is left.

The scripts are level 0 (they never call ``keepstep.init``), as a newcomer's are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 100.0
"""For one start or end on a busy machine; a quiet one takes a few seconds."""
FAILS = """
import os, sys
print("hello from", os.environ["RANK"])
if os.environ["RANK"] == "1":
    print("no data for you", file=sys.stderr)
    sys.exit(7)
import time
time.sleep(600)
"""
LOOPS = """
import os, time, pathlib, sys
pathlib.Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(str(os.getpid()))
while not pathlib.Path(sys.argv[1], "finish").exists():
    time.sleep(0.02)
print("done", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"])
"""


class Machine:
    """A state directory, a memory directory, and the processes that know them."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
        self.state, self.memory = self.root / "state", self.root / "mem"
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("KEEPSTEP_", "PET_"))},
            "KEEPSTEP_STATE_DIR": str(self.state),
            "KEEPSTEP_RUNTIME_DIR": str(self.memory),
            "OMP_NUM_THREADS": "1",
        }
        (self.root / "fails.py").write_text(FAILS)
        (self.root / "loops.py").write_text(LOOPS)

    def command(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "keepstep.cli.main", *words],
            env=self.environ | more,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def answer(self, *words: str) -> dict[str, Any]:
        done = self.command(*words, "-o", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "keepstep.cli.main", "run", *words],
            env=self.environ,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """Living processes that were started for this machine, by the environment they were executed with."""
        marker = f"KEEPSTEP_RUNTIME_DIR={self.memory}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    if not dead and marker in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, module: str) -> int:
        return next(pid for pid, words in self.processes().items() if module in words)

    def nobody_left(self) -> None:
        until(lambda: not self.processes(), "nobody left", lambda: str(self.processes()))
        assert not list(self.memory.glob("*/*"))

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)


def until(done: Callable[[], bool], what: str, found: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for: {what}; {found()}"
        time.sleep(0.02)


@pytest.fixture
def machine() -> Iterator[Machine]:
    one = Machine()
    yield one
    one.close()


@pytest.fixture(scope="module")
def failed() -> Iterator[tuple[Machine, subprocess.CompletedProcess[str]]]:
    """A job of two ranks, one of which leaves with code 7; without restarts."""
    one = Machine()
    done = one.command("run", "--nproc-per-node", "2", "--max-restarts", "0", "--job", "sad", "fails.py")
    yield one, done
    one.close()


Failed = tuple[Machine, "subprocess.CompletedProcess[str]"]


class TestAfterTheJob:
    """Exit code, files, and every command that reads a log without a controller."""

    def test_the_scripts_exit_code_is_passed_through(self, failed: Failed) -> None:
        """Code 7 of rank 1 is the launcher's code and exit.json's, with the rank as culprit and the user as cause."""
        machine, done = failed
        assert done.returncode == 7, done.stderr
        said = json.loads((machine.state / "runs/sad/exit.json").read_bytes())
        assert (said["code"], said["category"], said["culprit"]["rank"]) == (7, "user_code", 1)

    def test_nothing_is_left_but_the_run_directory(self, failed: Failed) -> None:
        """No process, no memory; ``latest`` names the run."""
        machine, _ = failed
        machine.nobody_left()
        assert (machine.state / "runs/latest").resolve().name == "sad"

    def test_output_is_prefixed_data_and_the_rest_is_on_stderr(self, failed: Failed) -> None:
        """The ranks' stdout is on stdout; what is watched, what is not, and the next command are on stderr."""
        _, done = failed
        assert "hello from 0" in done.stdout
        assert "r001 no data for you" in done.stderr
        assert "NOT watched" in done.stderr
        assert "keepstep status" in done.stderr

    def test_the_last_lines_say_why(self, failed: Failed) -> None:
        """Whoever only has the terminal reads the code, the reason and the next command, after all output."""
        _, done = failed
        last, way_on = done.stderr.splitlines()[-2:]
        assert last.startswith("keepstep: sad ended with exit code 7: ")
        assert "rank 1" in last
        assert "`keepstep incident sad-i1`" in way_on

    def test_json_answers_carry_their_schema(self, failed: Failed) -> None:
        """Every reading command, offline, in JSON: schema, and the values that matter."""
        machine, _ = failed
        assert machine.answer("status")["schema"] == "keepstep.v1/Status"
        (row,) = machine.answer("jobs")["jobs"]
        assert (row["job"], row["state"], row["exit_code"], row["live"]) == ("sad", "FAILED", 7, False)
        job = machine.answer("job", "sa")
        assert job["schema"] == "keepstep.v1/Job"
        assert [(rank["rank"], rank["pid"]) for rank in job["ranks"]] == [(0, None), (1, None)]
        (incident,) = machine.answer("incidents")["incidents"]
        assert (incident["id"], incident["category"], incident["ranks"]) == ("sad-i1", "user_code", "1")
        full = machine.answer("incident", "i1")
        assert full["schema"] == "keepstep.v1/Incident"
        assert {"IncidentOpened", "SuspectNamed", "PlanMade"} <= {event["type"] for event in full["events"]}

    def test_tables_are_tab_separated_without_a_terminal(self, failed: Failed) -> None:
        """Stable columns, no colour, no hint in the data."""
        machine, _ = failed
        lines = machine.command("incidents").stdout.splitlines()
        assert lines[0].split("\t")[:3] == ["ID", "STATE", "CATEGORY"]
        assert lines[1].split("\t")[0] == "sad-i1"

    def test_an_incident_reads_like_a_compilers_error(self, failed: Failed) -> None:
        """The block names the culprit and the next command; the timeline starts with the evidence."""
        machine, _ = failed
        block = machine.command("incident", "sad-i1").stdout
        assert block.startswith("error[sad-i1]: ")
        assert "culprit: user_code" in block
        assert "exit code 7" in machine.command("incident", "1", "--timeline").stdout

    def test_logs_and_the_first_error(self, failed: Failed) -> None:
        """Ranks' output is merged; --first-error shows rank 1's last words and not rank 0, which we ended."""
        machine, _ = failed
        logs = machine.command("logs").stdout
        assert ":r0 hello from 0" in logs
        assert ":r1 no data for you" in logs
        assert ":r0" not in machine.command("logs", "--rank", "1").stdout
        first = machine.command("logs", "--first-error").stdout
        assert ":r1 exit code 7" in first
        assert "no data for you" in first

    def test_what_needs_a_controller_says_so(self, failed: Failed) -> None:
        """Orders to a job that is over are refused with a way out."""
        machine, _ = failed
        done = machine.command("stop", "sad", "--yes")
        assert done.returncode == 1
        assert "nothing can be ordered" in done.stderr


@pytest.mark.acceptance
class TestWhileItRuns:
    """Signals and deaths in a running job."""

    def running(self, machine: Machine, *flags: str, ranks: Sequence[int] = (0,)) -> subprocess.Popen[str]:
        launcher = machine.start("--job", "job", *flags, "loops.py", str(machine.root))
        self.await_ranks(machine, ranks)
        return launcher

    @staticmethod
    def await_ranks(machine: Machine, ranks: Sequence[int]) -> None:
        until(lambda: all((machine.root / f"rank{rank}").exists() for rank in ranks), "the ranks to run")

    def test_agent_and_controller_are_replaced_and_the_rank_goes_on(self, machine: Machine) -> None:
        """kill -9 of agent and controller costs the rank nothing: same process, and its end is the job's end."""
        launcher = self.running(machine)
        rank = int((machine.root / "rank0").read_text())
        assert machine.answer("status")["live"] is True
        assert [row["pid"] for row in machine.answer("job")["ranks"]] == [rank]
        agent, controller = machine.pid_of("keepstep.agent.main"), machine.pid_of("keepstep.controlplane.main")
        os.kill(agent, signal.SIGKILL)
        os.kill(controller, signal.SIGKILL)
        until(lambda: self.new_controller(machine) != controller, "a new controller")
        until(lambda: any("agent.main" in words for words in machine.processes().values()), "a new agent")
        (machine.root / "finish").touch()
        out, err = launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode == 0, err
        assert int((machine.root / "rank0").read_text()) == rank
        assert "done 0 1 0" in out
        assert err.count("starting it again") == 2
        machine.nobody_left()

    @staticmethod
    def new_controller(machine: Machine) -> int:
        return int(json.loads((machine.state / "runs/job/controller.json").read_bytes())["pid"])

    def test_strangers_on_this_machine_are_kept_out(self, machine: Machine) -> None:
        """Every user can reach loopback; the job's own token, which nobody has to name, tells them apart."""
        self.running(machine)
        run_dir = machine.state / "runs/job"
        assert (run_dir / "token").stat().st_mode & 0o777 == 0o600
        port = json.loads((run_dir / "controller.json").read_bytes())["http_port"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=LIMIT_S)
        assert machine.command("status", "job").returncode == 0
        assert machine.command("stop", "job", "--yes").returncode == 0
        machine.nobody_left()

    def test_sigterm_ends_the_job_in_good_order(self, machine: Machine) -> None:
        """A scheduler's SIGTERM: 143, exit.json, nobody left."""
        launcher = self.running(machine)
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode == 143, err
        assert "stopping job" in err
        assert (machine.state / "runs/job/exit.json").exists()
        machine.nobody_left()

    def test_kill_9_of_the_launcher_leaves_nobody(self, machine: Machine) -> None:
        """The agent and the controller see its end; ranks, store, keeper and memory go with them."""
        launcher = self.running(machine)
        launcher.kill()
        launcher.wait()
        machine.nobody_left()

    def test_two_nodes_meet_and_leave_together(self, machine: Machine) -> None:
        """The first node hosts, the second waits for it although it was started earlier; both leave with 0."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--standbys", "0"]
        second = machine.start(*flags, "--node-rank", "1", "--job", "job", "loops.py", str(machine.root))
        first = self.running(machine, *flags, "--node-rank", "0", ranks=(0, 1))
        (machine.root / "finish").touch()
        said = [launcher.communicate(timeout=LIMIT_S) for launcher in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], said
        assert "done 0 2 0" in said[0][0]
        assert "done 1 2 1" in said[1][0]
        assert "hosted elsewhere" in said[1][1]
        machine.nobody_left()


class TestRefused:
    """Bad input: one paragraph, the right exit code, nothing left behind."""

    def refused(self, machine: Machine, code: int, words: str, *argv: str, **environ: str) -> None:
        done = machine.command("run", *argv, **environ)
        assert done.returncode == code, done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert not machine.state.exists() or not list((machine.state / "runs").glob("[!.]*"))
        assert not machine.memory.exists()
        assert not machine.processes()

    @pytest.mark.parametrize(
        ("code", "words", "argv"),
        [
            (64, "did you mean --nproc-per-node", ["--nprocs", "2", "fails.py"]),
            (64, "no training script given", []),
            (66, "does not exist", ["missing.py"]),
            (66, "is a directory", ["."]),
            (66, "module nosuchmodule", ["-m", "nosuchmodule.train"]),
            (66, "not found or not executable", ["--no-python", "./fails.py"]),
            (66, "larger than --nnodes", ["--standby-nodes", "3", "fails.py"]),
            (66, "CUDA is not available", ["--nproc-per-node", "gpu", "fails.py"]),
            (66, "no token", ["--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:29400", "fails.py"]),
            (66, "cannot be resolved", ["--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:1", "fails.py"]),
            (66, "token file", ["--token-file", "/nowhere", "fails.py"]),
            (
                66,
                "no controller answered",
                ["--controller", "127.0.0.1:9", "--rdzv-conf", "join_timeout=0.5", "fails.py"],
            ),
        ],
    )
    def test_bad_input(self, machine: Machine, code: int, words: str, argv: list[str]) -> None:
        """Each mistake is named with its value, before anything is started or written."""
        self.refused(machine, code, words, *argv)

    def test_a_port_in_use(self, machine: Machine) -> None:
        """Somebody else listens at the endpoint: 66, and the half-made job is gone."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            self.refused(
                machine, 66, "in use by another program", "--nnodes", "2", "--master-port", str(port), "fails.py"
            )

    def test_directories_that_cannot_be(self, machine: Machine) -> None:
        """A runtime directory whose sockets would be too long; a state and a log directory below a file."""
        self.refused(machine, 66, "too long", "fails.py", KEEPSTEP_RUNTIME_DIR=f"/tmp/{'x' * 100}")
        self.refused(machine, 66, "cannot be made", "--state-dir", str(machine.root / "fails.py/state"), "fails.py")
        self.refused(machine, 66, "--log-dir", "--log-dir", str(machine.root / "fails.py/logs"), "fails.py")

    def test_no_space(self, machine: Machine) -> None:
        """A full memory-backed directory is refused with the number of free bytes."""
        done = machine.command("run", "fails.py", KEEPSTEP_RUNTIME_DIR="/proc/keepstep")
        assert done.returncode == 66
        assert "runtime directory" in done.stderr

    def test_a_token_others_can_read(self, machine: Machine) -> None:
        """`token new` makes 0600 and never overwrites; a wider mode is refused."""
        secret = machine.root / "token"
        assert machine.command("token", "new", str(secret)).returncode == 0
        assert secret.stat().st_mode & 0o777 == 0o600
        assert machine.command("token", "new", str(secret)).returncode == 66
        secret.chmod(0o644)
        self.refused(machine, 66, "can be read by others", "--token-file", str(secret), "fails.py")
