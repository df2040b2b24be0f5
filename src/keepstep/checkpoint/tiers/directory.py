"""Directory: a tier on a file system, local or shared.

An object is written under a temporary name beside its place, made durable, then renamed, then the directory is made
durable: after a power loss there is the whole object or none (``man 2 fsync``, ``man 2 rename``). New directories are
made durable in their parents for the same reason.

A marker file in the root tells a mounted file system from the bare mount point that it leaves behind: a tier that has
seen the marker does nothing without it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from keepstep.checkpoint.exceptions import TierAway, TierDenied, TierError, TierFull, TierMissing
from keepstep.checkpoint.process import place
from keepstep.checkpoint.tiers.files import Files

MARKER = ".keepstep-tier"
MARKER_TEXT = b"Durable checkpoints of keepstep. This file shows that the file system is mounted; do not remove it.\n"
TEMPORARY = ".tmp~"
"""Names that begin so are leftovers or being written; nobody reads them."""
FOLDER_TRIES = 10
"""How often a folder is made again that a collector removed between its making and its use."""
FORGET_ABOVE = 1 << 20
"""Files of at least so many bytes are dropped from the page cache once they are durable."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL}
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_numbers = itertools.count()


def translate(error: OSError, what: str) -> TierError:
    """The tier's word for an error of the operating system."""
    text = f"{what}: {error.strerror or error}"
    if error.errno in _FULL:
        return TierFull(f"{text}; free space there, or keep fewer generations")
    if error.errno in _DENIED:
        return TierDenied(f"{text}; make it writable for this user, or name another place")
    if error.errno == errno.ENOENT:
        return TierMissing(text)
    return TierAway(f"{text}; is the file system mounted and healthy?")


class DirectoryTier:
    """Objects are files below ``root``.

    Args:
        seen: the marker has been there before, so a root without it is a file system that went away.
        create: make the root where there is none; without it a missing root is an error.
    """

    def __init__(
        self, root: Path, label: str = "local", *, create: bool = False, seen: bool = False, files: Files | None = None
    ) -> None:
        self.root, self.label, self.where = root, label, str(root)
        self._files = files or Files()
        self._made: set[Path] = set()
        self._seen = seen
        if seen:
            self._check()
        elif create:
            self._settle()
        else:
            self._look()

    # ---------------------------------------------------------------- writing

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = self._path(name)
        self._check()
        try:
            fresh, fd = self._open(path)
            try:
                size = self._fill(fd, chunks)
                if size >= FORGET_ABOVE:
                    self._files.forget(fresh)
                self._files.rename(fresh, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._files.unlink(fresh)
                self._drop_if_empty(path.parent)
                raise
            self._files.fsync_directory(path.parent)
        except OSError as error:
            raise self._explain(error, name) from error
        return size

    def _fill(self, fd: int, chunks: Iterable[bytes | memoryview]) -> int:
        size = 0
        try:
            for chunk in chunks:
                with memoryview(chunk) as view, view.cast("B") as data:
                    done = 0
                    while done < len(data):
                        done += self._files.write(fd, data[done:])
                    size += done
            self._files.fsync(fd)  # never tried twice: after a failure the kernel may have dropped the pages
        finally:
            self._files.close(fd)
        return size

    def _open(self, path: Path) -> tuple[Path, int]:
        """A temporary file beside ``path``, named after who writes it; ``O_EXCL``, so never somebody else's."""
        for attempt in itertools.count():
            self._make_folder(path.parent)
            fresh = path.parent / f"{TEMPORARY}{_host()}~{os.getpid()}~{next(_numbers)}~{path.name}"
            try:
                return fresh, self._files.create(fresh)
            except FileExistsError:  # left by a process of this number before
                self._files.unlink(fresh)
            except FileNotFoundError:
                self._made.discard(path.parent)
                if attempt >= FOLDER_TRIES:
                    raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: Path) -> None:
        """Directories from the root down to ``folder``, each durable in its parent before anything is put into it."""
        if folder == self.root or folder in self._made:
            return
        self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            self._files.mkdir(folder)
        self._files.fsync_directory(folder.parent)  # also where somebody else made it and died before this
        self._made.add(folder)

    def remove(self, name: str) -> None:
        path = self._path(name)
        self._check()
        try:
            self._files.unlink(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise self._explain(error, name) from error
            return
        gone = self._drop_if_empty(path.parent)
        with contextlib.suppress(OSError):
            self._files.fsync_directory(path.parent.parent if gone else path.parent)

    def _drop_if_empty(self, folder: Path) -> bool:
        """No empty folders are left; whoever makes one for an object of its own at this instant makes it again."""
        if folder == self.root:
            return False
        self._made.discard(folder)
        try:
            self._files.rmdir(folder)
        except OSError:  # not empty
            return False
        return True

    def sweep(self, older_than_s: float) -> int:
        """Temporary files of processes of this host that are gone, and of other hosts when old enough."""
        self._check()
        count = 0
        for path in self._walk(self.root, ""):
            if not path.rpartition("/")[2].startswith(TEMPORARY):
                continue
            full = self.root / path
            with contextlib.suppress(OSError):
                if _writer_is_gone(full.name) or time.time() - self._files.changed(full) > older_than_s:
                    self._files.unlink(full)
                    count += 1
        return count

    # ---------------------------------------------------------------- reading

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            data = self._files.read(self._path(name), start, length)
        except OSError as error:
            raise self._explain(error, name) from error
        if length is not None and len(data) < length:
            raise TierMissing(f"{self.where}/{name}: ends at byte {start + len(data)}, {start + length} were expected")
        return data

    def size(self, name: str) -> int:
        try:
            return self._files.size(self._path(name))
        except OSError as error:
            raise self._explain(error, name) from error

    def names(self, prefix: str = "") -> Iterator[str]:
        self._check()
        folder = prefix.rpartition("/")[0]
        try:
            found = sorted(name for name in self._walk(self.root / folder, folder) if name.startswith(prefix))
        except OSError as error:
            raise self._explain(error, folder) from error
        return (name for name in found if not name.rpartition("/")[2].startswith(".") and name != MARKER)

    def path(self, name: str) -> Path | None:
        return self._path(name)

    def _walk(self, folder: Path, prefix: str) -> Iterator[str]:
        try:
            entries = list(self._files.entries(folder))
        except FileNotFoundError:
            return
        for name, is_folder in entries:
            if is_folder:
                yield from self._walk(folder / name, f"{prefix}/{name}" if prefix else name)
            else:
                yield f"{prefix}/{name}" if prefix else name

    # ---------------------------------------------------------------- the root

    def _settle(self) -> None:
        """Make root and marker durable; what is there already stays."""
        try:
            missing = [folder for folder in (self.root, *self.root.parents) if not self._files.exists(folder)]
            for folder in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    self._files.mkdir(folder)
                self._files.fsync_directory(folder.parent)
            if not self._files.exists(self.root / MARKER):
                with contextlib.suppress(FileExistsError):
                    fd = self._files.create(self.root / MARKER)
                    try:
                        self._files.write(fd, memoryview(MARKER_TEXT))
                        self._files.fsync(fd)
                    finally:
                        self._files.close(fd)
                self._files.fsync_directory(self.root)
        except OSError as error:
            raise translate(error, f"{self.label} tier {self.where}") from error
        self._seen = True

    def _look(self) -> None:
        try:
            if not self._files.exists(self.root):
                raise TierMissing(f"{self.where}: there is no such directory")
            self._seen = self._files.exists(self.root / MARKER)
        except OSError as error:
            raise translate(error, f"{self.label} tier {self.where}") from error

    def _check(self) -> None:
        """Raises ``TierAway`` on a bare mount point: writing there would fill the wrong disk and hide it."""
        if not self._seen:
            return
        try:
            there = self._files.exists(self.root / MARKER)
        except OSError as error:
            raise TierAway(f"{self.where} does not answer: {error.strerror}; is the file system healthy?") from error
        if not there:
            self._made.clear()
            raise TierAway(
                f"{self.where} has lost its marker file {MARKER}: the file system is not mounted, or somebody emptied "
                f"it. Nothing is written there until it is back (or make the marker anew with touch)"
            )

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise TierDenied(f"{name!r} is not a name of an object in {self.where}")
        return self.root.joinpath(*parts)

    def _explain(self, error: OSError, name: str) -> TierError:
        if error.errno == errno.ENOENT:
            try:
                self._check()
            except TierAway as away:
                return away
        elif error.errno == errno.ENOTDIR:
            return TierMissing(f"{self.where}/{name}: {error.strerror}")
        return translate(error, f"{self.where}/{name}" if name else self.where)


@functools.cache
def _host() -> str:
    """The host's name for people, and what tells it from others of that name."""
    name = socket.gethostname().replace("~", "-").replace("/", "-")[:100]
    return f"{name}-{hashlib.sha256(place().encode()).hexdigest()[:8]}"


def _writer_is_gone(name: str) -> bool:
    """Whether a temporary file belongs to a process of this host that no longer runs."""
    parts = name.removeprefix(TEMPORARY).split("~")
    if len(parts) < 3 or parts[0] != _host() or not parts[1].isdigit():
        return False
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
