"""Attended: a rank's line to its node's attendant. Starts one where there is none, and again when it dies.

Training depends on nothing here: where no attendant can be had, snapshots in this node's memory go on without copies
on other nodes and without durable generations, and that is said.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from keepstep.checkpoint.config import CheckpointConfig
from keepstep.model.env import NODE
from keepstep.trainer.attendant import LINE_BYTES, LOG, SOCKET, Finish, Finished, FromRank, Hello, Ready, Say, ToRank

CONNECT_S = 30.0
"""From a start of the attendant to its first answer: a cold interpreter on a busy machine."""
READY_S = 60.0
"""From ``Hello`` to ``Ready``: the keeper is started in between."""
RETRY_S = 0.05
RESTARTS = 5
"""How often a rank looks for another attendant when one has died, before it goes on without."""


class Attended:
    """The connection of one rank.

    Args:
        leader: the rank that starts the node's attendant; the others wait for it.
        config, token: the leader's word on how keeper and archiver shall work.
    """

    def __init__(
        self,
        node_dir: Path,
        rank: int,
        *,
        host: str,
        linger_s: float,
        config: CheckpointConfig | None = None,
        token: str = "",
    ) -> None:
        self._dir, self._rank, self._host, self._linger_s = node_dir, rank, host, linger_s
        self._hello = Hello(rank=rank, config=config, token=token)
        self._leader = config is not None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._finished = threading.Event()
        self._whole = False
        self._closing = False
        self.keeper_port = 0
        os.register_at_fork(after_in_child=self._drop)

    def open(self) -> str | None:
        """Connect and learn the keeper's port; a sentence when that did not work out."""
        try:
            self._connect(time.monotonic() + CONNECT_S)
        except OSError as error:
            return f"no attendant could be had in {self._dir} ({error}; see {self._dir / LOG})"
        threading.Thread(target=self._listen, name="keepstep-attended", daemon=True).start()
        return None if self.keeper_port else f"the keeper did not start; see {self._dir / 'keeper.log'}"

    def finish(self, limit_s: float) -> bool | None:
        """This rank's loop is complete: wait until the last generation is durable.

        Returns:
            ``None`` when that is not known: nobody is there to say it, or the time is over.
        """
        try:
            self._send(Finish())
        except OSError:
            return None
        return self._whole if self._finished.wait(limit_s) else None

    def close(self) -> None:
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # a thread waits on it, which would keep a closed one open
                self._socket.shutdown(socket.SHUT_RDWR)
        self._drop()

    # ------------------------------------------------------------ connection

    def _connect(self, deadline: float) -> None:
        """Raises ``OSError`` when there is no answer in time."""
        started: subprocess.Popen[bytes] | None = None
        while True:
            try:
                self._greet()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            if self._leader and (started is None or started.poll() is not None):
                started = self._start()
            time.sleep(RETRY_S)

    def _greet(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(READY_S)
            sock.connect(str(self._dir / SOCKET))
            self._socket, self._buffer = sock, b""
            self._send(self._hello)
            while not isinstance(message := self._next(), Ready):
                self._hear(message)
            self.keeper_port = message.keeper_port
            sock.settimeout(None)
        except BaseException:
            self._socket = None
            sock.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        """In a session and directory of its own: neither torchrun's signals nor the user's modules reach it."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", NODE)}
        env["OMP_NUM_THREADS"] = "1"
        if paths := env.get("PYTHONPATH"):
            env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in paths.split(os.pathsep) if p)
        command = [sys.executable, "-m", "keepstep.trainer.attendant", "--node-dir", str(self._dir)]
        command += ["--host", self._host, "--linger-s", str(self._linger_s)]
        with (self._dir / LOG).open("ab") as log:
            return subprocess.Popen(
                command,
                env=env,
                cwd=self._dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _drop(self) -> None:
        """Also in a forked child: its copy of the connection would tell of a life that is over."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.close(self._socket.detach())
            self._socket = None

    # ------------------------------------------------------------ words

    def _send(self, message: FromRank) -> None:
        if self._socket is None:
            raise OSError("no attendant")
        self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def _next(self) -> ToRank:
        """Raises ``OSError`` when the attendant is gone or talks nonsense."""
        while b"\n" not in self._buffer:
            sock = self._socket
            data = sock.recv(LINE_BYTES) if sock is not None else b""
            if not data or len(self._buffer) > LINE_BYTES:
                raise OSError("the attendant is gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=ToRank)
        except msgspec.DecodeError as error:
            raise OSError(f"the attendant speaks another version: {error}") from error

    def _listen(self) -> None:
        left = RESTARTS
        while not self._closing:
            try:
                self._hear(self._next())
                continue
            except OSError:
                if self._closing or self._finished.is_set():
                    return
            if left == 0:
                break
            left -= 1
            try:
                self._connect(time.monotonic() + CONNECT_S)
            except OSError:
                break
        say(self._rank, "the attendant is gone for good: no more copies on other nodes, no more durable checkpoints")

    def _hear(self, message: ToRank) -> None:
        match message:
            case Say(text=text):
                say(None, text)
            case Finished(whole=whole):
                self._whole = whole
                self._finished.set()
            case Ready():
                pass


def say(rank: int | None, text: str) -> None:
    """One line on stderr; never an error if nobody reads."""
    who = "" if rank is None else f"rank {rank}: "
    with contextlib.suppress(OSError, ValueError):
        print(f"keepstep: {who}{text}", file=sys.stderr, flush=True)
