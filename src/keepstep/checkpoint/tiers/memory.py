"""Memory: a tier in this process, for tests and for trying things out. It outlives nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from keepstep.checkpoint.exceptions import TierMissing


class MemoryTier:
    """Objects are values of a dictionary."""

    def __init__(self, label: str = "remote", where: str = "memory://") -> None:
        self.label, self.where = label, where
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)  # a chunk is valid until the next one
        with self._lock:
            self.objects[name] = data
        return len(data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._object(name)
        if length is None:
            return data[start:]
        if start + length > len(data):
            raise TierMissing(f"{self.where}/{name}: ends at byte {len(data)}, {start + length} were expected")
        return data[start : start + length]

    def size(self, name: str) -> int:
        return len(self._object(name))

    def names(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            return iter(sorted(name for name in self.objects if name.startswith(prefix)))

    def remove(self, name: str) -> None:
        with self._lock:
            self.objects.pop(name, None)

    def path(self, name: str) -> Path | None:
        return None

    def sweep(self, older_than_s: float) -> int:
        return 0

    def _object(self, name: str) -> bytes:
        with self._lock:
            if name not in self.objects:
                raise TierMissing(f"{self.where}/{name}: there is no such object")
            return self.objects[name]
