"""Control thread: talks to the agent, so that the training path never does.

When the agent announces a newer epoch, every collective is aborted here, at once, whatever the main thread is doing;
the main thread finds the new seat when its collective raises or at its next step. The agent may die and come back as
often as it likes: this thread connects again for as long as the process lives, and says again what it said.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from keepstep.model.ids import NO_EPOCH, Epoch, SlotId
from keepstep.model.position import GroupPosition
from keepstep.model.wire import (
    PROTOCOL,
    AgentToWorker,
    Frame,
    FrameError,
    RaiseInjected,
    Refused,
    ShowPositions,
    SlowDown,
    TakeSeat,
    Unpacker,
    WorkerCannotResume,
    WorkerHello,
    WorkerPositions,
    pack,
)
from keepstep.trainer.orphan import Orphan

RETRY_FIRST_S, RETRY_LAST_S = 0.02, 1.0
LOOK_S = 5.0
"""Between two looks at what waits, when nothing is heard."""
QUEUE_LIMIT = 256
"""Frames that wait for an absent agent; the oldest goes first (they are superseded anyway)."""
ORPHAN_S = 120.0
"""A process that waits for a rank and has had no agent for this long ends by itself."""

ORPHAN_CODE = 1


class Control:
    """One connection to the agent, kept alive by a daemon thread.

    Args:
        abort: called with a reason, from the control thread, when a newer epoch is announced.
        orphan: says when nobody is left who would end this process; it then ends itself.
    """

    def __init__(
        self,
        socket_path: Path,
        slot: str,
        version: str,
        abort: Callable[[str], None],
        orphan: Orphan | None = None,
    ) -> None:
        self._orphan = orphan
        self._path, self._slot, self._version, self._abort = socket_path, slot, version, abort
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._epoch: Epoch = NO_EPOCH
        self._queue: deque[Frame] = deque(maxlen=QUEUE_LIMIT)
        self._said: dict[type[Frame], Frame] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._last_contact = time.monotonic()
        self.pending: TakeSeat | None = None
        """A seat of a newer epoch than the one this process is in. Read without a lock on the training path."""
        self.planned: TakeSeat | None = None
        """One that need not be taken before the end of the step that is under way (``Roster.boundary_s``)."""
        self._planned_until = 0.0
        self._waiting = False
        self.announced_ns = 0
        """When ``pending`` arrived (CLOCK_MONOTONIC)."""
        self.refused: Refused | None = None
        self.raise_injected = False
        self.slow_down_s = 0.0
        self.positions: Callable[[], tuple[GroupPosition, ...]] = tuple
        """Where groups stand that do not tell it in flight memory; called on a thread of its own."""
        self.done = False
        """The loop is complete: a newer epoch can no longer be entered in this process."""
        self._thread = threading.Thread(target=self._run, name="keepstep-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---------------------------------------------------------------- main thread

    def take(self, aborts: Callable[[], int]) -> tuple[TakeSeat, int] | None:
        """Enter the newest announced epoch.

        Returns:
            The seat, and what ``aborts()`` said at that instant: an abort counted later belongs to a newer epoch.
        """
        with self._lock:
            seat, self.pending = self.pending, None
            if seat is None:
                return None
            self._epoch = seat.roster.epoch
            self._said.clear()
            return seat, aborts()

    def complete(self) -> bool:
        """The loop is complete: no epoch is entered any more. False when one has been announced before that."""
        with self._lock:
            self.boundary()
            self.done = self.pending is None
            return self.done

    def boundary(self) -> None:
        """The main thread is between two steps, or its step has come to nothing: take a planned seat now."""
        if self.planned is None:
            return
        with self._lock:
            if (seat := self.planned) is not None:
                self._publish(seat)

    def wait(self, limit_s: float | None, alive: Callable[[], None] = lambda: None) -> bool:
        """Wait until a newer seat is there; false after ``limit_s``, or when no agent can be expected any more.

        Args:
            alive: called about once a second meanwhile.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        with self._lock:
            self.boundary()
            self._waiting = True
            try:
                while self.pending is None and self.refused is None:
                    alive()
                    now = time.monotonic()
                    if deadline is not None and now >= deadline:
                        return False
                    if limit_s is None and now - self._last_contact > ORPHAN_S:
                        return False
                    self._news.wait(1.0 if deadline is None else min(1.0, deadline - now))
                return self.pending is not None
            finally:
                self._waiting = False

    def send(self, frame: Frame) -> None:
        """Hand a frame to the control thread; never blocks."""
        with self._lock:
            self._queue.append(frame)
        self._wake()

    def flush(self, limit_s: float) -> None:
        """Give what was sent up to ``limit_s`` to leave: this process may end soon, and this thread with it."""
        deadline = time.monotonic() + limit_s
        with self._lock:
            while self._queue and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)

    # ---------------------------------------------------------------- control thread

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it is awake
            os.write(self._wake_write, b"!")

    def _run(self) -> None:
        pause = RETRY_FIRST_S
        while self.refused is None:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(str(self._path))
                    pause = RETRY_FIRST_S
                    with self._lock:
                        self._last_contact = time.monotonic()
                    self._talk(sock)
            except OSError:
                self._end_if_orphaned()  # else: the agent is being restarted
                self._end_patience()
            except FrameError as error:
                print(f"keepstep: the agent at {self._path} speaks nonsense: {error}", file=sys.stderr, flush=True)
            if self.refused is None:
                time.sleep(pause)
                pause = min(pause * 2, RETRY_LAST_S)

    def _end_if_orphaned(self) -> None:
        """From this thread, at once: the main thread may wait for ranks that have ended in the same way."""
        silent_s = time.monotonic() - self._last_contact
        if self._orphan is not None and self._orphan.is_one(silent_s):
            print(
                f"keepstep: launcher, agent and process parent are gone, and none has come back within "
                f"{self._orphan.limit_s:g} s; this process ends",
                file=sys.stderr,
                flush=True,
            )
            os._exit(ORPHAN_CODE)

    def _talk(self, sock: socket.socket) -> None:
        unpacker: Unpacker[AgentToWorker] = Unpacker(AgentToWorker)
        with self._lock:
            hello = WorkerHello(
                protocol=PROTOCOL,
                version=self._version,
                slot=SlotId(self._slot),
                pid=os.getpid(),
                epoch=self._epoch,
            )
            waiting = {type(frame) for frame in self._queue}
            again = [frame for kind, frame in self._said.items() if kind not in waiting]
        sock.sendall(pack(hello) + b"".join(pack(frame) for frame in again))
        while True:
            self._send_queue(sock)
            pause_s = self._end_patience()
            readable, _, _ = select.select([sock.fileno(), self._wake_read], [], [], pause_s)
            with self._lock:
                self._last_contact = time.monotonic()
            if self._wake_read in readable:
                _drain(self._wake_read)
            if sock.fileno() in readable:
                data = sock.recv(65536)
                if not data:
                    return
                for frame in unpacker.feed(data):
                    self._hear(frame)
            if self.refused is not None:
                return

    def _send_queue(self, sock: socket.socket) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._news.notify_all()
                    return
                frame = self._queue[0]
            sock.sendall(pack(frame))
            with self._lock:
                if self._queue and self._queue[0] is frame:
                    self._queue.popleft()
                if getattr(frame, "epoch", None) == self._epoch:
                    self._said[type(frame)] = frame

    def _hear(self, frame: AgentToWorker) -> None:
        match frame:
            case TakeSeat():
                self._announce(frame)
            case ShowPositions(request=request):
                # torch's recorder has locks of its own: whoever waits for them must not be this thread.
                threading.Thread(target=self._show, args=(request,), name="keepstep-positions", daemon=True).start()
            case RaiseInjected():
                self.raise_injected = True
            case SlowDown(seconds=seconds):
                self.slow_down_s = seconds
            case Refused():
                # Said before it takes effect: the main thread ends the process as soon as it knows.
                print(f"keepstep: the agent refuses this process: {frame.why}", file=sys.stderr, flush=True)
                with self._lock:
                    self.refused = frame
                    self._news.notify_all()

    def _show(self, request: int) -> None:
        self.send(WorkerPositions(request=request, groups=self.positions()))

    def _announce(self, seat: TakeSeat) -> None:
        epoch = seat.roster.epoch
        with self._lock:
            known = max(self._epoch, *(s.roster.epoch for s in (self.pending, self.planned) if s is not None), NO_EPOCH)
            if epoch <= known:
                return  # a repetition, or a rival that came too late
            if self.done:
                why = f"rank {seat.rank} has completed its loop and is in the script's epilogue"
                self._queue.append(WorkerCannotResume(epoch=epoch, why=why))
            patient = seat.roster.boundary_s > 0 and self._epoch != NO_EPOCH and self.pending is None
            if patient and not self._waiting and not self.done:
                self.planned, self._planned_until = seat, time.monotonic() + seat.roster.boundary_s
                return
            self._publish(seat)

    def _publish(self, seat: TakeSeat) -> None:
        """From now on the main thread may take this seat, and no collective of an older epoch is waited for."""
        self.planned = None
        if not self.done:
            self.announced_ns = time.monotonic_ns()
            self.pending = seat
        if self._epoch != NO_EPOCH:
            self._abort(f"epoch {seat.roster.key} opened")
        self._news.notify_all()

    def _end_patience(self) -> float:
        """Publish a planned seat whose time is over; seconds until the next look."""
        with self._lock:
            if self.planned is None:
                return LOOK_S
            left = self._planned_until - time.monotonic()
            if left > 0:
                return min(LOOK_S, left)
            self._publish(self.planned)
            return LOOK_S


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
