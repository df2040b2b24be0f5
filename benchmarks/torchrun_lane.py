"""torchrun as the benchmarks drive it: launchers, the ranks' process ids, and the same ways to hurt them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_proc import free_port, send

MARK = "KEEPSTEP_BENCH_LANE"


class Torchrun:
    """One torchrun job of one or more nodes, all on this machine."""

    def __init__(
        self, home: Path, script: Path, words: Sequence[str], *, ranks: int, nodes: int, restarts: int
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.script = home, script
        self.progress = home / "progress"
        self.words = [*words, "--progress", str(self.progress)]
        self.nodes, self.per_node, self.restarts = nodes, ranks // nodes, restarts
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.progress.mkdir(parents=True, exist_ok=True)
        for index in range(self.nodes):
            self.add(f"n{index}", host=index == 0)

    def add(self, name: str, *, host: bool = False) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.per_node)]
        words += ["--nnodes", str(self.nodes), "--max-restarts", str(self.restarts), "--rdzv-backend", "c10d"]
        words += ["--rdzv-id", "bench", "--rdzv-endpoint", self.endpoint, "--rdzv-conf", f"is_host={int(host)}"]
        environ = clean_environment() | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            MARK: f"{self.home}/{name}",
        }
        with (self.home / f"{name}.txt").open("ab") as output:
            self.launchers[name] = subprocess.Popen(
                [*words, str(self.script), *self.words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def processes(self, name: str = "") -> dict[int, dict[str, str]]:
        """Environment of each living process of the job (or of one node), by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            environ = dict(pair.partition("=")[::2] for pair in pairs)
            if state != "Z" and environ.get(MARK, "").startswith(f"{self.home}/{name}"):
                found[int(entry.name)] = environ
        return found

    def hurt(self, fault: str, rank: int) -> None:
        ranks = {
            int(e["RANK"]): (pid, e[MARK].rpartition("/")[2]) for pid, e in self.processes().items() if "RANK" in e
        }
        pid, node = ranks[rank]
        if fault != "node":
            send(pid, signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
            return
        if node == "n0":  # the rendezvous lives there: its loss ends a torchrun job, which would be no comparison
            node = next(name for _, name in ranks.values() if name != "n0")
        for victim in self.processes(node):
            send(victim, signal.SIGKILL)
        self.launchers.pop(node).wait()
        self.add(f"m{len(self.launchers)}{os.urandom(2).hex()}")

    def tail(self) -> str:
        return "\n".join(f.read_text(errors="replace")[-1500:] for f in sorted(self.home.glob("*.txt")))

    def close(self) -> None:
        for pid in self.processes():
            send(pid, signal.SIGKILL)
        for launcher in self.launchers.values():
            launcher.wait()
