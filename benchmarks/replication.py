"""One rank's state from this node's memory into another's: keeper to keeper, and two libraries' own ways.

    python -m benchmarks.replication --size-mb 1024 --repeats 5 --json

``ours_gb_s`` is the rate from the rung bell until the acknowledgement of a sealed version stands in the trainer's file:
bytes sent, every chunk checked and the version adopted on the other side. ``ours_with_sealing_gb_s`` also makes the
checksums in that time. The lanes take turns, so that a slow minute of the machine touches all of them; ``ratio`` is
ours over the faster of ``pgtransport`` (as DCP's replication stager uses it) and ``nvrx``, by medians.
``pgtransport_in_place`` is the same transport into tensors that are there already. The libraries check nothing.
``nvrx`` moves the state in both directions at once and is counted for both; it is left out where
``nvidia_resiliency_ext`` is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.progress import until
from keepstep.checkpoint import pair
from keepstep.checkpoint.slot import HEADER, Description, Slot, Version
from keepstep.cli.demo_cluster import end_on_sigterm
from keepstep.model.env import KEEPER_PORT_FILE, KEEPER_SOCKET, SNAP_DIR

LIMIT_S = 120.0
POLL_S = 0.0002
LIBRARIES = ("pgtransport", "pgtransport_in_place", "nvrx")
WARM_UPS = 2
"""Both of the trainer's files and both on the other side have their pages then."""


class Keepers:
    """Two keepers on loopback, the first one's buddy is the second; and the trainer's files of rank 0."""

    def __init__(self, root: Path, size: int) -> None:
        self.root, self.size, self.step = root, size, 0
        self.processes: list[subprocess.Popen[bytes]] = []
        port = self._start("b")
        self.files = pair.Pair(root / "a" / SNAP_DIR, 0)
        noise = os.urandom(1 << 20)
        for slot in self.files.slots:
            slot.reserve(HEADER + size + (1 << 20))
            for at in range(HEADER, HEADER + size, len(noise)):
                slot.memory[at : at + len(noise)] = noise
        self._start("a", "--buddy", f"127.0.0.1:{port}")

    def _start(self, node: str, *more: str) -> int:
        home = self.root / node
        words = [sys.executable, "-m", "keepstep.checkpoint.keeper", "--host", "127.0.0.1", "--node-dir", str(home)]
        self.processes.append(subprocess.Popen([*words, *more, "--linger-s", str(LIMIT_S)]))
        path = home / KEEPER_PORT_FILE
        until(path.exists, LIMIT_S, f"keeper {node}", lambda: "")
        return int(path.read_text())

    def replicate(self, *, sealed: bool) -> float:
        """Seconds from the bell to the acknowledgement of a new version."""
        self.step += 1
        slot = self.files.slots[self.files.target(self.step)]
        slot.begin()
        slot.memory[HEADER : HEADER + 8] = self.step.to_bytes(8, "little")
        slot.complete(Version(self.step, 1), HEADER + self.size, Description())
        if sealed:
            slot.seal()
        start = time.perf_counter()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.sendto(f"0 {self.step}".encode(), str(self.root / "a" / KEEPER_SOCKET))
        self._acked(slot)
        return time.perf_counter() - start

    def _acked(self, slot: Slot) -> None:
        deadline = time.monotonic() + LIMIT_S
        while slot.acked != self.step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self.step} was not acknowledged within {LIMIT_S:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.wait(10)


@contextlib.contextmanager
def keepers(size: int) -> Iterator[Keepers]:
    home = Path(tempfile.mkdtemp(prefix="ks-rep-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    made = None
    try:
        made = Keepers(home, size)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(home, ignore_errors=True)


def library(lane: str, size_mb: int, repeats: int) -> list[float] | None:
    """Seconds of each repeat; ``None`` where it is not installed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "benchmarks.replication_torch", lane, "--port", str(port)]
    words += ["--size-mb", str(size_mb), "--repeats", str(repeats), "--rank"]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    other = subprocess.Popen([*words, "1"], env=environ, stdout=subprocess.DEVNULL)
    try:
        done = subprocess.run([*words, "0"], env=environ, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S * 4)
        other.wait(LIMIT_S)
    finally:
        other.kill()
        other.wait()
    found: list[float] | None = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return found


def rates(seconds: list[float], size: float) -> dict[str, float]:
    """GB/s: median, least and most."""
    found = sorted(size / 1e9 / s for s in seconds)
    return {"median": statistics.median(found), "min": found[0], "max": found[-1]}


def measure(size_mb: int, repeats: int, rounds: int, say: Callable[[str], None]) -> dict[str, object]:
    size = size_mb * 1024 * 1024
    took: dict[str, list[float]] = {
        "ours": [],
        "ours_with_sealing": [],
    }
    took |= {lane: [] for lane in LIBRARIES}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}: keepers")
        with keepers(size) as both:
            for _ in range(WARM_UPS):
                both.replicate(sealed=False)
            for _ in range(repeats):
                took["ours"].append(both.replicate(sealed=True))
                took["ours_with_sealing"].append(both.replicate(sealed=False))
        for lane in LIBRARIES:
            say(f"round {turn + 1} of {rounds}: {lane}")
            took[lane] += library(lane, size_mb, repeats) or []
    spreads = {name: rates(seconds, size * (2 if name == "nvrx" else 1)) for name, seconds in took.items() if seconds}
    report: dict[str, object] = {"size_mb": size_mb, "repeats": repeats * rounds}
    for name in took:
        report[f"{name}_gb_s"] = round(spreads[name]["median"], 3) if name in spreads else None
    best = max((spreads[name]["median"] for name in ("pgtransport", "nvrx") if name in spreads), default=None)
    report["ratio"] = round(spreads["ours"]["median"] / best, 2) if best else None
    report["spread"] = {name: {key: round(value, 3) for key, value in s.items()} for name, s in spreads.items()}
    return report


def main() -> None:
    ask = argparse.ArgumentParser(prog="benchmarks.replication", description=__doc__.splitlines()[0])
    ask.add_argument("--size-mb", type=int, default=1024)
    ask.add_argument("--repeats", type=int, default=5, help="of each lane in each round")
    ask.add_argument("--rounds", type=int, default=2, help="how often the lanes take turns")
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    end_on_sigterm()
    report = measure(args.size_mb, args.repeats, args.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:22} {value}")


if __name__ == "__main__":
    main()
