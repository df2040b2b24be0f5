"""A file system in memory that remembers which operations a power loss may undo.

After a loss there is, of each file, what was written before its last fsync, and perhaps more; of each directory, the
entries at its last fsync, and perhaps later changes, in any combination: journals differ, and POSIX promises no order.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from keepstep.checkpoint.tiers.files import Files

Mood = Literal["nothing", "everything", "names", "bytes", "random"]
"""What of the operations that were not made durable survives."""
MOODS: tuple[Mood, ...] = ("nothing", "everything", "names", "bytes", "random")


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[tuple[tuple[str, File | Folder | None], ...]] = field(default_factory=list)
    """Since the last fsync: each change sets or removes names, all of it or none."""

    def change(self, *pairs: tuple[str, File | Folder | None]) -> None:
        for name, node in pairs:
            if node is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = node
        self.changes.append(pairs)


class Disk(Files):
    """The operations of ``Files`` on memory.

    ``steps`` counts those that change something; after ``stop_after`` of them the power goes. ``before`` is called
    before each.
    """

    def __init__(self, stop_after: int = 10**9, before: Callable[[Disk], None] = lambda _: None) -> None:
        self.root = Folder()
        self.steps, self.stop_after, self._before = 0, stop_after, before
        self._open: dict[int, File] = {}

    def _step(self) -> None:
        if self.steps >= self.stop_after:
            raise PowerLoss
        self._before(self)
        self.steps += 1

    def _find(self, path: Path) -> File | Folder:
        node: File | Folder = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.entries[name]
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._find(path)
        assert isinstance(node, Folder)
        return node

    def _file(self, path: Path) -> File:
        node = self._find(path)
        assert isinstance(node, File)
        return node

    # ---------------------------------------------------------------- operations

    def mkdir(self, path: Path) -> None:
        parent = self._folder(path.parent)
        if path.name in parent.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._step()
        parent.change((path.name, Folder()))

    def create(self, path: Path) -> int:
        parent = self._folder(path.parent)
        if path.name in parent.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._step()
        file = File()
        parent.change((path.name, file))
        fd = max(self._open, default=2) + 1
        self._open[fd] = file
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._step()
        self._open[fd].data += data
        return len(data)

    def fsync(self, fd: int) -> None:
        self._step()
        self._open[fd].durable = bytes(self._open[fd].data)

    def close(self, fd: int) -> None:
        del self._open[fd]

    def forget(self, path: Path) -> None:
        return

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "only within a directory is a rename one change"
        parent, node = self._folder(old.parent), self._find(old)
        self._step()
        parent.change((old.name, None), (new.name, node))

    def fsync_directory(self, path: Path) -> None:
        folder = self._folder(path)
        self._step()
        folder.durable, folder.changes = dict(folder.entries), []

    def unlink(self, path: Path) -> None:
        self._file(path)
        self._step()
        self._folder(path.parent).change((path.name, None))

    def rmdir(self, path: Path) -> None:
        if self._folder(path).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._step()
        self._folder(path.parent).change((path.name, None))

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        data = self._file(path).data
        return bytes(data[start : len(data) if length is None else start + length])

    def size(self, path: Path) -> int:
        return len(self._file(path).data)

    def changed(self, path: Path) -> float:
        self._find(path)
        return 0.0

    def exists(self, path: Path) -> bool:
        try:
            self._find(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def entries(self, path: Path) -> Iterator[tuple[str, bool]]:
        return iter([(name, isinstance(node, Folder)) for name, node in self._folder(path).entries.items()])

    # ---------------------------------------------------------------- the loss

    def after_loss(self, mood: Mood, luck: random.Random) -> Disk:
        """What the next start finds."""
        disk = Disk()
        disk.root = _survivor(self.root, mood, luck, {})
        return disk


class PowerLoss(BaseException):
    """The machine is off; nothing runs any more, no handler either."""


def _survivor(folder: Folder, mood: Mood, luck: random.Random, done: dict[int, File | Folder]) -> Folder:
    found = Folder()
    done[id(folder)] = found
    entries = dict(folder.durable)
    for change in folder.changes:
        if mood in ("everything", "names") or (mood == "random" and luck.random() < 0.5):
            for name, node in change:
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
    for name, node in entries.items():
        if id(node) not in done:
            done[id(node)] = (
                _survivor(node, mood, luck, done) if isinstance(node, Folder) else _content(node, mood, luck)
            )
        found.entries[name] = done[id(node)]
    found.durable = dict(found.entries)
    return found


def _content(file: File, mood: Mood, luck: random.Random) -> File:
    data = bytes(file.data)
    if data != file.durable and mood not in ("everything", "bytes"):
        extra = len(data) - len(file.durable)
        fate = luck.choice(("lost", "short", "zeros", "whole")) if mood == "random" else "lost"
        kept = {"lost": 0, "short": luck.randint(0, extra), "zeros": 0, "whole": extra}[fate]
        data = file.durable + data[len(file.durable) : len(file.durable) + kept]
        if fate == "zeros":  # the length is in the journal, the bytes are not
            data += bytes(extra)
    return File(bytearray(data), data)
