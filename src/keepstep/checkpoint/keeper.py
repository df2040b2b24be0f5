"""Keeper: sends this node's snapshots to the buddy node, and serves what it holds to newcomers.

A process of its own without torch, so that neither a trainer's nor an agent's death touches it. It owns no state: the
slots are files in memory, a restarted keeper finds them and goes on.

    python -m keepstep.checkpoint.keeper --node-dir D --host H [--token-file F]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import signal
import socket
import struct
import sys
from collections import deque
from pathlib import Path

import msgspec

from keepstep.checkpoint import pair
from keepstep.checkpoint.exceptions import CheckpointError, PeerRefused, SlotInvalid
from keepstep.checkpoint.files import read_int, write_atomic
from keepstep.checkpoint.peers import CHUNK, CHUNK_HEAD, Answer, Arrival, Get, KeeperRequest, Put, chunk_head
from keepstep.checkpoint.slot import Slot, Version
from keepstep.model.env import KEEPER_PORT_FILE, KEEPER_SOCKET, REPLICA_DIR, ROSTER_FILE, SNAP_DIR
from keepstep.model.topology import Roster
from keepstep.model.wire import FrameError, Unpacker, pack

MAX_CONNECTIONS = 64
MAX_REQUEST = 64 * 1024
SILENCE_S = 10.0
"""A transfer in which nothing moves for this long is given up."""
RETRY_FIRST_S, RETRY_LAST_S = 0.02, 1.0
REMEMBERED_ROSTERS = 4
"""Files of ranks that none of the last rosters puts here are removed; a recovery may still need the ones before."""
PORT_TRIES = 20
PORT_PAUSE_S = 0.1


class Keeper:
    """One node's keeper."""

    def __init__(self, node_dir: Path, host: str, token: str) -> None:
        self._dir, self._host, self._token = node_dir, host, token
        self._snap, self._replica = node_dir / SNAP_DIR, node_dir / REPLICA_DIR
        self._rosters: deque[Roster] = deque(maxlen=REMEMBERED_ROSTERS)
        self._changed: dict[int, asyncio.Event] = {}
        self._pushers: dict[int, asyncio.Task[None]] = {}
        self._open = 0
        self._said: set[str] = set()
        for directory in (self._snap, self._replica):
            directory.mkdir(parents=True, exist_ok=True)

    async def run(self) -> None:
        """Serve until cancelled."""
        server = await self._listen()
        port = server.sockets[0].getsockname()[1]
        write_atomic(self._dir / KEEPER_PORT_FILE, str(port).encode())
        bell = self._bell()
        self._read_roster()
        try:
            await server.serve_forever()
        finally:
            asyncio.get_running_loop().remove_reader(bell)
            bell.close()
            for task in self._pushers.values():
                task.cancel()

    # ---------------------------------------------------------------- news from trainers and the agent

    async def _listen(self) -> asyncio.Server:
        """The port of a predecessor again where possible: the roster names it."""
        before = read_int(self._dir / KEEPER_PORT_FILE) or 0
        for _ in range(PORT_TRIES if before else 0):
            with contextlib.suppress(OSError):
                return await asyncio.start_server(self._serve, self._host, before)
            await asyncio.sleep(PORT_PAUSE_S)
        return await asyncio.start_server(self._serve, self._host, 0)

    def _bell(self) -> socket.socket:
        path = self._dir / KEEPER_SOCKET
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.bind(str(path))
        bell.setblocking(False)
        asyncio.get_running_loop().add_reader(bell, self._rung, bell)
        return bell

    def _rung(self, bell: socket.socket) -> None:
        while True:
            try:
                words = bell.recv(256)
            except OSError:
                return
            if words == b"roster":
                self._read_roster()
            elif (rank := words.split(b" ", 1)[0]).isdigit():
                self._look_again(int(rank))

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
        if former is not None and _buddy_of(former, self._node) != _buddy_of(roster, self._node):
            self._forget_acks()
        self._tidy()
        for rank in pair.ranks_in(self._snap):
            self._look_again(rank)

    @property
    def _roster(self) -> Roster | None:
        return self._rosters[-1] if self._rosters else None

    @property
    def _node(self) -> str:
        return self._dir.name

    def _forget_acks(self) -> None:
        """A new buddy has nothing yet."""
        for rank in pair.ranks_in(self._snap):
            for _, path in pair.look(self._snap, rank):
                with contextlib.suppress(OSError, SlotInvalid), contextlib.closing(Slot(path)) as slot:
                    slot.acked = -1

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

    # ---------------------------------------------------------------- to the buddy

    def _look_again(self, rank: int) -> None:
        event = self._changed.setdefault(rank, asyncio.Event())
        event.set()
        task = self._pushers.get(rank)
        if task is None or task.done():
            self._pushers[rank] = asyncio.get_running_loop().create_task(self._push_for_ever(rank, event))

    async def _push_for_ever(self, rank: int, event: asyncio.Event) -> None:
        pause = RETRY_FIRST_S
        while True:
            await event.wait()
            event.clear()
            try:
                await self._push_newest(rank)
                pause = RETRY_FIRST_S
            except (OSError, CheckpointError, FrameError, EOFError, TimeoutError) as error:
                self._say(f"push {rank}", f"rank {rank}: no replica on the buddy node yet ({error}); trying again")
                event.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_LAST_S)

    async def _push_newest(self, rank: int) -> None:
        """Older versions are skipped: a buddy that lags catches up with the newest."""
        roster = self._roster
        buddy = _buddy_of(roster, self._node) if roster else None
        place = roster.place(buddy) if roster and buddy else None  # type: ignore[arg-type]
        newest = pair.look(self._snap, rank)
        if roster is None or place is None or not newest:
            return
        version, path = newest[0]
        with contextlib.closing(Slot(path)) as slot:
            if slot.version != version or slot.acked == version.step:
                return
            serial, size = slot.serial, slot.used
            async with asyncio.timeout(SILENCE_S):
                reader, writer = await asyncio.open_connection(place.host, place.keeper_port)
            try:
                put = Put(
                    job=roster.job,
                    token=self._token,
                    epoch=roster.epoch,
                    key=roster.key,
                    rank=rank,
                    version=version,
                    size=size,
                )
                writer.write(pack(put))
                _require(await _read_answer(reader))
                if not await _send_slot(writer, slot, serial, size):
                    return  # the trainer has moved on to a newer step and will ring
                _require(await _read_answer(reader))
            finally:
                await _close(writer)
            still = self._roster is not None and _buddy_of(self._roster, self._node) == buddy
            if still and slot.serial == serial:  # what a former buddy holds counts no more
                slot.acked = version.step

    # ---------------------------------------------------------------- from peers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                writer.write(pack(Answer(ok=False, why=f"{MAX_CONNECTIONS} transfers are open already; try again")))
                return
            request = await _read_request(reader)
            if why := self._fence(request):
                writer.write(pack(Answer(ok=False, why=why)))
                return
            if isinstance(request, Put):
                await self._take(request, reader, writer)
            elif isinstance(request, Get):
                await self._give(request, writer)
            else:
                writer.write(pack(Answer(ok=True, versions=self._versions(request.rank))))
        except (OSError, EOFError, FrameError, TimeoutError):
            pass  # the peer is gone or speaks nonsense: nothing was completed, nobody waits
        finally:
            self._open -= 1
            await _close(writer)

    def _fence(self, request: KeeperRequest) -> str:
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

    def _held(self, rank: int) -> list[tuple[Version, Path]]:
        held = pair.look(self._snap, rank) + pair.look(self._replica, rank)
        return sorted(held, key=lambda item: item[0], reverse=True)

    def _versions(self, rank: int) -> tuple[Version, ...]:
        return tuple(dict.fromkeys(version for version, _ in self._held(rank)))

    async def _give(self, request: Get, writer: asyncio.StreamWriter) -> None:
        path = next((p for v, p in self._held(request.rank) if v == request.version), None)
        if path is None:
            why = f"no version of step {request.version.step} of rank {request.rank} here"
            writer.write(pack(Answer(ok=False, why=why)))
            return
        with contextlib.closing(Slot(path)) as slot:
            serial, size = slot.serial, slot.used
            writer.write(pack(Answer(ok=True, size=size)))
            whole = await _send_slot(writer, slot, serial, size)
            writer.write(pack(Answer(ok=whole, why="" if whole else "the version was overwritten meanwhile")))

    async def _take(self, request: Put, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            arrival = Arrival(self._replica, request.rank, request.version, request.size)
        except (CheckpointError, OSError) as error:
            writer.write(pack(Answer(ok=False, why=str(error))))
            return
        writer.write(pack(Answer(ok=True)))
        try:
            while arrival.received < request.size:
                async with asyncio.timeout(SILENCE_S):
                    length, crc = CHUNK_HEAD.unpack(await reader.readexactly(CHUNK_HEAD.size))
                    if not 0 < length <= CHUNK:
                        raise SlotInvalid(f"a chunk of {length} bytes is above the limit of {CHUNK}")
                    arrival.add(await reader.readexactly(length), crc)
            arrival.finish()
            writer.write(pack(Answer(ok=True)))
        except SlotInvalid as error:
            self._say(f"take {request.rank}", str(error))
            writer.write(pack(Answer(ok=False, why=str(error))))
        finally:
            arrival.close()

    def _say(self, topic: str, text: str) -> None:
        """Once per topic: the same gap every step would drown the log."""
        if topic not in self._said:
            self._said.add(topic)
            print(f"keepstep keeper on {self._node}: {text}", file=sys.stderr, flush=True)


async def _send_slot(writer: asyncio.StreamWriter, slot: Slot, serial: int, size: int) -> bool:
    """Send all bytes in checked chunks; false when the trainer began to overwrite them meanwhile."""
    slot.refresh()
    for start in range(0, size, CHUNK):
        data = slot.memory[start : min(start + CHUNK, size)]
        if slot.serial != serial or slot.version is None:
            return False
        writer.write(chunk_head(data))
        writer.write(data)
        async with asyncio.timeout(SILENCE_S):
            await writer.drain()
    return True


async def _read_request(reader: asyncio.StreamReader) -> KeeperRequest:
    async with asyncio.timeout(SILENCE_S):
        head = await reader.readexactly(4)
        (length,) = struct.unpack(">I", head)
        if length > MAX_REQUEST:
            raise FrameError(f"request of {length} bytes")
        unpacker: Unpacker[KeeperRequest] = Unpacker(KeeperRequest)
        return next(unpacker.feed(head + await reader.readexactly(length)))


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    async with asyncio.timeout(SILENCE_S):
        head = await reader.readexactly(4)
        (length,) = struct.unpack(">I", head)
        if length > MAX_REQUEST:
            raise FrameError(f"answer of {length} bytes")
        unpacker: Unpacker[Answer] = Unpacker(Answer)
        return next(unpacker.feed(head + await reader.readexactly(length)))


def _require(answer: Answer) -> None:
    if not answer.ok:
        raise PeerRefused(answer.why)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.wait_closed()


def _buddy_of(roster: Roster, node: str) -> str | None:
    return next((place.buddy for place in roster.places if place.node == node), None)


def main(argv: list[str] | None = None) -> None:
    """Entry of ``python -m keepstep.checkpoint.keeper``."""
    ask = argparse.ArgumentParser(prog="keepstep.checkpoint.keeper", description="Keep and serve snapshots in memory.")
    ask.add_argument("--node-dir", required=True, type=Path)
    ask.add_argument("--host", required=True)
    ask.add_argument("--token-file", default="")
    args = ask.parse_args(argv)
    token = Path(args.token_file).read_text().strip() if args.token_file else ""
    keeper = Keeper(args.node_dir, args.host, token)

    async def serve() -> None:
        task = asyncio.ensure_future(keeper.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(serve())


if __name__ == "__main__":
    main()
