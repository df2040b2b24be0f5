"""Process parent of a node: starts programs, collects their exit status, outlives the agent.

``python -m keepstep.agent.shim --node-dir DIR``. One thread, one selector, only the standard library: the less is in
here, the less can break what everything else hangs from. Forking from a warm interpreter is the business of a child
(``zygote``), so that importing torch can neither block nor crash this loop. How messages travel is in ``lines``,
how new interpreters are started in ``launching``.

An agent talks to it over ``shim.sock``, JSON lines, one agent at a time (a newer connection replaces the older)::

    > {"op": "hello"}                         < {"ev": "state", "pid", "warm", "procs", "queued", "exits"}
    > {"op": "spawn", "id", "start", ...}     < {"ev": "spawned", "id", "pid"} or {"ev": "refused", "id", "why"}
    > {"op": "ack", "pid"}                    < {"ev": "exit", "id", "pid", "status"}   (kept until acknowledged)
    > {"op": "kill", "id", "signal"}          < {"ev": "warm"}
    > {"op": "leave"}                         kills everything and ends
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from keepstep.agent import launching, proc
from keepstep.agent.lines import Lines, Message, listen
from keepstep.model import env as names

QUEUE = 4096
"""Programs that may wait for the warm-up."""
KEPT_EXITS = 4096
"""Unacknowledged exits; beyond it the oldest is forgotten (the agent then reports an unknown status)."""
ZYGOTE_STARTS = 5
"""How often a fork server that dies is started again before programs are started cold."""


class Shim:
    def __init__(self, node_dir: Path, *, warm: str, orphan_grace_s: float) -> None:
        self._dir = node_dir
        self._warm_kind = warm
        self._grace_s = orphan_grace_s
        self._selector = selectors.DefaultSelector()
        self._pids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._strays: dict[int, int] = {}
        """Exits that were collected before the zygote had said whose they are."""
        self._exits: dict[int, Message] = {}
        self._queue: dict[str, Message] = {}
        self._in_zygote: dict[str, Message] = {}
        self._agent: Lines | None = None
        self._zygote: Lines | None = None
        self._zygote_pid = 0
        """0 while there is none that has not been collected."""
        self._zygote_starts = 0
        self._warm = False
        self._lonely_since = time.monotonic()
        self._leaving = False

    # ------------------------------------------------------------ loop

    def run(self) -> None:
        proc.become_subreaper()
        listener = listen(self._dir / names.SHIM_SOCKET)
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_leaving", True))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._selector.register(listener, selectors.EVENT_READ, "accept")
        self._selector.register(wake, selectors.EVENT_READ, "wake")
        self._start_zygote()
        while not self._leaving:
            for key, mask in self._selector.select(1.0):
                if key.data == "accept":
                    self._accept(listener)
                elif key.data == "wake":
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                elif isinstance(key.data, Lines):
                    key.data.serve(mask)
            self._reap()
            if self._agent is None and time.monotonic() - self._lonely_since > self._grace_s:
                print(f"note: no agent for {self._grace_s:g} s; ending all programs", file=sys.stderr, flush=True)
                self._end_all()
                shutil.rmtree(self._dir, ignore_errors=True)
                return
        self._end_all()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            if self._agent is not None:
                self._agent.drop()
            self._agent = Lines(sock, self._selector, on_message=self._from_agent, on_end=self._hung_up)

    def _hung_up(self, stream: Lines) -> None:
        if stream is self._agent:
            self._agent = None
            self._lonely_since = time.monotonic()
        elif stream is self._zygote:
            self._zygote = None
            self._zygote_gone()

    # ------------------------------------------------------------ agent

    def _tell(self, message: Message) -> None:
        """Tell the agent, if there is one; the next one asks for the state."""
        if self._agent is not None:
            self._agent.say(message)

    def _from_agent(self, message: Message) -> None:
        match message["op"]:
            case "hello":
                self._tell(self._state())
            case "spawn":
                self._spawn(message)
            case "ack":
                self._exits.pop(int(message["pid"]), None)
            case "kill":
                pid = self._pids.get(message["id"])
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, int(message["signal"]))
            case "leave":
                self._leaving = True
            case other:
                print(f"note: unknown request {other!r} ignored", file=sys.stderr, flush=True)

    def _state(self) -> Message:
        procs = [{"id": name, "pid": pid} for name, pid in self._pids.items()]
        queued = [*self._queue, *self._in_zygote]
        exits = list(self._exits.values())
        return {
            "ev": "state",
            "pid": os.getpid(),
            "warm": self._warm,
            "procs": procs,
            "queued": queued,
            "exits": exits,
        }

    def _spawn(self, request: Message) -> None:
        name = request["id"]
        ended = next((e for e in self._exits.values() if e["id"] == name), None)
        if ended is not None:
            self._tell({"ev": "spawned", "id": name, "pid": ended["pid"]})
            self._tell(ended)
        elif name in self._pids:
            # Asked again, by an agent that did not hear the first answer.
            self._tell({"ev": "spawned", "id": name, "pid": self._pids[name]})
        elif name in self._queue or name in self._in_zygote:
            pass
        elif request["start"] == "spawn":
            self._spawn_new(request)
        elif self._zygote is not None and self._warm:
            self._spawn_fork(request)
        elif self._zygote is None:
            self._spawn_new(request)
        elif len(self._queue) >= QUEUE:
            self._tell({"ev": "refused", "id": name, "why": f"{QUEUE} programs wait for the warm-up"})
        else:
            self._queue[name] = request

    def _spawn_fork(self, request: Message) -> None:
        self._in_zygote[request["id"]] = request
        if self._zygote is not None:
            self._zygote.say(request)

    def _spawn_new(self, request: Message) -> None:
        name = request["id"]
        try:
            pid = launching.start_program(request)
        except OSError as error:
            self._tell({"ev": "refused", "id": name, "why": f"{request['target']}: {error.strerror}"})
            return
        self._born(name, pid)

    def _born(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        self._names[pid] = name
        self._tell({"ev": "spawned", "id": name, "pid": pid})
        if pid in self._strays:
            self._ended(pid, self._strays.pop(pid))

    # ------------------------------------------------------------ zygote

    def _start_zygote(self) -> None:
        self._zygote_starts += 1
        self._zygote_pid, channel = launching.start_zygote(self._warm_kind)
        self._zygote = Lines(channel, self._selector, on_message=self._from_zygote, on_end=self._hung_up)

    def _from_zygote(self, message: Message) -> None:
        match message["ev"]:
            case "warm":
                self._warm = True
                self._tell({"ev": "warm"})
                waiting, self._queue = list(self._queue.values()), {}
                for request in waiting:
                    self._spawn_fork(request)
            case "spawned":
                self._in_zygote.pop(message["id"], None)
                self._born(message["id"], message["pid"])
                self._forget_strays()
            case "refused":
                self._in_zygote.pop(message["id"], None)
                self._tell(message)
                self._forget_strays()

    def _forget_strays(self) -> None:
        """Nobody is being born: what was kept is of users' own orphans, and its numbers will be given to others."""
        if not self._in_zygote:
            self._strays.clear()

    def _zygote_gone(self) -> None:
        """Start another; what it was asked for but had not answered is asked again, after killing what it left."""
        self._warm = False
        unclear = list(self._in_zygote.values())
        self._in_zygote.clear()
        self._strays.clear()
        if unclear:
            self._kill_unknown_children()
        if self._leaving:
            return
        waiting = [*unclear, *self._queue.values()]
        self._queue.clear()
        if self._zygote_starts < ZYGOTE_STARTS:
            print("note: the fork server ended; starting another", file=sys.stderr, flush=True)
            self._start_zygote()
        else:
            print(f"note: the fork server ended {ZYGOTE_STARTS} times; starting cold", file=sys.stderr, flush=True)
        for request in waiting:
            self._spawn(request)

    def _kill_unknown_children(self) -> None:
        """A program whose name was lost must not live beside the one that will be started in its place."""
        me = os.getpid()
        for pid in (int(n) for n in os.listdir("/proc") if n.isdigit()):
            now = proc.stat(pid)
            if now and now.parent == me and now.session == pid and pid not in self._names and pid != self._zygote_pid:
                proc.kill_group(pid)

    # ------------------------------------------------------------ exits

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            clean = found.si_code == os.CLD_EXITED and found.si_status == 0
            if pid in self._names and not clean:
                # While the leader is not yet collected its number cannot be given to anybody else, so this hits
                # only what the dead program left behind: data loader workers, compilers.
                proc.kill_group(pid)
            _, status = os.waitpid(pid, 0)
            if pid in self._names:
                self._ended(pid, status)
            elif pid == self._zygote_pid:
                self._zygote_pid = 0  # from now on the number may be anybody's
            elif self._in_zygote:
                self._strays[pid] = status

    def _ended(self, pid: int, status: int) -> None:
        name = self._names.pop(pid)
        self._pids.pop(name, None)
        self._exits[pid] = {"ev": "exit", "id": name, "pid": pid, "status": status}
        while len(self._exits) > KEPT_EXITS:
            del self._exits[next(iter(self._exits))]
        self._tell(self._exits[pid])

    def _end_all(self) -> None:
        self._leaving = True
        for pid in list(self._names):
            proc.kill_group(pid)
        if self._zygote is not None:
            self._zygote.sock.close()
        if self._zygote_pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._zygote_pid, signal.SIGKILL)
                os.waitpid(self._zygote_pid, 0)
        if self._in_zygote:
            # One of them may have been forked and not yet announced: nobody would know of it.
            self._kill_unknown_children()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="keepstep-shim", description="Process parent of one node.")
    parser.add_argument("--node-dir", type=Path, required=True)
    parser.add_argument("--warm", choices=("torch", "none"), default="torch")
    parser.add_argument("--orphan-grace-s", type=float, default=60.0)
    options = parser.parse_args()
    Shim(options.node_dir, warm=options.warm, orphan_grace_s=options.orphan_grace_s).run()


if __name__ == "__main__":
    main()
