"""Keeper: seals this node's snapshots, sends them to the buddy node, and serves what it holds to newcomers.

A process of its own without torch, so that neither a trainer's nor an agent's death touches it. It owns no state: the
slots are files in memory, a restarted keeper finds them and goes on. One loop listens to trainers, agent and clock;
everything that takes long has a thread.

    python -m keepstep.checkpoint.keeper --node-dir D --host H [--token-file F] [--buddy HOST:PORT] [--linger-s N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hmac
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from keepstep.checkpoint import config, pair
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.files import read_int, write_atomic
from keepstep.checkpoint.keeper_seal import Sealer
from keepstep.checkpoint.keeper_send import CONFIRM_S, Pusher, Target
from keepstep.checkpoint.keeper_serve import MAX_CONNECTIONS, Desk
from keepstep.checkpoint.keeper_take import Inbox
from keepstep.checkpoint.notes import Teller
from keepstep.checkpoint.peers import Request
from keepstep.checkpoint.rate import Pace
from keepstep.checkpoint.scrub import SCRUB_EVERY_S, Scrubber, Traffic
from keepstep.model.env import (
    CHECKPOINT_FILE,
    KEEPER_PORT_FILE,
    KEEPER_SOCKET,
    NODE,
    REPLICA_DIR,
    ROSTER_FILE,
    SNAP_DIR,
)
from keepstep.model.topology import Roster

REMEMBERED_ROSTERS = 4
"""Files of ranks that none of the last rosters puts here are removed; a recovery may still need the ones before."""
PORT_TRIES = 20
"""How often a keeper tries to get its predecessor's port before it takes another one."""
PORT_PAUSE_S = 0.1
LOCK_FILE = "keeper.lock"
"""Held by the keeper of a node directory: there is never a second one."""
LOCK_S = 2.0
"""How long a keeper waits for a predecessor that is on its way out."""
LOOK_S = 0.5
"""How often the keeper looks whether its settings have changed and whether anybody still needs it."""
ALREADY_KEPT = 3
"""Exit code of a keeper that finds another one at work in its node directory."""


class Keeper:
    """One node's keeper.

    Args:
        buddy: where replicas go as long as no roster says otherwise.
        linger_s: ends by itself when nothing has been asked of it for this long; 0 for never.
    """

    def __init__(
        self,
        node_dir: Path,
        host: str,
        token: str,
        *,
        job: str = "",
        buddy: tuple[str, int] | None = None,
        linger_s: float = 0.0,
        scrub_every_s: float = SCRUB_EVERY_S,
        confirm_s: float = CONFIRM_S,
    ) -> None:
        self._dir, self._host, self._token = node_dir, host, token
        self._snap, self._replica = node_dir / SNAP_DIR, node_dir / REPLICA_DIR
        self._linger_s, self._confirm_s = linger_s, confirm_s
        self._rosters: deque[Roster] = deque(maxlen=REMEMBERED_ROSTERS)
        self._target = _direct(buddy, job, token)
        self._pushers: dict[int, Pusher] = {}
        self._sealers: dict[int, Sealer] = {}
        self._said: set[str] = set()
        self._wanted_at = time.monotonic()
        self._pace, self._policy_mark = Pace(), (0, 0)
        self._teller, self._traffic = Teller(node_dir), Traffic()
        self._snap.mkdir(parents=True, exist_ok=True)
        self._inbox = Inbox(self._replica, fence=self._fence, tell=self._teller.tell, say=self._say)
        self._desk = Desk(
            (self._snap, self._replica), let_in=self._let_in, inbox=self._inbox, traffic=self._traffic, say=self._say
        )
        self._scrubber = Scrubber(
            {self._snap: True, self._replica: False},
            traffic=self._traffic,
            tell=self._teller.tell,
            every_s=scrub_every_s,
        )

    async def run(self) -> None:
        """Serve until cancelled, or until nobody has wanted anything for ``linger_s``."""
        loop = asyncio.get_running_loop()
        server = await self._listen()
        bell = self._bell()
        loop.add_reader(server, self._desk.accept, server)
        loop.add_reader(bell, self._rung, bell)
        # Only now: whoever sees the port finds somebody who listens, at the bell, too.
        write_atomic(self._dir / KEEPER_PORT_FILE, str(server.getsockname()[1]).encode())
        self._read_policy()
        self._read_roster()
        for rank in pair.ranks_in(self._snap):
            self._look_again(rank)
        self._scrubber.start()
        try:
            while self._needed():
                await asyncio.sleep(LOOK_S)
                self._read_policy()
        finally:
            loop.remove_reader(server)
            loop.remove_reader(bell)
            server.close()
            bell.close()
            self._scrubber.stop()
            for pusher in self._pushers.values():
                pusher.stop()
            for sealer in self._sealers.values():
                sealer.stop()

    # ---------------------------------------------------------------- news from trainers and the agent

    async def _listen(self) -> socket.socket:
        """The port of a predecessor again where possible: the roster names it."""
        before = read_int(self._dir / KEEPER_PORT_FILE) or 0
        family = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)[0][0]
        for _ in range(PORT_TRIES if before else 0):
            with contextlib.suppress(OSError):
                return _silent(socket.create_server((self._host, before), family=family, backlog=MAX_CONNECTIONS))
            await asyncio.sleep(PORT_PAUSE_S)
        return _silent(socket.create_server((self._host, 0), family=family, backlog=MAX_CONNECTIONS))

    def _bell(self) -> socket.socket:
        path = self._dir / KEEPER_SOCKET
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.bind(str(path))
        return _silent(bell)

    def _rung(self, bell: socket.socket) -> None:
        while True:
            try:
                words = bell.recv(256)
            except OSError:
                return
            self._wanted_at = time.monotonic()
            if words == b"roster":
                self._read_policy()
                self._read_roster()
            elif (rank := words.split(b" ", 1)[0]).isdigit():
                self._look_again(int(rank))

    def _needed(self) -> bool:
        idle_s = time.monotonic() - self._wanted_at
        return not self._linger_s or self._traffic.busy or idle_s < self._linger_s

    def _read_policy(self) -> None:
        """The bandwidth budget, again whenever its file is another one."""
        try:
            found = (self._dir / CHECKPOINT_FILE).stat()
            mark = (found.st_ino, found.st_mtime_ns)
        except OSError:
            mark = (0, 0)
        if mark == self._policy_mark:
            return
        self._policy_mark = mark
        try:
            self._pace.set_rate(config.read(self._dir).policy.peer_rate)
        except CheckpointError as error:
            self._say("policy", f"{error}; the bandwidth budget stays {self._pace.rate:g} bytes per second")

    def _read_roster(self) -> None:
        try:
            roster = msgspec.msgpack.decode((self._dir / ROSTER_FILE).read_bytes(), type=Roster)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            self._say("roster", f"{self._dir / ROSTER_FILE} is not readable: {error}")
            return
        former = self._roster
        if former is not None and roster.epoch < former.epoch:
            return
        self._rosters.append(roster)
        self._target = self._named_target(roster)
        self._tidy()
        for rank in pair.ranks_in(self._snap):
            self._look_again(rank, confirm=True)

    @property
    def _roster(self) -> Roster | None:
        return self._rosters[-1] if self._rosters else None

    @property
    def _node(self) -> str:
        """As the agent says; the directory's name may be a hash where the path would have become too long."""
        return os.environ.get(NODE) or self._dir.name

    def _named_target(self, roster: Roster) -> Target | None:
        buddy = _buddy_of(roster, self._node)
        place = roster.place(buddy) if buddy else None  # type: ignore[arg-type]
        if place is None or not place.keeper_port:
            return None
        request = {"job": roster.job, "token": self._token, "epoch": roster.epoch, "key": roster.key}
        return Target(host=place.host, port=place.keeper_port, request=request)

    def _tidy(self) -> None:
        if len(self._rosters) < REMEMBERED_ROSTERS:
            return
        mine: set[int] = set()
        kept: set[int] = set()
        for roster in self._rosters:
            for member in roster.members:
                if member.node == self._node:
                    mine.add(member.rank)
                if member.replica_node == self._node or _buddy_of(roster, member.node) == self._node:
                    kept.add(member.rank)
        for directory, wanted in ((self._snap, mine), (self._replica, kept)):
            for rank in pair.ranks_in(directory) - wanted:
                for path in directory.glob(f"rank{rank}.*"):
                    path.unlink(missing_ok=True)
                if directory == self._replica:
                    self._inbox.forget(rank)

    def _look_again(self, rank: int, *, confirm: bool = False) -> None:
        pusher = self._pushers.get(rank)
        if pusher is None or not pusher.is_alive():
            pusher = self._pushers[rank] = Pusher(
                self._snap,
                rank,
                target=lambda: self._target,
                pace=self._pace,
                traffic=self._traffic,
                tell=self._teller.tell,
                say=self._say,
                confirm_s=self._confirm_s,
            )
            pusher.start()
        if confirm:
            pusher.ring(confirm=True)
        sealer = self._sealers.get(rank)
        if sealer is None or not sealer.is_alive():
            sealer = self._sealers[rank] = Sealer(
                self._snap, rank, lambda: self._pushers[rank].ring(), calm=lambda: self._target is None
            )
            sealer.start()
        sealer.ring()

    def _fence(self, request: Request) -> str:
        """Why a request must not be served, in a sentence; empty where it may."""
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            return "wrong token"
        roster = self._roster
        if roster is None:
            return ""
        if request.job != roster.job:
            return f"this keeper belongs to job {roster.job}, not {request.job}"
        if request.epoch < roster.epoch:
            return f"epoch {request.epoch} is fenced off by {roster.epoch}"
        if request.epoch == roster.epoch and request.key != roster.key:
            return f"roster {request.key} is a rival of {roster.key}"
        return ""

    def _let_in(self, request: Request) -> str:
        if not (why := self._fence(request)):
            self._wanted_at = time.monotonic()
        return why

    def _say(self, topic: str, text: str) -> None:
        """Once per topic: the same gap every step would drown the log."""
        if topic not in self._said:
            self._said.add(topic)
            print(f"keepstep keeper on {self._node}: {text}", file=sys.stderr, flush=True)


def _buddy_of(roster: Roster, node: str) -> str | None:
    return next((place.buddy for place in roster.places if place.node == node), None)


def _direct(buddy: tuple[str, int] | None, job: str, token: str) -> Target | None:
    if buddy is None:
        return None
    return Target(host=buddy[0], port=buddy[1], request={"job": job, "token": token, "epoch": 0, "key": ""})


def _silent(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


def _only_one(node_dir: Path) -> int | None:
    """Hold the node directory until this process ends; ``None`` when another keeper does."""
    node_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(node_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > until:
                os.close(fd)
                return None
            time.sleep(PORT_PAUSE_S)
        else:
            return fd


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def main(argv: list[str] | None = None) -> None:
    """Entry of ``python -m keepstep.checkpoint.keeper``."""
    ask = argparse.ArgumentParser(prog="keepstep.checkpoint.keeper", description="Keep and serve snapshots in memory.")
    ask.add_argument("--node-dir", required=True, type=Path)
    ask.add_argument("--host", required=True, help="address on which other nodes' keepers reach this one")
    ask.add_argument("--token-file", default="")
    ask.add_argument("--buddy", type=_address, help="HOST:PORT of another keeper, used until a roster names one")
    ask.add_argument("--job", default="", help="name of the job, for --buddy")
    ask.add_argument("--linger-s", type=float, default=0.0, help="end after so long without a word; 0 for never")
    ask.add_argument("--scrub-every-s", type=float, default=SCRUB_EVERY_S)
    ask.add_argument("--confirm-s", type=float, default=CONFIRM_S, help="how often the buddy is asked what it has")
    args = ask.parse_args(argv)
    if _only_one(args.node_dir) is None:
        print(f"keepstep keeper: another one is at work in {args.node_dir}", file=sys.stderr)
        raise SystemExit(ALREADY_KEPT)
    token = Path(args.token_file).read_text().strip() if args.token_file else ""
    keeper = Keeper(
        args.node_dir,
        args.host,
        token,
        job=args.job,
        buddy=args.buddy,
        linger_s=args.linger_s,
        scrub_every_s=args.scrub_every_s,
        confirm_s=args.confirm_s,
    )

    async def serve() -> None:
        task = asyncio.ensure_future(keeper.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(serve())


if __name__ == "__main__":
    main()
