"""Files: the few file operations of a directory tier, in one object that a test can record, delay and fail.

Nothing in this package touches a tier's files in any other way, so what a test sees through it is everything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class Files:
    """The operating system's own."""

    def mkdir(self, path: Path) -> None:
        """Raises ``FileExistsError`` when it is there."""
        os.mkdir(path, 0o755)

    def create(self, path: Path) -> int:
        """Open a file that must not exist yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def forget(self, path: Path) -> None:
        """Drop the file from the page cache, so that reading it back asks the device."""
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def fsync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            left = max(0, os.fstat(fd).st_size - start) if length is None else length
            parts = []
            while left > 0 and (data := os.pread(fd, left, start)):
                parts.append(data)
                start, left = start + len(data), left - len(data)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(fd)

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def changed(self, path: Path) -> float:
        """When it was last written, in seconds of the wall clock."""
        return os.stat(path).st_mtime

    def exists(self, path: Path) -> bool:
        """Raises ``OSError`` when that cannot be said."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def entries(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Names in a directory, and whether each is a directory itself."""
        with os.scandir(path) as found:
            for entry in found:
                yield entry.name, entry.is_dir()
