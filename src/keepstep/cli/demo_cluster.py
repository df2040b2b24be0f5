"""A whole cluster on one machine: one ``keepstep run`` per node, each with a memory directory of its own.

Everything here is what a person could do by hand with a shell: start launchers, look up process ids, send signals.
Each process of a node, however it was started, still carries the node's ``KEEPSTEP_RUNTIME_DIR`` in the environment
it was executed with; that is how the processes of one node, and leftovers, are found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep.cli.client import Api
from keepstep.cli.demo_proc import free_port, holds_socket, is_alive, listening_inode, memory_root, send, words_of
from keepstep.cli.demo_watch import Beat, Watch, read_beat
from keepstep.cli.dirs import node_dir
from keepstep.model import env

POLL_S = 0.02
STOP_GRACE_S = 15.0
"""After SIGTERM to a launcher, how long it may take to leave before everything of its node is killed."""


class Node(msgspec.Struct, kw_only=True):
    """One pretended machine."""

    name: str
    runtime_dir: Path
    output: Path
    launcher: subprocess.Popen[bytes]
    lost: bool = False


def end_on_sigterm() -> None:
    """Turn SIGTERM into an ordinary end of this program, so that its clusters are taken down and not left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Cluster:
    """Starts the nodes of one job and can hurt them in every way that the demo and the tests know.

    Args:
        home: directory for state and output; made when missing. Memory directories are made beside ``/dev/shm``.
        flags: further flags of ``keepstep run``, before the script.
    """

    def __init__(
        self,
        home: Path,
        *,
        job: str,
        script: Path,
        args: Sequence[str] = (),
        nodes: int = 4,
        standby_nodes: int = 0,
        nproc: int = 1,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.job, self.script, self.args = job, script, tuple(args)
        self.count, self.standby_nodes, self.nproc = nodes, standby_nodes, nproc
        self.flags = tuple(flags)
        self.home = home
        self.run_dir = home / "state" / "runs" / job
        self.watch = Watch(self.run_dir)
        self.nodes: dict[str, Node] = {}
        self.memory = memory_root()
        self._environ = dict(os.environ if environ is None else environ)
        self._port = free_port()

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        for index in range(self.count):
            self.add_node(f"node-{index}", node_rank=index if self.count > 1 else None)
        for index in range(self.standby_nodes):
            self.add_node(f"spare-{index}", standby=True)

    def add_node(self, name: str, *, node_rank: int | None = None, standby: bool = False) -> Node:
        """Start one node's launcher. Its own output goes to a file; the workers' files are in the run directory."""
        runtime = self.memory / name
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = self.home / f"{name}.txt"
        environ = self._environ | {
            env.RUNTIME_DIR: str(runtime),
            env.STATE_DIR: str(self.home / "state"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with output.open("ab") as file:
            launcher = subprocess.Popen(
                self.command(name, node_rank=node_rank, standby=standby),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        node = Node(name=name, runtime_dir=runtime, output=output, launcher=launcher)
        self.nodes[name] = node
        return node

    def command(self, name: str, *, node_rank: int | None, standby: bool) -> list[str]:
        words = [sys.executable, "-m", "keepstep.cli.main", "run", "--job", self.job, "--node-name", name]
        words += ["--nproc-per-node", str(self.nproc)]
        if self.count + self.standby_nodes > 1:
            words += [
                "--nnodes",
                str(self.count),
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{self._port}",
            ]
            words += ["--rdzv-conf", "is_host=1" if node_rank == 0 else "is_host=0"]
            words += ["--standby-nodes", str(self.standby_nodes)]
        if node_rank is not None:
            words += ["--node-rank", str(node_rank)]
        if standby:
            words.append("--standby")
        return [*words, *self.flags, str(self.script), *self.args]

    def wait(self, limit_s: float, tick: Callable[[], None] = lambda: None) -> dict[str, int]:
        """Wait until every launcher that was not lost has left by itself, and return their exit codes.

        Raises:
            TimeoutError: some have not.
        """
        living = [n for n in self.nodes.values() if not n.lost]
        self.until(lambda: all(n.launcher.poll() is not None for n in living), limit_s, "the launchers to leave", tick)
        return {n.name: n.launcher.returncode for n in living}

    def until(
        self, done: Callable[[], bool], limit_s: float, what: str, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Watch the job until ``done()``.

        Raises:
            TimeoutError: naming ``what`` was waited for.
        """
        deadline = time.monotonic() + limit_s
        while True:
            self.watch.poll()
            tick()
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {limit_s:.0f} s for {what}: job {self.job} is {self.watch.state}\n{self.tail()}"
                )
            time.sleep(POLL_S)

    def close(self) -> list[str]:
        """End whatever is left and remove memory directories.

        Returns:
            What should not have been there: processes that outlived their launchers.
        """
        running = [n for n in self.nodes.values() if n.launcher.poll() is None]
        for node in running:
            node.launcher.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for node in running:
            try:
                node.launcher.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.launcher.kill()
                node.launcher.wait()
        orphans = self.orphans()
        for pid, _ in self.processes():
            send(pid, signal.SIGKILL)
        self.watch.poll()
        self.watch.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        return orphans

    def orphans(self, patience_s: float = 3.0) -> list[str]:
        """Processes that are still there although every launcher has left; a moment's patience for the last signals."""
        deadline = time.monotonic() + patience_s
        while found := [f"{pid} {words_of(pid)}" for pid, _ in self.processes()]:
            if time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)
        return []

    # ------------------------------------------------------------ looking

    def processes(self, node: str | None = None) -> Iterator[tuple[int, str]]:
        """(pid, node) of every living process of the cluster, or of one node."""
        marker = f"{env.RUNTIME_DIR}={self.memory}/".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if marker not in environ or not is_alive(int(entry.name)):
                continue
            found = environ.partition(marker)[2].partition(b"\0")[0].decode()
            if node is None or found == node:
                yield int(entry.name), found

    def node_dir(self, node: str) -> Path:
        return node_dir(self.memory / node, self.job, node)

    def beats(self) -> dict[int, Beat]:
        """Heartbeat of each rank of the newest roster."""
        roster = self.watch.roster
        if roster is None:
            return {}
        found = {m.rank: read_beat(self.node_dir(m.node), m.slot) for m in roster.members}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def steps(self) -> dict[int, int]:
        """Committed steps of each rank."""
        return {rank: beat.step for rank, beat in self.beats().items()}

    def floor(self) -> int:
        """Steps that every rank has committed; 0 while one of them is away."""
        steps = self.steps()
        world = self.watch.roster.world_size if self.watch.roster else 0
        return min(steps.values()) if world and len(steps) == world else 0

    def node_of(self, rank: int) -> str:
        seat = self.watch.roster.seat_of(rank) if self.watch.roster else None
        if seat is None:
            raise LookupError(f"rank {rank} has no seat in job {self.job}")
        return seat.node

    def pid_of(self, rank: int) -> int:
        beat = self.beats().get(rank)
        if beat is None or beat.pid <= 0:
            raise LookupError(f"rank {rank} of job {self.job} has no process yet")
        return beat.pid

    def slots(self, node: str) -> list[dict[str, Any]]:
        """The agent's own list of its processes: role, pid, rank."""
        try:
            found: dict[str, dict[str, Any]] = json.loads((self.node_dir(node) / "slots.json").read_bytes())["slots"]
        except (OSError, ValueError, KeyError):
            return []
        return list(found.values())

    def tail(self, lines: int = 12) -> str:
        """The last lines of every node's output, for error messages."""
        out = []
        for node in self.nodes.values():
            text = node.output.read_text(errors="replace").splitlines()[-lines:] if node.output.exists() else []
            out += [f"--- {node.name} (exit {node.launcher.poll()})", *text]
        return "\n".join(out)

    def exit_report(self) -> dict[str, object]:
        """``exit.json`` of the job, empty when it was not written."""
        try:
            report: dict[str, object] = json.loads((self.run_dir / "exit.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return report

    # ------------------------------------------------------------ hurting

    def kill_rank(self, rank: int) -> str:
        pid = self.pid_of(rank)
        send(pid, signal.SIGKILL)
        return f"kill -9 {pid} (rank {rank} on {self.node_of(rank)})"

    def freeze_rank(self, rank: int) -> str:
        pid = self.pid_of(rank)
        send(pid, signal.SIGSTOP)
        return f"kill -STOP {pid} (rank {rank} on {self.node_of(rank)})"

    def lose_node(self, name: str) -> str:
        """As a power cut would: every process of the node at once, and its memory."""
        node = self.nodes[name]
        node.lost = True
        pids = [pid for pid, _ in self.processes(name)]
        for pid in pids:  # nobody may see another one die and act on it
            send(pid, signal.SIGSTOP)
        for pid in pids:
            send(pid, signal.SIGKILL)
        node.launcher.wait()
        shutil.rmtree(node.runtime_dir, ignore_errors=True)
        return f"all {len(pids)} processes of {name} killed, its memory wiped"

    def kill_role(self, node: str, role: str) -> str:
        """Kill one of the node's own processes: ``agent``, ``shim``, ``keeper`` or ``store``.

        Raises:
            LookupError: there is none at this moment.
        """
        pid = self.role_pid(node, role)
        if pid is None:
            raise LookupError(f"node {node} has no {role} at this moment")
        send(pid, signal.SIGKILL)
        return f"kill -9 {pid} ({role} on {node})"

    def role_pid(self, node: str, role: str) -> int | None:
        if role in ("keeper", "store"):
            pids = [slot["pid"] for slot in self.slots(node) if slot["role"] == role]
            return next((pid for pid in pids if pid and is_alive(pid)), None)
        module = {"agent": "keepstep.agent.main", "shim": "keepstep.agent.shim"}[role]
        return next((pid for pid, _ in self.processes(node) if module in words_of(pid).split()), None)

    def kill_controller(self) -> str:
        pid = self.controller_pid()
        send(pid, signal.SIGKILL)
        return f"kill -9 {pid} (controller)"

    def controller_pid(self) -> int:
        """From ``controller.json``.

        Raises:
            LookupError: there is none.
        """
        try:
            return int(json.loads((self.run_dir / "controller.json").read_bytes())["pid"])
        except (OSError, ValueError, KeyError) as error:
            raise LookupError(f"no controller.json in {self.run_dir}: {error}") from error

    def pause_rank(self, rank: int, seconds: float) -> str:
        """Let a rank sleep inside its next step; the job must have been started with ``--allow-inject``."""
        address = json.loads((self.run_dir / "controller.json").read_bytes())
        body = {"fault": "slow", "rank": rank, "seconds": seconds, "by": "rehearsal"}
        api = Api(address["host"], int(address["http_port"]), token_file=address.get("token_file") or "")
        api.post("jobs", self.job, "inject", body=body)
        return f"rank {rank} sleeps for {seconds:g} s"

    def kill_store(self) -> str:
        """Kill the process that serves the rendezvous store of the newest roster.

        Raises:
            LookupError: nobody listens on its port (any more).
        """
        assert self.watch.roster is not None
        port = self.watch.roster.store_port
        inode = listening_inode(port)
        for pid, node in self.processes():
            if inode is not None and holds_socket(pid, inode):
                send(pid, signal.SIGKILL)
                return f"kill -9 {pid} (rendezvous store on {node})"
        raise LookupError(f"no process of {self.job} listens on port {port}")
