"""Data sets for the tests, with and without a memory of their own place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keepstep.trainer.plain_torch import decode_plain, encode_plain


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """What a snapshot makes of a state."""
    found: dict[str, Any] = decode_plain(encode_plain(state, "data"))
    return found


class Forgetful:
    """Can be iterated again and again, always from its start."""

    def __init__(self, size: int, tag: int = 0) -> None:
        self.size, self.tag = size, tag
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            self.reads += 1
            yield (self.tag, number)


class Remembering(Forgetful):
    """Knows its place itself, goes on from there when it is iterated, and from its start after its end."""

    def __init__(self, size: int, tag: int = 0) -> None:
        super().__init__(size, tag)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            self.at += 1
            self.reads += 1
            yield (self.tag, self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Iterating:
    """Its iterators know their place."""

    def __init__(self, size: int, tag: int = 0) -> None:
        self.size, self.tag = size, tag

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self)


class _Iterator:
    def __init__(self, source: Iterating) -> None:
        self.source, self.at = source, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == self.source.size:
            raise StopIteration
        self.at += 1
        return (self.source.tag, self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


SOURCES = {"forgetful": Forgetful, "remembering": Remembering, "iterating": Iterating}
