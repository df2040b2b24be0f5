"""Shows ranks' output on the terminal: ``node:rNNN`` in front, equal lines of many ranks folded into one.

A thread of its own reads the files and writes to the terminal. If whoever reads our output stops reading, only this
thread waits; the agent and the trainers do not notice. Positions are kept beside the slots, so that a restarted agent
goes on where the last one was.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from keepstep.agent.config import Output
from keepstep.agent.files import write_atomic
from keepstep.agent.slots import Slot
from keepstep.model.topology import fold_ranks

LOOK_S = 0.1
FOLD_S = 0.2
"""How long a line waits for its equals from other ranks."""
CHUNK = 64 * 1024
"""Bytes read from one file per look."""
LINE_BYTES = 8 * 1024
"""A longer line is shown in pieces."""
HELD_LINES = 2000
"""Lines waiting to be folded; beyond it they are shown at once."""
FILE = "console.json"


@dataclass
class _Tail:
    path: str
    stream: int
    rank: int
    position: int
    rest: bytes = b""
    ending: bool = False


class Console(threading.Thread):
    """``follow`` and ``finish`` may be called from the agent's loop; the thread does the rest."""

    def __init__(self, node: str, output: Output, node_dir: Path, *, quiet: bool = False) -> None:
        super().__init__(name="console", daemon=True)
        self._node = node
        self._output = output
        self._path = node_dir / FILE
        self._quiet = quiet
        self._lock = threading.Lock()
        self._tails: dict[tuple[str, int], _Tail] = {}
        self._saved: dict[str, int] = {}
        self._ending = threading.Event()
        self._broken: set[int] = set()
        self._unsaved = False
        self._held: dict[tuple[int, str], list[int]] = {}
        self._held_since = 0.0
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._saved = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])

    # ------------------------------------------------------------ for the agent

    def follow(self, slot: Slot) -> None:
        """Show a worker's output from where it is now (a standby's becomes visible when it has a rank)."""
        if slot.rank is None or slot.role != "worker":
            return
        streams = self._streams(slot.local_rank)
        with self._lock:
            for stream, path in ((1, slot.out), (2, slot.err)):
                if streams & stream and (slot.id, stream) not in self._tails:
                    start = self._saved.get(path, _size(path))
                    self._tails[slot.id, stream] = _Tail(path, stream, slot.rank, start)
                    # Also where nothing was said yet: an agent that follows this one must not start at the end.
                    self._unsaved = True

    def finish(self, slot: str) -> None:
        """The process has ended: show what is left, then let go."""
        with self._lock:
            for key, tail in self._tails.items():
                if key[0] == slot:
                    tail.ending = True

    def close(self, within_s: float) -> None:
        """Show everything that is left; give up when nobody reads for ``within_s``."""
        with self._lock:
            for tail in self._tails.values():
                tail.ending = True
        self._ending.set()
        if self.is_alive():
            self.join(within_s)

    def _streams(self, local_rank: int) -> int:
        chosen = self._output.local_ranks_filter
        if chosen and local_rank not in chosen:
            return 0
        table = self._output.console
        return table.get(str(local_rank), table.get("*", 3))

    # ------------------------------------------------------------ the thread

    def run(self) -> None:
        while not self._ending.is_set():
            moved = self._look()
            self._ending.wait(0.0 if moved else LOOK_S)
        while self._look():
            pass
        self._show_held()

    def _look(self) -> bool:
        """Read a little from each file; ``True`` when there may be more at once."""
        if self._unsaved:
            self._unsaved = False
            self._save()
        with self._lock:
            tails = list(self._tails.items())
        moved = more = False
        for key, tail in tails:
            data = _read(tail.path, tail.position)
            if data:
                tail.position += len(data)
                moved, more = True, more or len(data) == CHUNK
                self._take(tail, data)
            elif tail.ending:
                if tail.rest:
                    self._hold(tail, tail.rest)
                with self._lock:
                    del self._tails[key]
        if moved:
            self._save()
        if self._held and time.monotonic() - self._held_since >= FOLD_S:
            self._show_held()
        return more

    def _take(self, tail: _Tail, data: bytes) -> None:
        *lines, tail.rest = (tail.rest + data).split(b"\n")
        for line in lines:
            self._hold(tail, line)
        if len(tail.rest) > LINE_BYTES:
            self._hold(tail, tail.rest)
            tail.rest = b""

    def _hold(self, tail: _Tail, line: bytes) -> None:
        # A progress bar rewrites its line; what counts is how it looked at the end.
        text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")
        if not self._held:
            self._held_since = time.monotonic()
        ranks = self._held.setdefault((tail.stream, text), [])
        if tail.rank in ranks:
            # The same rank says it again: order matters more than folding.
            self._show_held()
            self._held_since = time.monotonic()
            ranks = self._held.setdefault((tail.stream, text), [])
        ranks.append(tail.rank)
        if len(self._held) >= HELD_LINES:
            self._show_held()

    def _show_held(self) -> None:
        for (stream, text), ranks in self._held.items():
            who = f"r{ranks[0]:03d}" if len(ranks) == 1 else f"[r{fold_ranks(ranks)}]"
            self._write(stream, f"{self._node}:{who} {text}\n")
        self._held.clear()

    def _write(self, stream: int, text: str) -> None:
        if self._quiet or stream in self._broken:
            return
        try:
            target = sys.stdout if stream == 1 else sys.stderr
            target.write(text)
            target.flush()
        except (OSError, ValueError):
            # Nobody reads any more; the files have it all.
            self._broken.add(stream)

    def _save(self) -> None:
        with self._lock:
            positions = {t.path: t.position - len(t.rest) for t in self._tails.values()}
        with contextlib.suppress(OSError):
            write_atomic(self._path, msgspec.json.encode(positions))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, position: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(position)
            return file.read(CHUNK)
    except OSError:
        return b""
