"""Members of groups as real processes, forked from one process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
ANSWER_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed._functional_collectives",
        "torch._dynamo",
        "keepstep.trainer.frameworks_torch",
        "keepstep.trainer.groups_torch",
    ]
)


class Member:
    """One process and the conversation with it."""

    def __init__(self, scenario: str, options: dict[str, Any]) -> None:
        from tests.trainer.groups.members_torch import body

        self.conn: Connection
        self.conn, theirs = _context.Pipe()
        self.process = _context.Process(target=body, args=(scenario, theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, within_s: float = ANSWER_S) -> Any:
        """The next thing it says."""
        if not self.conn.poll(within_s):
            raise TimeoutError(f"process {self.process.pid} said nothing for {within_s} s")
        try:
            said = self.conn.recv()
        except EOFError:
            self.process.join(5)
            raise RuntimeError(f"process {self.process.pid} ended with {self.process.exitcode}") from None
        if isinstance(said, tuple) and said and said[0] == "error":
            raise RuntimeError(said[1])
        return said

    def tell(self, what: Any) -> None:
        self.conn.send(what)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def left(self, within_s: float = ANSWER_S) -> int | None:
        """Its exit code, once it has left by itself."""
        self.process.join(within_s)
        return self.process.exitcode


class Stage:
    """Starts members and stores, and ends them all."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._stores: Member | None = None

    def store(self) -> int:
        """Port of a store that nobody has used."""
        if self._stores is None:
            self._stores = self.start("serve_stores")
        self._stores.tell("one more")
        return int(self._stores.hear())

    def start(self, scenario: str, **options: Any) -> Member:
        member = Member(scenario, options)
        self.members.append(member)
        return member

    def all(self, scenario: str, world: int, **options: Any) -> list[Member]:
        port = self.store()
        return [self.start(scenario, rank=r, world=world, port=port, **options) for r in range(world)]

    def close(self) -> None:
        for member in self.members:
            if member.process.is_alive():
                member.kill()
            member.conn.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        stage.close()
