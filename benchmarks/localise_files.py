"""A file system that can stop answering: a FUSE server of a few calls, in a thread of this process.

It holds one endless file of zeros per rank. A read beyond a place that is told gets no answer until it is released, as
from a hard-mounted NFS server that has gone away: the reader sleeps in the kernel and not even SIGKILL ends it.
Protocol: https://www.kernel.org/doc/html/latest/filesystems/fuse/, structures of include/uapi/linux/fuse.h, version
7.31. Needs root and ``/dev/fuse``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Collection
from pathlib import Path

SIZE = 1 << 40
MAX_REQUEST = 1 << 17
VALID_S = 3600
DIRECT_IO = 1
"""Every read comes here; the page cache would hide the stall."""
_MNT_FORCE, _MNT_DETACH = 1, 2
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE = 1, 2, 3, 14, 15, 18
_FLUSH, _INIT, _OPENDIR, _RELEASEDIR, _INTERRUPT, _DESTROY, _BATCH_FORGET = 25, 26, 27, 29, 36, 38, 42
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ROOT = 1


class StallingFiles:
    """Mounts at ``folder`` on ``start``; files ``rank0`` to ``rank<count - 1>``.

    Raises:
        OSError: no permission, or no ``/dev/fuse``.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self._stalled: dict[int, int] = {}
        self._held: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._fd = -1
        self._thread = threading.Thread(target=self._serve, name="files", daemon=True)

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"keepstep-files", str(self.folder).encode(), b"fuse", 0, options.encode()):
            code = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(code, f"mount {self.folder}: {os.strerror(code)}")
        self._thread.start()

    def stall(self, ranks: Collection[int], place: int) -> None:
        """From now on, reads of these ranks' files at or behind that byte are not answered."""
        with self._lock:
            self._stalled = dict.fromkeys(ranks, place)

    def release(self) -> None:
        """Answer what waits, and everything that comes."""
        with self._lock:
            self._stalled = {}
            held, self._held = self._held, []
        for unique, wanted in held:
            self._answer(unique, bytes(wanted))

    @property
    def waiting(self) -> int:
        """Reads that wait for an answer."""
        return len(self._held)

    def close(self) -> None:
        """Let everybody go who still waits (with an error), and unmount."""
        path, libc = str(self.folder).encode(), ctypes.CDLL(None)
        libc.umount2(path, _MNT_FORCE)
        libc.umount2(path, _MNT_DETACH)
        if self._thread.is_alive():
            self._thread.join(5.0)

    # ------------------------------------------------------------ the server

    def _serve(self) -> None:
        try:
            while True:
                try:
                    request = os.read(self._fd, MAX_REQUEST)
                except InterruptedError:
                    continue
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR):  # the asker has gone away
                        continue
                    return  # ENODEV: unmounted
                length, opcode, unique, node, *_ = _IN.unpack_from(request)
                self._handle(opcode, unique, node, request[_IN.size : length])
        finally:
            os.close(self._fd)

    def _handle(self, opcode: int, unique: int, node: int, body: bytes) -> None:
        match opcode:
            case _ if opcode == _INIT:
                major, minor, readahead, _ = struct.unpack_from("<4I", body)
                answer = struct.pack("<4I2H2I2H8I", 7, min(31, minor), readahead, 0, 16, 12, 1 << 16, 1, 0, 0, *[0] * 8)
                self._answer(unique, answer if major == 7 else b"", 0 if major == 7 else errno.EPROTO)
            case _ if opcode == _LOOKUP:
                name = body.rstrip(b"\0").decode()
                rank = int(name[4:]) if name.startswith("rank") and name[4:].isdigit() else -1
                found = 0 <= rank < self.count and node == _ROOT
                entry = struct.pack("<4Q2I", rank + 2, 0, VALID_S, VALID_S, 0, 0) + self._attr(rank + 2)
                self._answer(unique, entry if found else b"", 0 if found else errno.ENOENT)
            case _ if opcode == _GETATTR:
                self._answer(unique, struct.pack("<Q2I", VALID_S, 0, 0) + self._attr(node))
            case _ if opcode in (_OPEN, _OPENDIR):
                self._answer(unique, struct.pack("<Q2I", 0, DIRECT_IO if opcode == _OPEN else 0, 0))
            case _ if opcode == _READ:
                self._read(unique, node - 2, *struct.unpack_from("<QI", body, 8))
            case _ if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                pass  # none of them expects an answer
            case _ if opcode in (_RELEASE, _RELEASEDIR, _FLUSH, _DESTROY):
                self._answer(unique, b"")
            case _:
                self._answer(unique, b"", errno.ENOSYS)

    def _read(self, unique: int, rank: int, offset: int, wanted: int) -> None:
        with self._lock:
            if offset >= self._stalled.get(rank, SIZE):
                self._held.append((unique, wanted))
                return
        self._answer(unique, bytes(wanted))

    def _attr(self, node: int) -> bytes:
        folder = node == _ROOT
        mode = stat.S_IFDIR | 0o755 if folder else stat.S_IFREG | 0o644
        size = 0 if folder else SIZE
        owner = (os.getuid(), os.getgid())
        return _ATTR.pack(node, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 1, *owner, 0, 4096, 0)

    def _answer(self, unique: int, data: bytes, error: int = 0) -> None:
        with contextlib.suppress(OSError):  # ENOENT: the asker has gone away
            os.write(self._fd, _OUT.pack(_OUT.size + len(data), -error, unique) + data)
