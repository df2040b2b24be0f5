"""Archiver: writes pinned versions of this node's ranks to the durable tiers, beside the training.

A process of its own, at low priority: a library for object stores that crashes, or a file system that hangs, takes
neither memory nor training along. It owns nothing: pins are words in the slots' headers, generations are objects in the
tiers. One that is killed anywhere is started again, looks, and goes on.

    python -m keepstep.checkpoint.archiver --node-dir D [--linger-s N]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from keepstep.checkpoint import config as settings
from keepstep.checkpoint import pair
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import CheckpointError, SlotInvalid
from keepstep.checkpoint.finisher import Finisher
from keepstep.checkpoint.lease import CHECK_S
from keepstep.checkpoint.notes import Teller
from keepstep.checkpoint.scribe import Scribe, Written
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.target import Seen, Target, targets
from keepstep.checkpoint.todo import Todo
from keepstep.model.env import ARCHIVER_FINISH, ARCHIVER_SOCKET, SNAP_DIR

LOOK_S = 1.0
"""How often it looks for pins by itself; the trainers' bell usually is earlier."""
GATHER_S, GATHER_LOOKS = 0.05, 4
"""Pauses in which the other ranks of this node may pin the same step, so that their parts are told of as one."""
NICE = 10
IDLE_S = 300.0
"""When no trainer has been heard of for so long and nothing is being written, leases on tiers are left to run out."""
LOCK_FILE = "archiver.lock"
"""Held for as long as an archiver of this node runs."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_BEST_EFFORT_LOWEST = (2 << 13) | 7


class Archiver:
    """One node's archiver.

    Args:
        linger_s: end after so many seconds in which no trainer wrote, rang or pinned; 0 stays until told to end.
    """

    def __init__(self, node_dir: Path, linger_s: float = 0.0) -> None:
        self._dir, self._snap, self._linger_s = node_dir, node_dir / SNAP_DIR, linger_s
        self._teller = Teller(node_dir)
        self._seen = Seen(node_dir)
        self._scribe = Scribe(self._teller.tell, Todo(node_dir))
        self._finisher = Finisher(self._teller.tell, say)
        self._targets: list[Target] = []
        self._config = CheckpointConfig(job=settings.read(node_dir).job)
        self._config_said = ""
        self._finishing = False
        self._working = True
        self._serials: dict[Path, int] = {}
        self._alive = time.monotonic()

    def run(self) -> None:
        """Work until told to end (``finish`` on the socket, SIGTERM), nothing is left, or nobody is there any more."""
        signal.signal(signal.SIGTERM, self._on_signal)
        bell = self._bell()
        ending = threading.Event()
        threading.Thread(target=self._renew, args=(ending,), name="lease", daemon=True).start()
        try:
            self._read_config()
            for one in self._scribe.catch_up(self._targets):
                self._after(one.version, [one], 0.0, {one.rank})
            while self._dir.is_dir():
                self._read_config()
                self._working = True
                busy = self._round()
                if self._done(busy):
                    return
                self._working = False
                self._wait(bell, busy)
        finally:
            ending.set()
            for target in self._targets:
                target.release()
            bell.close()
            with contextlib.suppress(OSError):
                (self._dir / ARCHIVER_SOCKET).unlink()
            self._teller.close()

    def _renew(self, ending: threading.Event) -> None:
        """Keep the leases fresh, also while one generation takes long. A tier that hangs hangs this thread, too.

        An archiver whose node was killed around it would else hold the place for as long as nobody ends it.
        """
        while not ending.wait(CHECK_S):
            if self._working or time.monotonic() - self._alive < IDLE_S:
                for target in self._targets:
                    target.renew()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._finishing:
            raise SystemExit(1)
        self._finishing = True

    def _done(self, busy: bool) -> bool:
        if busy or self._finisher.awaited or self._paused_s > 0:
            return False
        if self._finishing:
            return True
        return self._linger_s > 0 and time.monotonic() - self._alive > self._linger_s

    # ---------------------------------------------------------------- one round

    def _round(self) -> bool:
        """Write everything that is pinned, oldest step first, and complete what can be; true when anything was done."""
        if self._finishing:
            for target in self._targets:
                target.hurry()
        pins = self._all_pins() if self._paused_s == 0 else {}
        for version in sorted(pins):
            started = time.monotonic()
            found = [self._scribe.write(path, rank, self._config, self._targets) for rank, path in pins[version]]
            ranks = {rank for rank, _ in pins[version]}
            self._after(version, [one for one in found if one is not None], time.monotonic() - started, ranks)
        shared = self._shared()
        if shared is not None and not self._finisher.scanned and self._has_first_rank and shared.pause_s == 0:
            try:
                self._finisher.scan(shared)
            except CheckpointError as error:
                shared.failed(error, again=True)
        if shared is not None and self._finisher.pending:
            self._finisher.look(shared, self._config, self._pins())
        return bool(pins)

    @property
    def _paused_s(self) -> float:
        """How long pins wait, because every tier has failed several times in a row; at the end of a job none does."""
        return min((target.pause_s for target in self._targets), default=0.0)

    def _after(self, version: Version, written: list[Written], seconds: float, ranks: set[int]) -> None:
        """What a version's parts make of the generation: alone on this node's disk, with the others' elsewhere.

        Args:
            ranks: of this node, whose parts were due; a state that was damaged or taken back is among none.
        """
        for target in self._targets:
            parts = [one.parts[target.label] for one in written if target.label in one.parts]
            whole = {part.rank for part in parts}
            full = target.settle(version, ranks)
            if not target.by_itself:
                self._finisher.tried(target, version, failed=ranks - whole, whole=whole)
            if full and (target.by_itself or self._has_first_rank):
                self._finisher.tidy(target, self._config, self._pins())
            if not parts:
                continue
            if target.by_itself:
                if whole == ranks:
                    sizes = [part.size for part in parts]
                    self._finisher.settle_alone(target, self._config, version, sizes, parts[0].world_size)
            elif any(part.rank == 0 for part in parts):
                self._finisher.expect(version, parts[0].world_size, took_s=seconds)
            else:
                if whole == ranks:
                    target.worked(version)
                say(f"step {version.step}: {len(parts)} parts are in {target.url}, {seconds:.1f} s")

    def _all_pins(self) -> dict[Version, list[tuple[int, Path]]]:
        """The same, after a moment for ranks of this node that come to the same step a little later."""
        pins = self._pins()
        for _ in range(GATHER_LOOKS):
            if not pins or len(pins[min(pins)]) >= len(pair.ranks_in(self._snap)):
                break
            time.sleep(GATHER_S)
            pins = self._pins()
        return pins

    def _pins(self) -> dict[Version, list[tuple[int, Path]]]:
        """Pinned versions, with the ranks and files that hold them. Also notices that trainers are alive."""
        found: dict[Version, list[tuple[int, Path]]] = defaultdict(list)
        for rank, path in self._slots():
            try:
                slot = Slot(path)
            except (OSError, SlotInvalid):
                continue
            try:
                if self._serials.get(path) != slot.serial:
                    self._serials[path], self._alive = slot.serial, time.monotonic()
                version = slot.version
                if version is not None and slot.pinned:
                    found[version].append((rank, path))
            finally:
                slot.close()
        return found

    def _slots(self) -> Iterator[tuple[int, Path]]:
        for rank in sorted(pair.ranks_in(self._snap)):
            for path in pair.paths(self._snap, rank):
                if path.exists():
                    yield rank, path

    @property
    def _has_first_rank(self) -> bool:
        """This node completes the generations of the shared tier."""
        return (self._snap / "rank0.0").exists()

    def _shared(self) -> Target | None:
        return next((target for target in self._targets if not target.by_itself), None)

    def _read_config(self) -> None:
        """The policy may come, or change, while this runs."""
        try:
            config = settings.read(self._dir, self._config.job)
        except CheckpointError as error:
            if str(error) != self._config_said:
                self._config_said = str(error)
                say(f"{error}; the former settings stay")
            return
        if config != self._config or not self._targets:
            self._config = config
            self._targets = targets(config, self._seen, say, self._targets)
        for target in self._targets:
            target.claim.leads = target.by_itself or self._has_first_rank

    # ---------------------------------------------------------------- the bell

    def _bell(self) -> socket.socket:
        path = self._dir / ARCHIVER_SOCKET
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        bell.bind(str(path))
        bell.setblocking(False)
        return bell

    def _wait(self, bell: socket.socket, busy: bool) -> None:
        """Until somebody rings, or it is time to look."""
        pause = 0.0 if busy else LOOK_S
        if (paused_s := self._paused_s) > 0:
            pause = min(pause, paused_s)
        if (wait_s := self._finisher.wait_s) is not None:
            pause = min(pause, wait_s)
        with contextlib.suppress(OSError):
            select.select([bell], [], [], pause)
        with contextlib.suppress(OSError):
            while words := bell.recv(256):
                self._alive = time.monotonic()
                self._finishing = self._finishing or words == ARCHIVER_FINISH


def say(text: str) -> None:
    """One line per event."""
    print(f"keepstep archiver: {text}", file=sys.stderr, flush=True)


def be_modest() -> None:
    """Training comes first, for the processor and for the disk."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IO_BEST_EFFORT_LOWEST)


def alone(node_dir: Path) -> int | None:
    """A lock that goes with this process; ``None`` when another archiver of this node has it."""
    fd = os.open(node_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def main() -> None:
    """Entry point of ``python -m keepstep.checkpoint.archiver``."""
    parser = argparse.ArgumentParser(prog="keepstep.checkpoint.archiver", description=__doc__)
    parser.add_argument("--node-dir", type=Path, required=True)
    parser.add_argument("--linger-s", type=float, default=0.0)
    args = parser.parse_args()
    be_modest()
    if not args.node_dir.is_dir():
        raise SystemExit(f"error: {args.node_dir} is no directory; it is made by whoever starts this")
    if alone(args.node_dir) is None:
        say(f"another archiver works for {args.node_dir} already")
        return
    try:
        Archiver(args.node_dir, args.linger_s).run()
    except CheckpointError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
