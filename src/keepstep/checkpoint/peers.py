"""Keepers' words, and the client that a newcomer uses to fetch its rank's state from another node.

One request per connection: a frame of ``model.wire``'s shape, then, for ``Get`` and ``Put``, the slot file's bytes in
chunks that each carry a crc32. A damaged chunk ends the transfer with an error; it never becomes a version.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from keepstep.checkpoint.exceptions import PeerRefused, PeerUnreachable, SlotInvalid
from keepstep.checkpoint.slot import HEADER, Slot, Version, header_is_sound, to_overwrite
from keepstep.model.ids import JobId
from keepstep.model.wire import Frame, FrameError, Unpacker, pack

CHUNK = 4 * 1024 * 1024
MAX_SLOT = 1 << 42
"""Bytes; a larger announcement is a protocol error, not a reason to allocate."""
CONNECT_S = 2.0
SILENCE_S = 10.0
"""A transfer in which nothing arrives for this long has broken off."""
CHUNK_HEAD = struct.Struct(">II")


class Request(Frame, frozen=True, kw_only=True):
    """``epoch`` and ``key`` fence: a keeper refuses words of a roster older than its own, or of its rival."""

    job: JobId
    token: str
    epoch: int
    key: str
    rank: int


class Have(Request, frozen=True, kw_only=True):
    """Which complete versions of this rank are there?"""


class Get(Request, frozen=True, kw_only=True):
    version: Version


class Put(Request, frozen=True, kw_only=True):
    """Keep this version for me; ``size`` bytes in chunks follow."""

    version: Version
    size: int


class Answer(Frame, frozen=True, kw_only=True):
    ok: bool
    why: str = ""
    versions: tuple[Version, ...] = ()
    size: int = 0


KeeperRequest = Have | Get | Put


def chunk_head(data: bytes | memoryview) -> bytes:
    """What stands before a chunk: length and checksum."""
    return CHUNK_HEAD.pack(len(data), zlib.crc32(data))


class Arrival:
    """A version that is coming in: takes checksummed chunks in order, counts only after ``finish``."""

    def __init__(self, directory: Path, rank: int, version: Version, size: int) -> None:
        if not HEADER < size <= MAX_SLOT:
            raise SlotInvalid(f"rank {rank} step {version.step}: a version of {size} bytes cannot be right")
        directory.mkdir(parents=True, exist_ok=True)
        pair = [Slot(directory / f"rank{rank}.{i}", create=True) for i in range(2)]
        index = next((i for i, s in enumerate(pair) if s.version == version), -1)
        if index < 0:
            index = to_overwrite([slot.version for slot in pair], version.step)
        pair[1 - index].close()
        self.slot, self.version, self.size, self.received = pair[index], version, size, 0
        self._header = b""
        try:
            self.slot.begin()
            self._serial = self.slot.serial
            self.slot.grow(size)
        except BaseException:
            self.slot.close()
            raise

    def add(self, data: bytes | bytearray | memoryview, crc: int) -> None:
        if zlib.crc32(data) != crc:
            raise SlotInvalid(
                f"{self.slot.path.name} step {self.version.step}: bytes {self.received}+{len(data)} were damaged "
                f"on the way"
            )
        start, end = self.received, self.received + len(data)
        if end > self.size:
            raise SlotInvalid(f"{self.slot.path.name}: {end} bytes came where {self.size} were announced")
        self._check_alone()
        if start < HEADER:
            take = min(HEADER - start, len(data))
            self._header += bytes(data[:take])
            data, start = data[take:], start + take
        if len(data):
            self.slot.memory[start:end] = bytes(data)
        self.received = end

    def finish(self) -> Path:
        """All bytes are here and sound: from now on the version counts."""
        if self.received != self.size or not header_is_sound(self._header):
            raise SlotInvalid(f"{self.slot.path.name}: {self.received} of {self.size} bytes, or no sound header")
        self._check_alone()
        self.slot.adopt(self._header)
        if self.slot.version != self.version or self.slot.used != self.size:
            self.slot.invalidate()
            raise SlotInvalid(f"{self.slot.path.name}: holds {self.slot.version} where {self.version} was announced")
        return self.slot.path

    def close(self) -> None:
        self.slot.close()

    def _check_alone(self) -> None:
        """A sender that was cut off and came back writes here anew; the rest of its first try must not mix in."""
        if self.slot.serial != self._serial:
            raise SlotInvalid(f"{self.slot.path.name} step {self.version.step}: a newer transfer has begun")


class PeerClient:
    """Talks to one keeper with blocking sockets; every wait has a limit and asks ``stop`` in between.

    Args:
        stop: true when the caller has something more urgent; the transfer then ends with ``PeerUnreachable``.
    """

    def __init__(
        self, *, host: str, port: int, job: JobId, token: str, epoch: int, key: str, stop: Callable[[], bool]
    ) -> None:
        self._host, self._port, self._stop = host, port, stop
        self._base = {"job": job, "token": token, "epoch": epoch, "key": key}

    def have(self, rank: int) -> tuple[Version, ...]:
        """Complete versions of ``rank`` over there, newest first."""
        with self._connect() as sock:
            sock.sendall(pack(Have(**self._base, rank=rank)))  # type: ignore[arg-type]
            return self._answer(sock).versions

    def fetch(self, rank: int, version: Version, directory: Path) -> Path:
        """Bring one version into ``directory`` (as this rank's own) and return its file."""
        with self._connect() as sock:
            sock.sendall(pack(Get(**self._base, rank=rank, version=version)))  # type: ignore[arg-type]
            size = self._answer(sock).size
            arrival = Arrival(directory, rank, version, size)
            try:
                while arrival.received < size:
                    length, crc = CHUNK_HEAD.unpack(self._read(sock, CHUNK_HEAD.size))
                    if not 0 < length <= CHUNK:
                        raise SlotInvalid(f"keeper {self._host}:{self._port} sent a chunk of {length} bytes")
                    arrival.add(self._read(sock, length), crc)
                if not self._answer(sock).ok:
                    raise SlotInvalid(f"keeper {self._host}:{self._port}: the version changed while it was sent")
                return arrival.finish()
            finally:
                arrival.close()

    def _connect(self) -> socket.socket:
        try:
            sock = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
        except OSError as error:
            raise PeerUnreachable(f"keeper {self._host}:{self._port} cannot be reached: {error}") from error
        sock.settimeout(0.1)
        return sock

    def _answer(self, sock: socket.socket) -> Answer:
        (length,) = struct.unpack(">I", head := self._read(sock, 4))
        unpacker: Unpacker[Answer] = Unpacker(Answer)
        if length > CHUNK:
            raise PeerUnreachable(f"{self._host}:{self._port} does not speak like a keeper")
        try:
            (answer,) = unpacker.feed(bytes(head + self._read(sock, length)))
        except FrameError as error:
            raise PeerUnreachable(f"{self._host}:{self._port} does not speak like a keeper: {error}") from error
        if not answer.ok:
            raise PeerRefused(f"keeper {self._host}:{self._port}: {answer.why}")
        return answer

    def _read(self, sock: socket.socket, size: int) -> bytearray:
        data, view_at, silent_since = bytearray(size), 0, time.monotonic()
        view = memoryview(data)
        while view_at < size:
            try:
                got = sock.recv_into(view[view_at:])
            except TimeoutError:
                if self._stop() or time.monotonic() - silent_since > SILENCE_S:
                    raise PeerUnreachable(
                        f"keeper {self._host}:{self._port} went silent or is no longer needed"
                    ) from None
                continue
            except OSError as error:
                raise PeerUnreachable(f"keeper {self._host}:{self._port} broke off: {error}") from error
            if not got:
                raise PeerUnreachable(f"keeper {self._host}:{self._port} closed the connection early")
            view_at, silent_since = view_at + got, time.monotonic()
        return data
