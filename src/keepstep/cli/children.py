"""One supervised process: started, watched, and started again for as long as its budget lasts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

CALM_S = 60.0
"""A process that has lived this long is taken to be well: its budget is full again."""
RESTARTS = 20
"""Starts in a row, none of which lived for ``CALM_S``, before a process is given up."""
FIRST_DELAY_S, LAST_DELAY_S = 0.05, 5.0
"""Back-off between starts of a process that keeps dying; the first restart comes at once."""


def python(module: str, config: Path) -> list[str]:
    """Start a module of ours; ``-P`` keeps the user's directory from shadowing our imports."""
    return [sys.executable, "-P", "-m", module, "--config", os.fspath(config)]


class Budget:
    """How often and how soon a process may be started again."""

    def __init__(self, limit: int = RESTARTS) -> None:
        self.limit = limit
        self.used = 0

    def delay(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start; ``None`` when the budget is spent."""
        if lived_s >= CALM_S:
            self.used = 0
        self.used += 1
        if self.used > self.limit:
            return None
        return 0.0 if self.used == 1 else min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.used - 2))


class Child:
    """A process with a budget. It is in a session of its own, so that ctrl-C reaches it only through us."""

    def __init__(self, name: str, argv: Sequence[str], *, stderr: Path | None = None) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.budget = Budget()
        self.started_at = 0.0
        self.due: float | None = None
        """When to start it again (monotonic); ``None`` while it runs, or for good."""
        self._stderr = stderr
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.started_at

    def start(self) -> None:
        self.due = None
        self.started_at = time.monotonic()
        sink = None if self._stderr is None else self._stderr.open("ab")
        try:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        finally:
            if sink is not None:
                sink.close()

    def poll(self) -> int | None:
        """The exit code (negative: the signal) as soon as there is one."""
        return self._process.poll() if self._process else None

    def plan_restart(self) -> bool:
        """Set ``due`` from the budget; False when it is spent."""
        delay = self.budget.delay(self.lived_s)
        self.due = None if delay is None else time.monotonic() + delay
        return delay is not None

    def send(self, signum: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; ``None`` when it did not come in time."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class Signals:
    """Signals as values: handlers only wake ``wait``, nothing is interrupted.

    A signal that is ignored when we start (``nohup``) stays ignored.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self._wanted = tuple(wanted)
        self._before: dict[int, Callable[..., object] | int | None] = {}

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*self._wanted, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float | None) -> list[int]:
        """The signals that came, SIGCHLD left out; returns early for a child's end, too."""
        select.select([self._read], [], [], timeout_s)
        try:
            came = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        return [number for number in came if number in self._before and number != signal.SIGCHLD]
